"""Evaluation beside a training: it must neither run out of memory nor move the random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Puts torch's random state back afterwards: a data loader draws a seed even where it shuffles nothing, so that
    dropout would differ between a run with evaluations and one without."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def halved_when_out_of_memory(run: Callable[[int], Result], size: int, *, say: Callable[[int], None]) -> Result:
    """Returns `run(size)`; where the device's memory does not suffice, that of half the size, and so on.

    Args:
        size: rows or prompts of a batch.
        say: is told the smaller size before it is tried.

    Raises:
        torch.OutOfMemoryError: a batch of one does not fit either.
    """
    while True:
        try:
            return run(size)
        except torch.OutOfMemoryError:
            if size <= 1:
                raise
        # Outside the handler: the exception, which holds the failed call's tensors, is gone by now.
        torch.cuda.empty_cache()
        size //= 2
        say(size)
