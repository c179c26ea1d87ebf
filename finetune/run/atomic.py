"""Writing files so that a reader, or a run that is killed, never meets half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` in one step, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `content` to `path` in one step: the file holds the old content or the new one, never a part.

    A temporary file in the same folder is flushed to disk and then renamed, so the rename cannot cross file systems.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        # mkstemp makes the file private; the run's files follow the user's umask like any other file.
        os.fchmod(descriptor, 0o666 & ~_current_umask())
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes `value` as indented JSON in one step; a number that is not finite is a ValueError, as JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def overwrite_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes `value` over the content of `path` where it lies, which a full disk allows most often; not in one step.

    What is left of the old length is filled with spaces, which JSON does not mind.
    """
    content = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode("utf-8")
    with path.open("r+b") as stream:
        stream.write(content.ljust(path.stat().st_size))
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Returns once the content of `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Returns once the names in the folder are on the disk, so that a rename survives a power cut."""
    sync_file(path)


def _current_umask() -> int:
    # Linux shows the mask without changing it; os.umask would change it for a moment in every thread.
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
