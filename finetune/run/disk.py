"""Is there room on the disk, asked before the run; and what is said where it runs out all the same."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from finetune.errors import EnvironmentProblem
from finetune.run.fragments import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "PytorchStreamWriter failed writing file",
    "unexpected pos ",  # of torch, when it closes a file that it could not write to the end
)


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
        missing = format_bytes(needed_bytes - free_bytes)
        raise EnvironmentProblem(
            f"{purpose} need {format_bytes(needed_bytes)}, and the disk has {format_bytes(free_bytes)} free",
            place=str(existing),
            remedy=f"Free {missing} there, or set output.dir to a folder on a larger disk.",
        )


def is_disk_full(error: BaseException) -> bool:
    """Recognises a full disk or quota and a limit of file sizes, as Python, safetensors and torch report them.

    The errors before are looked at too: torch ends a file that it could not write with an error of its own.
    """
    before = error.__cause__ or error.__context__
    is_one = getattr(error, "errno", None) in _FULL or any(text in str(error) for text in _FULL_TEXTS)
    return is_one or (before is not None and is_disk_full(before))


def disk_full(folder: Path, *, free_bytes: int, checkpoint: Path | None) -> EnvironmentProblem:
    """Describes a run that ended because a file could not be written.

    Args:
        folder: of the run.
        free_bytes: what the disk had free then; more than none where a quota or a limit of file sizes ended it.
        checkpoint: the newest complete one.
    """
    begin = (
        f"goes on from {checkpoint.name}" if checkpoint else "begins at the first step, as no checkpoint is complete"
    )
    return EnvironmentProblem(
        f"the disk is full, or a quota or file size limit reached: {free_bytes:,} bytes were free when a file could "
        "not be written",
        place=str(folder),
        remedy=f"Free some space there, then give the same command with --resume: it {begin}. "
        "output.keep_checkpoints=1 needs the least space.",
    )
