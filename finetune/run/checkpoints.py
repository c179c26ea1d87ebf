"""Which checkpoints can be trusted: a marker, written last, lists size and checksum of every file.

A run that is killed while a checkpoint is written, or while an old one is removed, leaves a folder without a marker or
with files that do not match it. Such a folder is never resumed from. Sizes are compared wherever checkpoints are
listed, checksums once, before a run goes on. They are CRC-32: they are to tell damage, not forgery, and 4 GiB a second
(measured on one core, from memory) cost little beside the writing. Where a marker has none, as those of earlier
versions, the files are looked at instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.run.atomic import sync_file, sync_folder, write_json
from finetune.run.readable import unreadable_file

MARKER = "complete.json"
"""Name of the marker inside a checkpoint folder."""
MARKER_VERSION = 1
_BLOCK_BYTES = 16 << 20
_WHOLE_BYTES = 1 << 30
"""Of larger files the checksum covers as many bytes: blocks from the first to the last, evenly spread. What makes a
file readable stands at its beginning (safetensors) or end (torch)."""

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class IncompleteCheckpoint:
    """A checkpoint folder that is not resumed from, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class CheckpointScan:
    """The checkpoints of a folder, oldest step first."""

    complete: tuple[Path, ...]
    incomplete: tuple[IncompleteCheckpoint, ...]

    @property
    def latest(self) -> Path | None:
        return self.complete[-1] if self.complete else None


def checkpoint_step(path: Path) -> int | None:
    """Returns the step in a folder name such as `checkpoint-120`, or None where the name is another."""
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def mark_complete(checkpoint_dir: Path) -> None:
    """Flushes every file of the checkpoint to the disk and then writes its marker."""
    sizes: dict[str, int] = {}
    checksums: dict[str, str] = {}
    folders = [checkpoint_dir]
    for path in sorted(checkpoint_dir.rglob("*")):
        if path.is_dir():
            folders.append(path)
        elif path.is_file() and path != checkpoint_dir / MARKER:
            sync_file(path)
            name = path.relative_to(checkpoint_dir).as_posix()
            sizes[name], checksums[name] = path.stat().st_size, _checksum(path)
    for folder in folders:
        sync_folder(folder)
    marker = {"marker_version": MARKER_VERSION, "step": checkpoint_step(checkpoint_dir), "files": sizes}
    write_json(checkpoint_dir / MARKER, marker | {"checksums": checksums})
    sync_folder(checkpoint_dir.parent)


def scan_checkpoints(folder: Path) -> CheckpointScan:
    """Sorts the checkpoints of `folder` into complete and incomplete ones; a missing folder has none."""
    if not folder.is_dir():
        return CheckpointScan((), ())
    numbered = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    complete: list[Path] = []
    incomplete: list[IncompleteCheckpoint] = []
    for _, path in sorted(numbered):
        fault = fault_of(path)
        if fault is None:
            complete.append(path)
        else:
            incomplete.append(IncompleteCheckpoint(path, fault))
    return CheckpointScan(tuple(complete), tuple(incomplete))


def settle_checkpoints(folder: Path, *, say: Callable[[str], None] = lambda text: None) -> CheckpointScan:
    """Sorts checkpoints as `scan_checkpoints` does, having read the newest ones, down to one that is as it was written.

    A damaged one gets a marker that says so: it is incomplete for whoever looks from now on, and does not stand in the
    way of those that the continued run writes. One without a marker before a complete one is what a cut off removal
    left, and goes.

    Args:
        say: prints a line about each that is removed.
    """
    for path in reversed(scan_checkpoints(folder).complete):
        damage = damage_of(path)
        if damage is None:
            break
        write_json(path / MARKER, {"marker_version": MARKER_VERSION, "step": checkpoint_step(path), "damage": damage})
    scan = scan_checkpoints(folder)
    newest_step = checkpoint_step(scan.latest) or 0 if scan.latest else 0
    leftovers = [
        item.path
        for item in scan.incomplete
        if (checkpoint_step(item.path) or 0) < newest_step and item.path.is_dir() and not (item.path / MARKER).exists()
    ]
    for path in leftovers:
        remove_checkpoint(path)
        say(f"{path}, whose removal had not ended, is removed")
    return scan_checkpoints(folder) if leftovers else scan


