"""A run as its folder tells it, whether it is done, failed, was killed or still goes on.

Only the manifest and the recipe must be readable. What a run writes later (metrics, the report) may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finetune.errors import DataError, EnvironmentProblem, RecipeError
from finetune.recipe.schema import Recipe
from finetune.run.folder import RunFolder
from finetune.run.lock import KILLED, is_locked, seen_status
from finetune.run.metrics import MetricsRecord, read_metrics
from finetune.run.report import summary


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, read at one moment."""

    path: Path
    manifest: Mapping[str, Any]
    recipe: Mapping[str, Any]
    """The recipe as plain values; keys that this version adds have their defaults where it still reads the recipe."""
    environment: Mapping[str, Any]
    """Empty where the file is missing."""
    metrics: list[MetricsRecord]
    report: Mapping[str, Any]
    """The report of the run's last ending; empty where it has not ended yet."""
    result: Mapping[str, Any]
    """What `result.json` holds; empty where there is no result yet."""
    is_locked: bool

    @property
    def status(self) -> str:
        """The status as `seen_status` tells it."""
        return seen_status(self.manifest["status"], is_locked=self.is_locked)

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures of `summary` of the report, from the metrics themselves, so also of a run that goes on."""
        return summary(self.metrics, self.result)

    @property
    def created(self) -> datetime | None:
        return _time(self.manifest.get("created"))

    @property
    def seconds(self) -> float | None:
        """Seconds that the run took, in its last attempt where it was continued, or has taken so far."""
        total = self.section("timings").get("total_seconds")
        if self.status not in ("running", KILLED) and isinstance(total, int | float):
            return float(total)
        end = datetime.now(UTC) if self.is_locked else _time(self.manifest.get("updated"))
        return (end - self.created).total_seconds() if end and self.created and self.status != KILLED else None

    def section(self, name: str) -> Mapping[str, Any]:
        """Returns a section of the report; empty where there is none."""
        value = self.report.get(name)
        return value if isinstance(value, Mapping) else {}

    def recipe_value(self, dotted_key: str) -> Any:
        """Returns a value of the recipe, None where it has no such key."""
        value: Any = self.recipe
        for key in dotted_key.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def is_run_folder(folder: Path) -> bool:
    """Says whether a folder is a run, also one that was killed while it was being made."""
    run = RunFolder(folder)
    return run.manifest_path.exists() or (run.recipe_path.is_file() and run.environment_path.is_file())


def read_run(path: Path) -> RunRecord:
    """Reads the run in a folder.

    Raises:
        RecipeError: there is no run here.
        DataError: a file of the run is damaged or missing.
        EnvironmentProblem: a file cannot be read.
    """
    run = RunFolder(path.absolute())
    if not run.path.is_dir() or not is_run_folder(run.path):
        what = "there is no run in this folder" if run.path.is_dir() else "there is no such folder"
        raise RecipeError(what, place=str(path), remedy="Check the path; `finetune runs DIR` lists the runs below DIR.")
    if not run.manifest_path.is_file():
        raise _damaged(run.manifest_path, "the run has no manifest: it was stopped while its folder was made")
    try:
        manifest = run.manifest()
    except OSError as error:
        raise _unreadable(run.manifest_path, error) from error
    metrics = []
    try:
        locked = is_locked(run.path)
        metrics = read_metrics(run.metrics_path)
    except OSError as error:
        raise _unreadable(Path(error.filename or run.path), error) from error
    report = _read_object(run.report_json)
    return RunRecord(
        path=run.path,
        manifest=manifest,
        recipe=_read_recipe(run.recipe_path),
        environment=_read_object(run.environment_path),
        metrics=metrics,
        report=report,
        result=_read_object(run.result_path) or report.get("result") or {},
        is_locked=locked,
    )


def _read_recipe(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise _damaged(path, "the run's recipe is no YAML") from error
    except FileNotFoundError as error:
        raise _damaged(path, "the run's recipe is missing") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise _damaged(path, "the run's recipe holds no sections")
    try:
        return Recipe.model_validate(values).model_dump(mode="json")
    except ValidationError:  # a recipe of another version: compared as it was written
        return values


def _read_object(path: Path) -> Mapping[str, Any]:
    """Returns the object of a JSON file; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _damaged(path, "the file is no JSON") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise _damaged(path, "the file holds no JSON object")
    return value


def _time(text: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return time.replace(tzinfo=UTC) if time and time.tzinfo is None else time


def _damaged(path: Path, message: str) -> DataError:
    remedy = "Put the file back from a copy, or remove the run's folder if nothing in it is needed."
    return DataError(message, place=str(path), remedy=remedy)


def _unreadable(path: Path, error: OSError) -> EnvironmentProblem:
    reason = error.strerror or str(error)
    return EnvironmentProblem(f"cannot be read: {reason}", place=str(path), remedy="Check its permissions.")
