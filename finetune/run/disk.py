"""Is there room on the disk, asked before the run rather than found out at its end."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.errors import EnvironmentProblem

_GIB = 1024**3


def nearest_existing_folder(path: Path) -> Path:
    """Returns `path` or the closest of its parents that exists; every absolute path ends at a root that does."""
    candidate = path.absolute()
    while not candidate.exists():
        candidate = candidate.parent
    return candidate


def require_disk_space(folder: Path, *, needed_bytes: int, purpose: str) -> None:
    """Checks that the disk of `folder`, which need not exist yet, has `needed_bytes` free; writes nothing.

    Args:
        folder: where the files are to go.
        needed_bytes: bytes that will be written.
        purpose: what they are, for the message, such as "2 checkpoints and the adapter".

    Raises:
        EnvironmentProblem: there is less room than needed.
    """
    existing = nearest_existing_folder(Path(folder))
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise EnvironmentProblem(
            f"{purpose} need {_gib(needed_bytes)}, and the disk has {_gib(free_bytes)} free",
            place=str(existing),
            remedy=f"Free {_gib(needed_bytes - free_bytes)} there, or set output.dir to a folder on a larger disk.",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / _GIB:.3f} GiB"