def what_is_left(folder: Path) -> str:
    """Says which checkpoint of `folder` a stopped run leaves; each was looked at before it was written."""
    latest = scan_checkpoints(folder).latest
    left = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
    return f"No result was written; {left}."


def remove_checkpoint(checkpoint_dir: Path) -> None:
    """Removes a checkpoint, its marker first, so that a kill on the way leaves nothing that looks complete."""
    (checkpoint_dir / MARKER).unlink(missing_ok=True)
    sync_folder(checkpoint_dir)
    shutil.rmtree(checkpoint_dir)


def keep_newest(folder: Path, keep: int) -> list[Path]:
    """Removes all but the `keep` newest complete checkpoints and returns the removed ones.

    Incomplete ones older than the newest complete one are leftovers of a killed run and go as well.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    scan = scan_checkpoints(folder)
    removed = list(scan.complete[:-keep])
    if scan.latest is not None:
        newest_step = checkpoint_step(scan.latest) or 0
        removed += [item.path for item in scan.incomplete if (checkpoint_step(item.path) or 0) < newest_step]
    for path in removed:
        remove_checkpoint(path)
    return removed


def fault_of(checkpoint_dir: Path) -> str | None:
    """Returns why a folder that `mark_complete` marks is not complete, or None."""
    if not checkpoint_dir.is_dir():
        return "it is not a folder"
    try:
        marker = _read_marker(checkpoint_dir)
    except FileNotFoundError:
        return f"it has no {MARKER}: writing it, or removing it, did not end"
    except OSError as error:
        return f"its {MARKER} cannot be read: {error.strerror}"
    except ValueError:
        return f"its {MARKER} is damaged"
    if "damage" in marker:
        return marker["damage"]
    if not marker["files"]:
        return f"its {MARKER} lists no files"
    for name, size in marker["files"].items():
        path = checkpoint_dir / name
        if not os.path.isfile(path):
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes where {size:,} were written"
    return None


def damage_of(checkpoint_dir: Path) -> str | None:
    """Returns which file of a complete folder is not what was written, or None; reads all of them.

    Where no checksums were kept, damage is found as far as a file can then no longer be read.
    """
    marker = _read_marker(checkpoint_dir)
    if not marker.get("checksums"):
        return unreadable_file(checkpoint_dir, list(marker["files"]))
    for name, checksum in marker["checksums"].items():
        try:
            is_same = _checksum(checkpoint_dir / name) == checksum
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if not is_same:
            return f"{name} was damaged since it was written: its checksum is another"
    return None


def _read_marker(checkpoint_dir: Path) -> dict[str, Any]:
    """Returns the marker: with `damage`, or else with `files` and, but for those of earlier versions, `checksums`.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is damaged.
    """
    marker = json.loads((checkpoint_dir / MARKER).read_text(encoding="utf-8"))
    if not isinstance(marker, dict):
        raise ValueError("not an object")
    if isinstance(marker.get("damage"), str):
        return marker
    for key, kind in (("files", int), ("checksums", str)):
        listed = marker.get(key, {} if key == "checksums" else None)
        if not isinstance(listed, dict) or not all(isinstance(value, kind) for value in listed.values()):
            raise ValueError(f"wrong {key}")
    return marker


def _checksum(path: Path) -> str:
    """Returns the CRC-32 of a file, of a large one over `_WHOLE_BYTES` of it."""
    size, checksum = path.stat().st_size, 0
    num_blocks = max(1, min(-(-size // _BLOCK_BYTES), _WHOLE_BYTES // _BLOCK_BYTES))
    last = max(0, size - _BLOCK_BYTES)
    with path.open("rb") as stream:
        for number in range(num_blocks):
            if size > _WHOLE_BYTES:
                stream.seek(number * last // (num_blocks - 1))
            checksum = zlib.crc32(stream.read(_BLOCK_BYTES), checksum)
    return f"{checksum:08x}"
