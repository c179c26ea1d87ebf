"""The check that what a recompute leaves out is not missed: a layer's gradients must be those of a full recompute.

What is left out is filled with NaN, so a result that something reads after all cannot pass by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import CheckpointError

from finetune.optimizations.activations.measure import LayerCall, LayerMeter
from finetune.optimizations.activations.stored_outputs import StoredOutputs
from finetune.optimizations.activations.types import Group, LayerPlan, Place

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.02}
"""Norm of the difference over the norm, by the format that is computed in: attention's backward on a GPU adds in no
fixed order. A wrong tensor is of the order of 1."""


def check_skipping(meter: LayerMeter, outputs: StoredOutputs, calls: Sequence[LayerCall]) -> frozenset[Group]:
    """Settles what may be left out of a recompute.

    Sets `outputs.skips_last`; returns the groups that can be stored, the input among them.
    """
    outputs.skips_last = False
    references = [meter.run(call, LayerPlan()).grads for call in calls]
    limit = max(
        TOLERANCE.get(dtype, 0.02) for dtype in (meter.autocast_dtype(), *(call.hidden.dtype for call in calls))
    )
    allowed = [_allowed(meter, outputs, call, grads, limit) for call, grads in zip(calls, references, strict=True)]
    outputs.skips_last = all(skips_last for _, skips_last in allowed)
    groups = frozenset.intersection(*(groups for groups, _ in allowed)) if allowed else frozenset()
    return groups | {Group.INPUT}


def _allowed(
    meter: LayerMeter, outputs: StoredOutputs, call: LayerCall, grads: tuple[torch.Tensor, ...], limit: float
) -> tuple[frozenset[Group], bool]:
    """Tries all groups at once with and without the last product, then no group."""
    for groups in (frozenset(Group), frozenset({Group.INPUT})):
        for skips_last in (True, False):
            outputs.skips_last, outputs.fill = skips_last, float("nan")
            try:
                found = meter.run(call, LayerPlan(places=dict.fromkeys(groups, Place.DEVICE))).grads
            except CheckpointError:  # the recompute saved other tensors than forward: something more is needed
                continue
            finally:
                outputs.skips_last, outputs.fill = False, None
            if _are_near(found, grads, limit):
                return groups, skips_last
    return frozenset({Group.INPUT}), False


def _are_near(found: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...], limit: float) -> bool:
    if len(found) != len(grads):
        return False
    return all(_is_near(one, other, limit) for one, other in zip(found, grads, strict=True))


def _is_near(found: torch.Tensor, grad: torch.Tensor, limit: float) -> bool:
    difference, norm = (found.double() - grad.double()).norm().item(), grad.double().norm().item()
    return difference <= limit * norm + 1e-12
