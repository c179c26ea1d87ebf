"""Which layer is being computed, and whether for the first time: what lets a product ask for its stored result.

`remembered` is called by whatever may store its result (a projection, an attention kernel). Outside a checkpointed
layer it only computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from finetune.optimizations.activations.record import LayerRecord
from finetune.optimizations.activations.types import Group


@dataclass(frozen=True)
class Phase:
    """One run through a checkpointed layer."""

    record: LayerRecord
    is_recompute: bool

    def stores(self, group: Group) -> bool:
        return group in self.record.plan.places


_PHASE: ContextVar[Phase | None] = ContextVar("checkpointed_layer", default=None)


def current_phase() -> Phase | None:
    """Returns the run that this thread is in, or None outside checkpointed layers."""
    return _PHASE.get()


@contextmanager
def phase(record: LayerRecord | None, *, is_recompute: bool = False) -> Iterator[None]:
    """Runs a block as a layer's forward or recompute; None: as no layer of ours."""
    token = _PHASE.set(None if record is None else Phase(record, is_recompute))
    try:
        yield
    finally:
        _PHASE.reset(token)


def remembered(group: Group, compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Returns `compute()`, or in a recompute what it returned in forward, where the plan stores that group."""
    now = _PHASE.get()
    if now is None or not now.stores(group):
        return compute()
    if now.is_recompute:
        return now.record.take(group)
    result = compute()
    now.record.put(group, result)
    return result
