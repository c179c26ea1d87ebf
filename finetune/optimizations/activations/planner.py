"""The plan of activations: what of each layer is kept, on the device or on the host, and what is computed again.

Pure arithmetic over measured costs: no tensors. The model of a step is in `assess.py`, the search in `search.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from finetune.optimizations.activations.arrange import LayerClass, arrange
from finetune.optimizations.activations.assess import LayerFigures, assess_plan, layer_figures, work_bytes
from finetune.optimizations.activations.search import MAX_FILL, fastest_layers, usable_host_bytes
from finetune.optimizations.activations.types import ActivationPlan, Budget, Group, LayerPlan, ModelCosts, Place

_MOST_WAYS = 20_000
_ROUNDS = 3
_WORTH_A_ROUND = 0.01
"""Share of the device's budget that is worth another search."""


class BudgetTooSmall(Exception):
    """No plan fits, not even with every layer's input alone.

    Attributes:
        short: the fields of `Budget` that are too small, of `device_bytes` and `activation_bytes`.
        device_bytes: the smallest that would work, with `activation_bytes` as below and the host's budget as it is.
        activation_bytes: likewise; None where there was no limit.
        host_bytes: the smallest that would do alone, the other budgets as they are; None where no host memory would.
    """

    def __init__(
        self, *, short: tuple[str, ...], device_bytes: int, activation_bytes: int | None, host_bytes: int | None
    ) -> None:
        needs = {"device_bytes": device_bytes, "activation_bytes": activation_bytes}
        super().__init__("no plan fits: " + ", ".join(f"{name} must be {needs[name]:,} or more" for name in short))
        self.short = short
        self.device_bytes = device_bytes
        self.activation_bytes = activation_bytes
        self.host_bytes = host_bytes


def plan_activations(costs: ModelCosts, budget: Budget) -> ActivationPlan:
    """Returns the plan with the least predicted time of a step inside the budgets.

    The last layer is never on the host; the link is busy for at most 85 % of forward and of backward. The result is
    the fastest that a bounded search finds, as a rule within half a percent of the lower bound. Takes 2 to 150 ms.

    Raises:
        BudgetTooSmall: not even every layer's input alone fits.
        ValueError: there is no layer, or `num_buffers` is not positive.
    """
    if not costs.layers or costs.num_buffers < 1:
        raise ValueError(f"cannot plan {len(costs.layers)} layers with {costs.num_buffers} reload buffers")
    best = _within(costs, budget)
    # The search takes every layer's work as that of one which stores its input alone. What a plan needs less than that
    # is given to the next.
    limit, wider = costs.fixed_bytes + budget.device_bytes, budget
    for _ in range(_ROUNDS):
        slack = limit - best.peak_bytes
        if slack < _WORTH_A_ROUND * budget.device_bytes:
            break
        plan = _wider(costs, wider, slack=slack, limit=limit)
        if plan is None or plan[0].step_seconds >= best.step_seconds:
            break
        best, wider = plan
    return best


