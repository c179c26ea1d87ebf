"""Bound what a chat template may take of time and memory: it is a program of others, and some never end.

The time limit is a timer of the operating system, which interrupts the main thread between two steps of Python; the
memory limit (Linux) is on the process's address space, since one multiplication of a text (`'x' * 10**10`) is a single
step. Both are undone after each rendering. Elsewhere than in a main thread of a POSIX system nothing is limited; each
process that tokenizes renders in its main thread.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

MAX_SECONDS = 30.0
MAX_BYTES = 2 << 30
"""Memory that one rendering may take beyond what the process has."""
MAX_CHARACTERS = 1 << 26
"""Characters of the text that one rendering may make."""


class RenderingTooLong(Exception):
    """A rendering took more than `MAX_SECONDS`."""


@contextmanager
def limited() -> Iterator[None]:
    """Limits the time and the memory of what runs inside.

    Raises:
        RenderingTooLong: the time is over.
        MemoryError: the memory limit is reached.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, _stop)
    timer = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    limits = _limit_memory()
    try:
        yield
    finally:
        # Without a timer first: it must not fire for the handler that was there before.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        if limits is not None:
            _set_memory_limits(limits)


def _stop(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise RenderingTooLong


def _limit_memory() -> tuple[int, int] | None:
    """Lowers the soft limit of the address space; returns the limits that were there, None where it is left."""
    if sys.platform != "linux":
        return None
    import resource  # of POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as stream:
        pages = int(stream.read().split(maxsplit=1)[0])
    wanted = pages * resource.getpagesize() + MAX_BYTES
    if any(limit not in (resource.RLIM_INFINITY, -1) and limit <= wanted for limit in (soft, hard)):
        return None
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    return soft, hard


def _set_memory_limits(limits: tuple[int, int]) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, limits)
