"""The run folder: what a run leaves behind. `output_folder.py` has the checks before a run uses one.

run.json            manifest: versions, time, hash of the recipe, status
recipe.yaml         the resolved recipe
environment.json    what it ran on
metrics.jsonl       one line a logged step
samples.jsonl       one line an answer: step, prompt, reference, answer
checkpoints/        checkpoint-<step>/, each with complete.json when it can be trusted
best/               the weights of the lowest held-out loss, where the run was evaluated during training
adapter/ or model/  the result: the last weights, or the best
last/               the last weights, where the result is the best and they differ
result.json         which of them the result is, with step and held-out loss of both
report.json, report.html, curves.png
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from finetune.errors import DataError, EnvironmentProblem, RecipeError
from finetune.run.atomic import overwrite_json, write_json, write_text
from finetune.run.checkpoints import CheckpointScan, scan_checkpoints, settle_checkpoints
from finetune.run.disk import is_disk_full
from finetune.run.inputs import fingerprints
from finetune.run.lock import lock_folder

SCHEMA_VERSION = 1
Status = Literal["running", "done", "early-stopped", "interrupted", "failed", "stopped"]
ENDED_WELL: tuple[Status, ...] = ("done", "early-stopped")
"""There is a result, and nothing to continue."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, its status and its checkpoints."""

    path: Path

    @property
    def manifest_path(self) -> Path:
        return self.path / "run.json"

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def report_json(self) -> Path:
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def curves_png(self) -> Path:
        return self.path / "curves.png"

    @property
    def adapter_dir(self) -> Path:
        return self.path / "adapter"

    @property
    def model_dir(self) -> Path:
        return self.path / "model"

    @property
    def best_dir(self) -> Path:
        return self.path / "best"

    @property
    def last_dir(self) -> Path:
        return self.path / "last"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest; raises as `read_manifest` does."""
        return read_manifest(self.path)

    @property
    def status(self) -> Status:
        return self.manifest()["status"]

    def set_status(self, status: Status) -> None:
        """Records how the run stands, and when it came to; on a full disk over the old record, without new space."""
        if status not in get_args(Status):
            raise ValueError(f"unknown status {status!r}")
        manifest = {**self.manifest(), "status": status, "updated": _now()}
        try:
            write_json(self.manifest_path, manifest)
        except OSError as error:
            if not is_disk_full(error):
                raise
            overwrite_json(self.manifest_path, manifest)

    @property
    def date(self) -> str | None:
        """The date (YYYY-MM-DD) that the run's chat template wrote when it began; None where it writes none."""
        return self.manifest().get("date")

    @property
    def hub_commits(self) -> dict[str, str]:
        """The commits of the datasets of the hub that the run began with, by `dataset@revision`."""
        return self.manifest().get("hub_commits") or {}

    def require_same_data(self, digest: str, *, date: str | None, hub_commits: Mapping[str, str] | None = None) -> None:
        """Records the hash of the run's data, or compares it with the one recorded when the run began.

        Args:
            date: the date that the chat template writes, recorded for the day that the run is continued on.
            hub_commits: those of the datasets of the hub, by `dataset@revision`, recorded for the same.

        Raises:
            DataError: the data are not those that the run began with.
        """
        manifest = self.manifest()
        recorded = manifest.get("data_digest")
        if recorded is None:
            found = {"data_digest": digest, "date": date, "hub_commits": dict(hub_commits or {})}
            write_json(self.manifest_path, manifest | found)
        elif recorded != digest:
            raise DataError(
                "the data differ from those that this run began with, so it cannot be continued on them",
                place=str(self.path),
                remedy="Put the data files back as they were, or start a new run with another output.dir."
                + "".join(
                    f"\nThe run read {name.rpartition('@')[0]} with `revision: {sha}`."
                    for name, sha in self.hub_commits.items()
                ),
            )

    def record_inputs(self, recipe: Mapping[str, object]) -> None:
        """Records what tells the recipe's inputs again at another place, unless it is recorded.

        Args:
            recipe: the resolved recipe as plain dicts and lists.
        """
        manifest = self.manifest()
        if "inputs" not in manifest:
            write_json(self.manifest_path, manifest | {"inputs": fingerprints(recipe)})

    def scan_checkpoints(self) -> CheckpointScan:
        """Returns the complete checkpoints, oldest first, and the incomplete ones with the reason."""
        return scan_checkpoints(self.checkpoints_dir)

    def settle_checkpoints(self, *, say: Callable[[str], None] = lambda text: None) -> CheckpointScan:
        """Returns the same for a run that goes on: what was damaged since it was written counts as incomplete from now
        on, and what a removal left is removed, of which `say` prints a line."""
        return settle_checkpoints(self.checkpoints_dir, say=say)

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest complete checkpoint; `scan_checkpoints` tells which ones were passed over."""
        return self.scan_checkpoints().latest

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other processes out of this folder for the length of a `with` block."""
        return lock_folder(self.path)