def _wider(costs: ModelCosts, budget: Budget, *, slack: int, limit: int) -> tuple[ActivationPlan, Budget] | None:
    """Returns a plan for as much more of the slack as keeps its peak below the limit, and the budget that gave it."""
    for share in (1, 2, 4):
        budget_tried = dataclasses.replace(budget, device_bytes=budget.device_bytes + slack // share)
        plan = _within(costs, budget_tried)
        if plan.peak_bytes <= limit:
            return plan, budget_tried
    return None


def _within(costs: ModelCosts, budget: Budget) -> ActivationPlan:
    layers = fastest_layers(costs, budget)
    return assess_plan(_least_layers(costs, budget) if layers is None else layers, costs)


def tighter(costs: ModelCosts, budget: Budget, *, by_bytes: int) -> Budget:
    """Returns a budget under which a plan takes at least so much less than the one for this budget.

    For planning again when that plan ran out of memory: what the budget allowed beyond the plan is given up as well,
    since it was not there.

    Args:
        by_bytes: taken off `device_bytes`, and off `activation_bytes` when it is set.

    Raises:
        BudgetTooSmall: the budget given has no plan.
    """
    plan = plan_activations(costs, budget)
    device = min(budget.device_bytes, plan.peak_bytes - costs.fixed_bytes) - by_bytes
    activation = budget.activation_bytes
    if activation is not None:
        activation = max(0, min(activation, plan.device_bytes) - by_bytes)
    return dataclasses.replace(budget, device_bytes=max(0, device), activation_bytes=activation)


@dataclass(frozen=True)
class _Inputs:
    """Every layer's input alone, some of them on the host: the plans that need least."""

    offloaded: tuple[int, ...]
    """For each kind, the layers with their input on the host."""
    host_bytes: int
    activation_bytes: int
    device_bytes: int


def _inputs_alone(costs: ModelCosts, host_limit: int) -> Iterator[_Inputs]:
    """Yields what the layers need for each number of layers of each kind with their input on the host."""
    inputs = [kind.groups[Group.INPUT].num_bytes for kind in costs.kinds]
    total = sum(inputs[kind] for kind in costs.layers)
    available = [costs.layers[:-1].count(kind) for kind in range(len(inputs))]
    backward = sum(costs.kinds[kind].backward_seconds for kind in costs.layers)
    limit = min(host_limit, MAX_FILL * backward * costs.link.to_device_bytes_per_second)
    for counts in _counts(available):
        host = sum(count * size for count, size in zip(counts, inputs, strict=True))
        if host > limit:
            continue
        largest = max((size for count, size in zip(counts, inputs, strict=True) if count), default=0)
        stored = total - host + costs.num_buffers * largest
        yield _Inputs(counts, host, stored, stored + work_bytes(costs, largest_host_bytes=largest))


def _counts(available: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields how many layers of each kind have their input on the host: all ways, or where kinds are many, the kinds
    one after the other."""
    if prod(number + 1 for number in available) <= _MOST_WAYS:
        yield from product(*(range(number + 1) for number in available))
        return
    for first in range(len(available) + 1):
        yield tuple(number if index < first else 0 for index, number in enumerate(available))


def _least_layers(costs: ModelCosts, budget: Budget) -> list[LayerPlan]:
    """Returns a plan of inputs alone that fits; for budgets so tight that the search found none.

    Raises:
        BudgetTooSmall: there is none.
    """
    limit = budget.device_bytes if budget.activation_bytes is None else budget.activation_bytes
    for way in _inputs_alone(costs, usable_host_bytes(costs, budget)):
        if way.device_bytes <= budget.device_bytes and way.activation_bytes <= limit:
            break
    else:
        raise _shortage(costs, budget)
    last, link = len(costs.layers) - 1, costs.link
    classes, counts = [LayerClass((last,), _input_options(costs, costs.layers[last]))], [[1, 0]]
    for kind, num_offloaded in enumerate(way.offloaded):
        positions = tuple(index for index, own in enumerate(costs.layers[:-1]) if own == kind)
        if positions:
            classes.append(LayerClass(positions, _input_options(costs, kind)))
            counts.append([len(positions) - num_offloaded, num_offloaded])
    rate = link.to_device_bytes_per_second
    layers = arrange(classes, counts, bytes_per_second=rate, num_buffers=costs.num_buffers)
    return [layer.plan for layer in layers]


def _input_options(costs: ModelCosts, kind: int) -> tuple[LayerFigures, ...]:
    return tuple(layer_figures(LayerPlan(places={Group.INPUT: place}), costs.kinds[kind]) for place in Place)


def _shortage(costs: ModelCosts, budget: Budget) -> BudgetTooSmall:
    """Returns what would have to be larger; called only when nothing fits."""
    ways = list(_inputs_alone(costs, usable_host_bytes(costs, budget)))
    activation = budget.activation_bytes
    if activation is not None:
        activation = max(activation, min(way.activation_bytes for way in ways))
        ways = [way for way in ways if way.activation_bytes <= activation]
    device = min(way.device_bytes for way in ways)
    short = ["device_bytes"] if device > budget.device_bytes else []
    if activation != budget.activation_bytes:
        short.append("activation_bytes")

    unbounded = dataclasses.replace(budget, host_bytes=2**62)
    limits = (budget.device_bytes, 2**62 if budget.activation_bytes is None else budget.activation_bytes)
    enough = [
        way.host_bytes
        for way in _inputs_alone(costs, usable_host_bytes(costs, unbounded))
        if way.device_bytes <= limits[0] and way.activation_bytes <= limits[1]
    ]
    return BudgetTooSmall(
        short=tuple(short),
        device_bytes=device,
        activation_bytes=activation,
        host_bytes=min(enough) if enough else None,
    )
