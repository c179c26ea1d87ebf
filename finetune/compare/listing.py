"""The runs below a folder, broken ones included, in an order of the user's choice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from finetune.compare.record import RunRecord, is_run_folder, read_run
from finetune.errors import FinetuneError, RecipeError

SortField = Literal["when", "name", "status", "model", "steps", "loss", "time"]
MAX_DEPTH = 5
"""Folders below the one given that are looked into."""
_LARGEST_FIRST = {"when", "steps", "time"}


@dataclass(frozen=True)
class ListedRun:
    """One line of the list; a broken run has a reason and, beside its name, nothing else."""

    path: Path
    name: str
    """The path below the folder that was listed."""
    status: str
    created: datetime | None = None
    model: str | None = None
    method: str | None = None
    """Training method and adapter, such as `sft lora`; `sft full` where all weights are trained."""
    steps: int | None = None
    total_steps: int | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    loss_kind: Literal["held-out", "train"] | None = None
    seconds: float | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        values = {**vars(self), "path": str(self.path)}
        values["created"] = self.created.isoformat(timespec="seconds") if self.created else None
        return values


def list_runs(folder: Path, *, sort: str) -> list[ListedRun]:
    """Returns the runs in and below a folder, to a depth of `MAX_DEPTH`; nothing inside a run is looked at.

    Raises:
        RecipeError: the folder does not exist, or there is no such field to sort by.
    """
    if sort not in get_args(SortField):
        fields = ", ".join(get_args(SortField))
        raise RecipeError(f"there is no field `{sort}` to sort by", place="--sort", remedy=f"Use one of: {fields}.")
    if not folder.is_dir():
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        raise RecipeError(what, place=str(folder), remedy="Name the folder that holds your runs, such as runs.")
    return _sorted(list(_listed_below(folder)), sort)


def _listed_below(folder: Path) -> Iterator[ListedRun]:
    unreadable: list[ListedRun] = []

    def note(error: OSError) -> None:
        path = Path(error.filename)
        unreadable.append(_broken(path, folder, f"the folder cannot be read: {error.strerror}"))

    for place, folders, _ in os.walk(folder, onerror=note):
        path = Path(place)
        try:
            is_run = is_run_folder(path)
        except OSError as error:
            unreadable.append(_broken(path, folder, f"the folder cannot be read: {error.strerror}"))
            folders.clear()
            continue
        depth = len(path.relative_to(folder).parts)
        folders[:] = [] if is_run or depth >= MAX_DEPTH else sorted(name for name in folders if name[0] != ".")
        if is_run:
            yield _listed(path, folder)
    yield from unreadable


def _listed(path: Path, folder: Path) -> ListedRun:
    try:
        return _described(read_run(path), _name(path, folder))
    except FinetuneError as error:
        return _broken(path, folder, f"{Path(error.place).name}: {error.message}")


def _described(run: RunRecord, name: str) -> ListedRun:
    summary, model = run.summary, run.recipe_value("model.path")
    kind = "held-out" if summary["eval_loss_after"] is not None or summary["eval_loss_before"] is not None else "train"
    keys = ("eval_loss_before", "eval_loss_after") if kind == "held-out" else ("train_loss_first", "train_loss_last")
    adapter = run.recipe_value("adapter.type")
    method = [run.recipe_value("training.method"), "full" if adapter == "none" else adapter]
    before, after = (summary[key] for key in keys)
    return ListedRun(
        path=run.path,
        name=name,
        status=run.status,
        created=run.created,
        model=Path(model).name if isinstance(model, str) else None,
        method=" ".join(str(part) for part in method if part) or None,
        steps=summary["steps"],
        total_steps=run.section("plan").get("total_steps"),
        loss_before=before,
        loss_after=after,
        loss_kind=None if before is None and after is None else kind,
        seconds=run.seconds,
    )


def _broken(path: Path, folder: Path, reason: str) -> ListedRun:
    return ListedRun(path.absolute(), _name(path, folder), "broken", reason=reason)


def _name(path: Path, folder: Path) -> str:
    name = str(path.relative_to(folder))
    return path.absolute().name if name == "." else name


def _sorted(runs: list[ListedRun], field: str) -> list[ListedRun]:
    """Sorts by a field, newest, longest and largest first, else the smallest; runs without a value come last."""
    key = {"when": "created", "loss": "loss_after", "time": "seconds"}.get(field, field)
    runs = sorted(runs, key=lambda run: run.name)
    known = [run for run in runs if getattr(run, key) is not None]
    known.sort(key=lambda run: getattr(run, key), reverse=field in _LARGEST_FIRST)
    return known + [run for run in runs if getattr(run, key) is None]
