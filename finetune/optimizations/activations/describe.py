"""The plan in words for the terminal, and as plain values for the report."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from finetune.console import plural
from finetune.optimizations.activations.types import GIB, ActivationPlan, LayerPlan, ModelCosts, Place

_MAX_KINDS = 4
_WIDTH = 100
_SHOWN_WAIT = 0.005
"""Share of a step from which waits for reloads are worth a word."""
_PLACES = {Place.DEVICE: "on the device", Place.HOST: "on the host"}


def plan_lines(plan: ActivationPlan, costs: ModelCosts) -> list[str]:
    """Returns at most 8 lines of at most 100 columns: what becomes of the layers, and what that is expected to take."""
    counts = Counter(_treatment(layer) for layer in plan.layers).most_common()
    shown = counts if len(counts) <= _MAX_KINDS else counts[: _MAX_KINDS - 1]
    parts = [f"{plural(count, 'layer')} {treatment}" for treatment, count in shown]
    if len(shown) < len(counts):
        others = counts[len(shown) :]
        parts.append(f"{plural(sum(count for _, count in others), 'layer')} in {len(others)} other ways")
    if plan.tile_tokens is not None:
        parts.append(f"MLPs, norms and projections in tiles of {plan.tile_tokens:,} tokens")
    lines = [f"activations: {parts[0]}"] if len(parts) == 1 else ["activations:", *(f"  {part}" for part in parts)]
    figures = [
        f"peak {_gib(plan.peak_bytes)} GiB ({_gib(costs.fixed_bytes)} fixed, "
        f"{_gib(plan.device_bytes)} for activations, {_gib(_work_bytes(plan, costs))} work)",
        f"host {_gib(plan.host_bytes)} GiB pinned, link busy {plan.link_fill:.0%} of forward"
        if plan.host_bytes
        else "nothing on the host",
        f"{plan.recomputed:.0%} of a forward pass remade",
        f"{_seconds(plan.step_seconds)} s a step",
    ]
    waits = plan.stall_seconds * costs.num_micro_batches
    if waits >= _SHOWN_WAIT * plan.step_seconds:
        figures[-1] += f" ({waits / plan.step_seconds:.0%} of it waiting for reloads)"
    return lines + _filled("expected: ", figures)


def plan_dict(plan: ActivationPlan, costs: ModelCosts) -> dict[str, Any]:
    """Returns every figure of the plan as plain values; equal layers next to each other are one run."""
    runs, first = [], 0
    for layer, same in groupby(plan.layers, key=_as_values):
        count = sum(1 for _ in same)
        runs.append({"first_layer": first, "num_layers": count, "is_whole": layer[0], "places": dict(layer[1])})
        first += count
    return {
        "layers": runs,
        "fixed_bytes": costs.fixed_bytes,
        "device_bytes": plan.device_bytes,
        "buffer_bytes": plan.buffer_bytes,
        "num_buffers": costs.num_buffers if plan.host_bytes else 0,
        "work_bytes": _work_bytes(plan, costs),
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "link_fill": plan.link_fill,
        "reload_fill": plan.reload_fill,
        "recomputed": plan.recomputed,
        "stall_seconds": plan.stall_seconds,
        "step_seconds": plan.step_seconds,
        "mlp_tile_tokens": plan.tile_tokens,
        "num_micro_batches": costs.num_micro_batches,
    }


def _as_values(layer: LayerPlan) -> tuple[bool, tuple[tuple[str, str], ...]]:
    return layer.is_whole, tuple((group.value, place.value) for group, place in layer.places.items())


def _treatment(layer: LayerPlan) -> str:
    """Returns such as `with input, qkv on the host and gate_up on the device`."""
    if layer.is_whole:
        return "whole"
    parts = []
    for place, where in _PLACES.items():
        names = [group.value for group, own in layer.places.items() if own is place]
        if names:
            parts.append(f"{', '.join(names)} {where}")
    return "with " + " and ".join(parts)


def _work_bytes(plan: ActivationPlan, costs: ModelCosts) -> int:
    return plan.peak_bytes - costs.fixed_bytes - plan.device_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def _filled(head: str, parts: list[str]) -> list[str]:
    """Returns the parts in as few lines as hold them, none broken."""
    lines = [head + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= _WIDTH:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(" " * len(head) + part)
    return lines