def create_run_folder(
    path: Path, *, recipe_text: str, recipe_hash: str, environment: Mapping[str, object]
) -> RunFolder:
    """Makes the folder and writes recipe, environment and, last, the manifest with status `running`.

    Raises:
        RecipeError: another process made a run here since `check_output_folder` of `output_folder.py`.
        EnvironmentProblem: the folder cannot be made.
    """
    run = RunFolder(Path(path).absolute())
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(run.path, error.strerror or str(error)) from error
    with run.lock():
        if run.manifest_path.exists():
            raise occupied(run.path)
        write_text(run.recipe_path, recipe_text)
        write_json(run.environment_path, environment)
        manifest = {"schema_version": SCHEMA_VERSION, "created": _now(), "recipe_hash": recipe_hash}
        write_json(run.manifest_path, {**manifest, "status": "running", "updated": _now()})
    return run


def open_run_folder(path: Path) -> RunFolder:
    """Returns the run in `path`; raises as `read_manifest` does, RecipeError where there is none."""
    path = Path(path).absolute()
    read_manifest(path)
    return RunFolder(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of the run in a folder.

    Raises:
        RecipeError: there is no run in the folder.
        DataError: the manifest is damaged, or of another version.
    """
    manifest_path = path / "run.json"
    if not manifest_path.is_file():
        raise RecipeError(
            "there is no run in this folder",
            place=str(path),
            remedy="Check the folder's name; leave out --resume to start a new run.",
        )
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise DataError(
            f"the run's manifest is of version {version}; this program reads version {SCHEMA_VERSION}",
            place=str(manifest_path),
            remedy="Use the version of finetune that made the run; its environment.json names it.",
        )
    if not isinstance(manifest, dict) or not _is_known_manifest(manifest):
        raise DataError(
            "the run's manifest is damaged",
            place=str(manifest_path),
            remedy="Put the file back from a copy. Without one the run cannot be continued: train its recipe.yaml "
            "again with another output.dir; adapter/, model/ and the checkpoints can still be used.",
        )
    return manifest


def _is_known_manifest(manifest: Mapping[str, Any]) -> bool:
    is_version = manifest.get("schema_version") == SCHEMA_VERSION
    return is_version and manifest.get("status") in get_args(Status) and "recipe_hash" in manifest


def occupied(path: Path) -> RecipeError:
    """Describes a folder that holds a run or anything else."""
    if not (path / "run.json").is_file():
        return RecipeError(
            "the folder holds files that are not a run of this program; they will not be touched",
            place=str(path),
            remedy="Set output.dir to a new or empty folder.",
        )
    run = RunFolder(path)
    if run.status in ENDED_WELL:
        remedy = "Set another output.dir."
    else:
        remedy = "Continue it with --resume, or set another output.dir."
    if run.latest_checkpoint() is None and not run.adapter_dir.exists() and not run.model_dir.exists():
        remedy += " The run saved no checkpoint and no result, so its folder can also be deleted."
    return RecipeError(f"the folder already holds a run (status: {run.status})", place=str(path), remedy=remedy)


def unwritable(path: Path, reason: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the run folder cannot be written: {reason}",
        place=str(path),
        remedy="Set output.dir to a folder that you may write to, or change the permissions of this one.",
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
