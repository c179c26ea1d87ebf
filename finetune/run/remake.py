"""Makes a run's page and picture again from what lies in its folder: `finetune report`.

It reads only, holds no lock, and so can look at a run that goes on. `report.json` stays as the run wrote it: at its
start, before its first step and at its end. What is newer comes from `run.json`, `metrics.jsonl`, `samples.jsonl` and
the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import DataError, EnvironmentProblem, RecipeError
from finetune.run.atomic import write_text
from finetune.run.folder import RunFolder, open_run_folder
from finetune.run.html import render_html
from finetune.run.lock import KILLED, is_locked, seen_status
from finetune.run.metrics import read_metrics
from finetune.run.page import require_page_name, require_replaceable
from finetune.run.plots import write_curves_png
from finetune.run.report import ReportInputs, build_report, summary
from finetune.run.samples import read_samples

_PNG_START = b"\x89PNG"


@dataclass(frozen=True)
class RemadeReport:
    """What was made, for `--json`."""

    status: str
    run_dir: str
    page: str
    picture: str | None
    """None where nothing was logged yet."""
    steps: int
    total_steps: int | None
    """None where the run ended before it knew."""
    summary: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns the same for people."""
        total = f" of {self.total_steps:,}" if self.total_steps is not None else ""
        picture = [f"picture  {self.picture}"] if self.picture is not None else []
        return [f"status   {self.status}, step {self.steps:,}{total}", f"page     {self.page}", *picture]


def remake_report(folder: Path, *, output: Path | None = None) -> RemadeReport:
    """Writes the page of a run and the picture of its curves, each in one step.

    Args:
        folder: a run folder, whatever its status.
        output: the page's file, its picture beside it with the ending `.png`; None writes `report.html` and
            `curves.png` into the run folder. A file that is there is replaced where it is a page or picture already.

    Raises:
        RecipeError: there is no run in the folder (the remedy names `finetune runs`), or `output` names something that
            would be lost.
        DataError: a file of the run is damaged.
        EnvironmentProblem: the page cannot be written there.
    """
    run = _open(folder)
    page, beside = _outputs(run, output)
    metrics = read_metrics(run.metrics_path)
    report = read_report(run, metrics)
    picture = beside if metrics else None
    try:
        write_text(page, render_html(report, metrics, answers=read_samples(run.samples_path)))
        if picture is not None:
            write_curves_png(metrics, picture)
    except OSError as error:
        raise EnvironmentProblem(
            f"the page cannot be written: {error.strerror or error}",
            place=str(page),
            remedy="Name a file in an existing folder that you may write to, with --output FILE.",
        ) from error
    return RemadeReport(
        status=report["status"],
        run_dir=str(run.path),
        page=str(page),
        picture=None if picture is None else str(picture),
        steps=report["summary"]["steps"],
        total_steps=(report.get("plan") or {}).get("total_steps"),
        summary=report["summary"],
    )


def read_report(run: RunFolder, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the run's report as it stands: what the run wrote, with the status, figures and checkpoints of now."""
    is_held = is_locked(run.path)  # asked first: a run that ends in between has then written its status
    status = seen_status(run.status, is_locked=is_held)
    stored = _stored_report(run)
    result = _read_yaml(run.result_path) or stored.get("result") or {}
    report = {**stored, "status": status, "summary": summary(metrics, result), "result": result}
    report["checkpoints"] = [{"path": str(path)} for path in run.scan_checkpoints().complete]
    if status in ("running", KILLED):
        report["created"] = datetime.now(UTC).isoformat(timespec="seconds")
        report["message"] = _progress(run, report, metrics)
        trained_for = next(
            (record["elapsed_seconds"] for record in reversed(metrics) if "elapsed_seconds" in record), 0
        )
        report["timings"] = {**(stored.get("timings") or {}), "training_seconds": trained_for}
    return report


def _open(folder: Path) -> RunFolder:
    try:
        return open_run_folder(folder)
    except RecipeError as error:
        remedy = "Name the folder of a run, such as runs/NAME; `finetune runs` lists those that there are."
        raise RecipeError(error.message, place=error.place, remedy=remedy) from error


def _outputs(run: RunFolder, output: Path | None) -> tuple[Path, Path]:
    """Returns where page and picture go, having looked that they replace nothing else and no other file of the run."""
    if output is None:
        return run.report_html, run.curves_png
    page = Path(output).absolute()
    settled = page.parent.resolve() / page.name
    if settled == run.path.resolve() / run.report_html.name:
        return run.report_html, run.curves_png
    if settled.is_relative_to(run.path.resolve()):
        raise RecipeError(
            "the file lies in the run folder, where report.html is the only page",
            place=str(page),
            remedy="Leave --output out to write report.html there, or name a file outside the run folder.",
        )
    require_page_name(page)
    picture = page.with_suffix(".png")
    require_replaceable(picture, begins=_PNG_START, what="PNG picture")
    return page, picture


def _stored_report(run: RunFolder) -> dict[str, Any]:
    """Returns `report.json`; a run that was killed before it wrote one has its recipe and environment."""
    if run.report_json.is_file():
        try:
            stored = json.loads(run.report_json.read_text(encoding="utf-8"))
        except ValueError:
            stored = None
        if isinstance(stored, dict):
            return stored
        raise DataError(
            "the run's report is not a JSON object",
            place=str(run.report_json),
            remedy="Remove the file; the page is then made of the other files of the run.",
        )
    recipe, environment = (_read_yaml(path) for path in (run.recipe_path, run.environment_path))
    return build_report(ReportInputs(status=run.status, recipe=recipe, environment=environment))


def _read_yaml(path: Path) -> dict[str, Any]:
    """Reads YAML or JSON; a file that the run did not come to write gives nothing."""
    if not path.is_file():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        values = None
    if isinstance(values, dict):
        return values
    raise DataError(
        "the file holds no keys and values",
        place=str(path),
        remedy="Put the file back as the run wrote it, or remove it; the page then lacks its part.",
    )


def _progress(run: RunFolder, report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Returns how far a run is that has not ended, and when it last gave a sign."""
    if not metrics:
        return "The run has begun; no step is logged yet."
    total = (report.get("plan") or {}).get("total_steps")
    step = report["summary"]["steps"]
    written = datetime.fromtimestamp(run.metrics_path.stat().st_mtime, UTC).isoformat(sep=" ", timespec="seconds")
    so_far = f"Step {step:,}{f' of {total:,}' if total else ''}; the last line was logged at {written[:19]} UTC."
    return f"{so_far} The process was killed." if report["status"] == KILLED else so_far
