"""Run one function over many items in several processes, in order, in bounded memory, without ever hanging.

Forked processes start at once and share what the parent has in memory: with two of them on two cores, tokenizing takes
half the time of one process, while spawned ones would import the libraries anew for seconds. They are forked before
the parent reads their first item. A worker that dies is an error that names the records it had; workers whose parent
died end by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from finetune.errors import EnvironmentProblem

WORKER_BYTES = 400 << 20
"""Memory that a worker may come to need of its own, beside what it shares with the parent."""
_ITEMS_AHEAD = 3
_PARENT_CHECK_SECONDS = 1.0

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[[Any], Any] | None = None


def choose_workers(*, num_cores: int | None = None, free_bytes: int | None = None) -> int:
    """Returns how many processes the cores and the free memory allow; at least 1."""
    cores = num_cores if num_cores is not None else _usable_cores()
    free = free_bytes if free_bytes is not None else free_memory_bytes()
    return max(1, min(cores, free // WORKER_BYTES if free is not None else cores))


def free_memory_bytes() -> int | None:
    """Returns the memory that may still be used: the machine's, or less where a control group limits it."""
    limits = [_available_bytes(), _group_bytes()]
    return min((limit for limit in limits if limit is not None), default=None)


def map_ordered(
    work: Callable[[Item], Result], items: Iterable[Item], *, workers: int, describe: Callable[[Item], str]
) -> Iterator[Result]:
    """Yields `work(item)` for each item, in order; at most a few items a worker are under way at once.

    With one worker everything happens in this process.

    Args:
        describe: names an item for the error of a worker that died.

    Raises:
        EnvironmentProblem: a worker died.
    """
    if workers == 1:
        yield from map(work, items)
        return
    method = "fork" if sys.platform == "linux" else "spawn"
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start_worker,
        initargs=(work, os.getpid()),
    )
    under_way: deque[tuple[str, Future[Result]]] = deque()
    try:
        # The first task forks all workers, before this pool's reader opens files and connections. A reader of the hub
        # may have left some open for a pool before it; workers read nothing, so they do not touch them.
        executor.submit(_start)
        for item in items:
            under_way.append((describe(item), executor.submit(_run, item)))
            if len(under_way) >= workers * _ITEMS_AHEAD:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())
    except BrokenProcessPool as error:  # from submit: the oldest item that is under way is the first that is lost
        raise _dead_worker(under_way[0][0] if under_way else "the first records") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _result(name: str, future: Future[Result]) -> Result:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _dead_worker(name) from error


def _dead_worker(name: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        "a process that tokenizes the data died, most likely killed because memory ran out",
        place=name,
        remedy="Free some memory, or look for a very long record there, then give the command again.",
    )


def _start_worker(work: Callable[[Any], Any], parent: int) -> None:
    """Prepares a worker: Ctrl-C is the parent's to handle, and no worker outlives it."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _start() -> None:
    """Does nothing: a task that makes the workers start."""


def _run(item: Any) -> Any:
    assert _work is not None
    return _work(item)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _group_bytes() -> int | None:
    """Returns what the control group's limit leaves; None without a limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # not this version of control groups, or the word "max"
            continue
    return None
