"""`best/`: the weights of the lowest held-out loss so far, replaced as a whole or not at all.

The new weights are written beside the old ones, which go only after the new ones are complete on the disk. So a run
that is killed at any moment leaves one complete set of weights, in `best/` or in `best.new/`; `settle_best` puts the
latter in its place. `fault_of_best` compares checksums, before weights are relied on that an earlier start wrote, and
before they are delivered.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finetune.run.atomic import sync_folder, write_json
from finetune.run.checkpoints import MARKER, damage_of, fault_of, mark_complete

RECORD = "best.json"
"""Says of which step the weights are, and their held-out loss."""


@dataclass(frozen=True)
class Best:
    """Complete weights in `path`."""

    path: Path
    step: int
    eval_loss: float


def read_best(folder: Path) -> Best | None:
    """Returns what lies in `folder`, or None where nothing complete does; no weights are read."""
    if fault_of(folder) is not None:
        return None
    record = _read_record(folder)
    return None if record is None else Best(folder, *record)


def fault_of_best(folder: Path) -> str | None:
    """Returns why the weights in `folder` are not those that were written, or None; reads all of them."""
    fault = fault_of(folder) or damage_of(folder)
    return f"its {RECORD} is damaged" if fault is None and _read_record(folder) is None else fault


def forget_best(folder: Path) -> None:
    """Removes what lies in `folder`."""
    shutil.rmtree(folder)
    sync_folder(folder.parent)


def settle_best(folder: Path) -> Best | None:
    """Ends a replacement that was cut off, forwards where the new weights are complete; returns what there is then."""
    new = _new(folder)
    if new.exists():
        if fault_of(new) is None:
            _swap(folder)
        else:
            shutil.rmtree(new)
    return read_best(folder)


def replace_best(folder: Path, *, step: int, eval_loss: float, write: Callable[[Path], None]) -> Best:
    """Puts new weights in place of those in `folder`, if any.

    Args:
        write: saves the weights into the folder that it is given.
    """
    new = _new(folder)
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)
    write(new)
    write_json(new / RECORD, {"step": step, "eval_loss": eval_loss})
    mark_complete(new)
    _swap(folder)
    return Best(folder, step, eval_loss)


def copy_weights(source: Path, target: Path) -> None:
    """Copies a result folder, without the record and the marker of `best/`.

    Weights are linked where the file system can, so that a large model does not take its space twice.
    """
    shutil.copytree(
        source, target, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(RECORD, MARKER), dirs_exist_ok=True
    )


def _link_or_copy(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
        except OSError:  # a file system without hard links
            shutil.copy2(source, target)
    else:
        shutil.copy2(source, target)


def _read_record(folder: Path) -> tuple[int, float] | None:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        step, eval_loss = record["step"], record["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_number = isinstance(eval_loss, int | float) and math.isfinite(eval_loss)
    return (step, float(eval_loss)) if isinstance(step, int) and is_number else None


def _new(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.new")


def _swap(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    _new(folder).rename(folder)
    sync_folder(folder.parent)
