"""The run folder: what a run leaves behind, and the checks that keep one run from touching another.

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
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from finetune.errors import DataError, EnvironmentProblem, RecipeError
from finetune.run.atomic import overwrite_json, write_json, write_text
from finetune.run.checkpoints import CheckpointScan, scan_checkpoints
from finetune.run.disk import is_disk_full, nearest_existing_folder
from finetune.run.lock import lock_folder, require_unlocked

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
        """Returns the manifest; raises RecipeError where this is not a run of a known version."""
        return _read_manifest(self.path)

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

    def scan_checkpoints(self) -> CheckpointScan:
        """Returns the complete checkpoints, oldest first, and the incomplete ones with the reason."""
        return scan_checkpoints(self.checkpoints_dir)

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest complete checkpoint; `scan_checkpoints` tells which ones were passed over."""
        return self.scan_checkpoints().latest

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other processes out of this folder for the length of a `with` block."""
        return lock_folder(self.path)


def check_output_folder(
    path: Path,
    *,
    recipe_hash: str,
    resume: bool,
    recipe: Mapping[str, object] | None = None,
    may_differ: Collection[str] = (),
) -> None:
    """Checks, writing nothing, that a run may use this folder.

    Args:
        path: the run folder; it need not exist.
        recipe_hash: hash of the resolved recipe.
        resume: whether the run in the folder is to be continued.
        recipe: the resolved recipe as plain dicts and lists, to name the keys that differ from the run's.
        may_differ: dotted keys (`training.max_steps`) that a continued run may change; a key stands for those below.

    Raises:
        RecipeError: the folder belongs to something else, or there is no such run to continue.
        EnvironmentProblem: the folder cannot be written, or another process trains into it.
    """
    path = Path(path).absolute()
    _require_writable(path)
    if path.exists() and not path.is_dir():
        raise RecipeError("output.dir is a file", place=str(path), remedy="Set output.dir to a folder.")
    if resume:
        _check_resume(path, recipe_hash=recipe_hash, recipe=recipe, may_differ=may_differ)
    elif path.exists() and any(path.iterdir()):
        raise _occupied(path)


def create_run_folder(
    path: Path, *, recipe_text: str, recipe_hash: str, environment: Mapping[str, object]
) -> RunFolder:
    """Makes the folder and writes recipe, environment and, last, the manifest with status `running`.

    Raises:
        RecipeError: another process made a run here since `check_output_folder`.
        EnvironmentProblem: the folder cannot be made.
    """
    run = RunFolder(Path(path).absolute())
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run.path, error.strerror or str(error)) from error
    with run.lock():
        if run.manifest_path.exists():
            raise _occupied(run.path)
        write_text(run.recipe_path, recipe_text)
        write_json(run.environment_path, environment)
        manifest = {"schema_version": SCHEMA_VERSION, "created": _now(), "recipe_hash": recipe_hash}
        write_json(run.manifest_path, {**manifest, "status": "running", "updated": _now()})
    return run


def open_run_folder(path: Path) -> RunFolder:
    """Returns the run in `path`; raises RecipeError where there is none."""
    path = Path(path).absolute()
    _read_manifest(path)
    return RunFolder(path)


def differing_keys(old: object, new: object, *, prefix: str = "") -> list[str]:
    """Returns the dotted keys whose values differ between two nested structures, such as `data.train[0].path`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        missing = object()
        pairs = [
            (f"{prefix}.{key}" if prefix else str(key), old.get(key, missing), new.get(key, missing)) for key in keys
        ]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{prefix}[{index}]", left, right) for index, (left, right) in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new else [prefix]
    return [found for key, left, right in pairs for found in differing_keys(left, right, prefix=key)]


def _check_resume(
    path: Path, *, recipe_hash: str, recipe: Mapping[str, object] | None, may_differ: Collection[str]
) -> None:
    run = RunFolder(path)
    manifest = _read_manifest(path)
    stored_hash = manifest["recipe_hash"]
    require_unlocked(path)
    if manifest["status"] in ENDED_WELL:
        raise RecipeError(
            "the run is done; there is nothing to continue",
            place=str(path),
            remedy="Look at its report.html, or start a new run with another output.dir; adapter.continue_from there "
            "trains this run's adapter on.",
        )
    if stored_hash == recipe_hash:
        return
    named = ""
    if recipe is not None:
        keys = differing_keys(_read_recipe(run.recipe_path), recipe)
        strict = [key for key in keys if not _is_covered(key, may_differ)]
        if keys and not strict:
            return
        named = ": " + ", ".join(strict) if strict else ", although its keys are equal: recipe.yaml was edited"
    raise RecipeError(
        f"the recipe differs from that of the run to continue{named}",
        place=str(run.recipe_path),
        remedy="Continue with the run's own recipe.yaml, or start a new run with another output.dir.",
    )


def _is_covered(key: str, allowed: Collection[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in allowed)


def _read_recipe(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(
            "the run's recipe cannot be read",
            place=str(path),
            remedy="Start a new run with another output.dir.",
        ) from error


def _read_manifest(path: Path) -> dict[str, Any]:
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
    if not isinstance(manifest, dict) or not _is_known_manifest(manifest):
        raise RecipeError(
            f"the run's manifest is damaged or not of version {SCHEMA_VERSION}",
            place=str(manifest_path),
            remedy="Use the version of finetune that made the run (environment.json names it), or another output.dir.",
        )
    return manifest


def _is_known_manifest(manifest: Mapping[str, Any]) -> bool:
    is_version = manifest.get("schema_version") == SCHEMA_VERSION
    return is_version and manifest.get("status") in get_args(Status) and "recipe_hash" in manifest


def _occupied(path: Path) -> RecipeError:
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


def _require_writable(path: Path) -> None:
    try:
        existing = nearest_existing_folder(path)
        is_writable = not existing.is_dir() or os.access(existing, os.W_OK | os.X_OK)
        # A file further up in place of a folder: nothing can be made below it.
        is_below_file = existing.is_file() and existing != path
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    if is_below_file:
        raise RecipeError("a parent of output.dir is a file", place=str(existing), remedy="Set another output.dir.")
    if not is_writable:
        raise _unwritable(existing, "no permission to write there")


def _unwritable(path: Path, reason: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the run folder cannot be written: {reason}",
        place=str(path),
        remedy="Set output.dir to a folder that you may write to, or change the permissions of this one.",
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
