"""Can the files of a checkpoint be read? Asked where no checksums were kept, before its readers would fail on them.

What is damaged inside of a safetensors file's numbers cannot be told; torch's files are archives with checksums of
their own.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path


def unreadable_file(folder: Path, names: Sequence[str]) -> str | None:
    """Returns the first of the files that is not what its suffix says, with the reason, or None."""
    for name in names:
        look = _LOOKS.get(Path(name).suffix)
        reason = look(folder / name) if look else None
        if reason is not None:
            return f"{name} is damaged: {reason}"
    return None


def _look_at_json(path: Path) -> str | None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return str(error.strerror)
    except ValueError:
        return "it is not JSON"
    return None


def _look_at_archive(path: Path) -> str | None:
    """Reads all of what `torch.save` wrote."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return "it is not a file of torch"
    return f"its part {damaged} has another checksum" if damaged else None


def _look_at_tensors(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open  # not needed where a command line only lists runs

    try:
        with safe_open(path, framework="numpy") as tensors:
            tensors.keys()
    except (OSError, SafetensorError) as error:
        return str(error).strip().partition("\n")[0]
    return None


_LOOKS: dict[str, Callable[[Path], str | None]] = {
    ".json": _look_at_json,
    ".pt": _look_at_archive,
    ".pth": _look_at_archive,
    ".safetensors": _look_at_tensors,
}
