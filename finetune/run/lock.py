"""One process a run folder: a lock that the operating system releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import EnvironmentProblem

LOCK_NAME = ".lock"
KILLED = "killed"
"""Status of a run whose process ended without a word: its folder says running, and no process holds the lock."""
_TRIES = 3
_PAUSE_SECONDS = 0.05


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the folder's lock for the length of the `with` block.

    The lock file stays behind: removing it would let two processes lock two different files of one name.

    Raises:
        EnvironmentProblem: another process holds it; the message names its process id.
    """
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _take(descriptor):
            raise _held_problem(folder, os.pread(descriptor, 32, 0))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        # A forked child (a data loader's worker) shares the lock; unlocking, not closing alone, ends it for all.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Says whether a process holds the folder's lock; writes nothing.

    There is no asking without taking: the lock is held for a moment, shared with others that ask, and a run that
    starts in this moment tries again.
    """
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def seen_status(written: str, *, is_locked: bool) -> str:
    """Returns a run's status: `running` while a process holds the lock, else what was written, else `killed`."""
    if is_locked:
        return "running"
    return KILLED if written == "running" else written


def require_unlocked(folder: Path) -> None:
    """Raises EnvironmentProblem where a process holds the folder's lock; writes nothing."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held_problem(folder, os.pread(descriptor, 32, 0)) from None
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Takes the lock and says whether it could; tries for a moment, since `is_locked` of another process may ask."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def _held_problem(folder: Path, content: bytes) -> EnvironmentProblem:
    pid = content.decode("ascii", errors="replace").strip()
    holder = f"process {pid}" if pid.isdigit() else "another process"
    return EnvironmentProblem(
        f"{holder} is training into this run folder",
        place=str(folder),
        remedy="Wait until it ends, stop it, or set another output.dir.",
    )
