"""What a given plan costs: figures of one layer, waits for reloads, and the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from finetune.optimizations.activations.types import (
    ActivationPlan,
    Group,
    LayerCosts,
    LayerPlan,
    ModelCosts,
    Place,
)

LAYERS_IN_FLIGHT = 2
"""Layers of forward whose tensors may be on their way to the host at once."""


@dataclass(frozen=True)
class LayerFigures:
    """What one layer takes under one plan."""

    plan: LayerPlan
    seconds: float
    """Forward and backward, without waits."""
    backward_seconds: float
    device_bytes: int
    host_bytes: int
    remade_seconds: float


def layer_figures(plan: LayerPlan, costs: LayerCosts) -> LayerFigures:
    """Returns what a layer of these costs takes under a plan.

    Raises:
        ValueError: the plan keeps a layer whole that was never measured so, or stores a group without costs.
    """
    if plan.is_whole:
        if costs.whole_bytes is None:
            raise ValueError("a layer is planned whole, but what a whole layer keeps was not measured")
        backward = max(0.0, costs.whole_seconds - costs.forward_seconds)
        return LayerFigures(plan, costs.whole_seconds, backward, costs.whole_bytes, 0, 0.0)
    absent = [group.value for group in plan.places if group not in costs.groups]
    if absent:
        raise ValueError(f"the plan stores {', '.join(absent)}, which this layer does not have")
    stored = dict.fromkeys(Place, 0)
    for group, place in plan.places.items():
        stored[place] += costs.groups[group].num_bytes
    saved = sum(costs.groups[group].seconds for group in plan.places)
    backward = max(0.0, costs.backward_seconds - saved)
    remade = sum(max(0.0, cost.seconds) for group, cost in costs.groups.items() if group not in plan.places)
    return LayerFigures(
        plan, costs.forward_seconds + backward, backward, stored[Place.DEVICE], stored[Place.HOST], remade
    )


def layer_options(costs: LayerCosts, *, may_use_host: bool) -> list[LayerFigures]:
    """Returns every way to treat such a layer; groups that save no time are always remade."""
    worthwhile = [group for group in Group if group is not Group.INPUT and _saves(costs, group)]
    places = (Place.DEVICE, Place.HOST) if may_use_host else (Place.DEVICE,)
    options = [] if costs.whole_bytes is None else [layer_figures(LayerPlan(is_whole=True, places={}), costs)]
    for chosen in product(places, *([None, *places] for _ in worthwhile)):
        pairs = zip((Group.INPUT, *worthwhile), chosen, strict=True)
        plan = LayerPlan(places={group: place for group, place in pairs if place is not None})
        options.append(layer_figures(plan, costs))
    return options


def _saves(costs: LayerCosts, group: Group) -> bool:
    return group in costs.groups and costs.groups[group].seconds > 0


def reload_waits(layers: Sequence[LayerFigures], *, bytes_per_second: float, num_buffers: int) -> list[float]:
    """Returns for each layer, in forward order, the seconds that its backward waits for its reload.

    With one buffer every copy is waited for. With two, the copy starts when the offloaded layer before it in backward
    starts, and hides under that layer and the kept ones between.
    """
    waits = [0.0] * len(layers)
    window = 0.0
    for index in reversed(range(len(layers))):
        layer = layers[index]
        if layer.host_bytes:
            copy = layer.host_bytes / bytes_per_second
            waits[index] = copy if num_buffers == 1 else max(0.0, copy - window)
            window = 0.0
        window += layer.backward_seconds
    return waits


def work_bytes(costs: ModelCosts, *, largest_host_bytes: int) -> int:
    """Returns the most that is needed at once beside what is stored and the reload buffers.

    Args:
        largest_host_bytes: the most that one layer has on the host.
    """
    kinds = [costs.kinds[kind] for kind in set(costs.layers)]
    forward = max(kind.forward_peak_bytes for kind in kinds) + LAYERS_IN_FLIGHT * largest_host_bytes
    return max(forward, costs.head_peak_bytes, max(kind.backward_peak_bytes for kind in kinds))


def assess_plan(layers: Sequence[LayerPlan], costs: ModelCosts) -> ActivationPlan:
    """Returns the plan with everything that it is expected to take; it may be over any budget.

    Raises:
        ValueError: the plan has another number of layers than the model, or one does not fit its layer's costs.
    """
    if len(layers) != len(costs.layers):
        raise ValueError(f"a plan for {len(layers)} layers cannot serve a model of {len(costs.layers)}")
    pairs = zip(layers, costs.layers, strict=True)
    figures = [layer_figures(layer, costs.kinds[kind]) for layer, kind in pairs]
    link = costs.link
    host = sum(layer.host_bytes for layer in figures)
    largest = max(layer.host_bytes for layer in figures)
    buffers = costs.num_buffers * largest
    device = buffers + sum(layer.device_bytes for layer in figures)
    kinds = [costs.kinds[kind] for kind in costs.layers]
    stalls = 0.0
    if host:
        waits = reload_waits(figures, bytes_per_second=link.to_device_bytes_per_second, num_buffers=costs.num_buffers)
        stalls = sum(waits)
    forward = sum(costs.kinds[kind].forward_seconds for kind in costs.layers)
    backward = sum(layer.backward_seconds for layer in figures)
    micro_batch = sum(layer.seconds for layer in figures) + stalls + costs.head_seconds
    return ActivationPlan(
        layers=tuple(layers),
        device_bytes=device,
        buffer_bytes=buffers,
        host_bytes=host,
        peak_bytes=costs.fixed_bytes
        + buffers
        + _peak(figures, kinds, costs.head_peak_bytes, largest_host_bytes=largest),
        step_seconds=costs.num_micro_batches * micro_batch + costs.optimizer_seconds,
        link_fill=_share(host, link.to_host_bytes_per_second, forward),
        recomputed=sum(layer.remade_seconds for layer in figures) / forward if forward else 0.0,
        reload_fill=_share(host, link.to_device_bytes_per_second, backward),
        stall_seconds=stalls,
    )


def _peak(
    figures: Sequence[LayerFigures], kinds: Sequence[LayerCosts], head_peak_bytes: int, *, largest_host_bytes: int
) -> int:
    """Returns the most that stored tensors and work take together; `work_bytes` is the planner's bound of the latter.

    The backward of a layer finds what it and the layers before it stored, and remakes only what is not stored.
    """
    stored = sum(layer.device_bytes for layer in figures)
    forward = max(kind.forward_peak_bytes for kind in kinds) + LAYERS_IN_FLIGHT * largest_host_bytes
    most = stored + max(forward, head_peak_bytes)
    for layer, kind in reversed(list(zip(figures, kinds, strict=True))):
        most = max(most, stored + _backward_work(layer.plan, kind))
        stored -= layer.device_bytes
    return most


def _backward_work(plan: LayerPlan, kind: LayerCosts) -> int:
    if plan.is_whole:
        return kind.whole_peak_bytes or kind.backward_peak_bytes
    there = sum(kind.groups[group].num_bytes for group in plan.places if group is not Group.INPUT)
    return max(0, kind.backward_peak_bytes - there)


def _share(num_bytes: int, bytes_per_second: float, seconds: float) -> float:
    """Returns which share of the seconds the copy takes; infinite where there is no time to hide it."""
    if not num_bytes:
        return 0.0
    return num_bytes / bytes_per_second / seconds if seconds else float("inf")
