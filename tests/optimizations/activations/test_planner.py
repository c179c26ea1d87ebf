"""The plan of activations: never over a budget, close to the best there is, and each rule of placing."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from activation_costs import qwen3_14b_costs, small_costs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finetune.optimizations.activations.assess import assess_plan, layer_options, work_bytes
from finetune.optimizations.activations.planner import BudgetTooSmall, plan_activations, tighter
from finetune.optimizations.activations.types import (
    GIB,
    ActivationPlan,
    Budget,
    Group,
    GroupCost,
    LayerCosts,
    LayerPlan,
    Link,
    ModelCosts,
    Place,
)

DEVICE, HOST = Place.DEVICE, Place.HOST
PLENTY = Budget(device_bytes=10**15, host_bytes=10**15)


def keeps_to(plan: ActivationPlan, costs: ModelCosts, budget: Budget) -> bool:
    on_host = [
        sum(costs.kinds[kind].groups[group].num_bytes for group, place in layer.places.items() if place is HOST)
        for layer, kind in zip(plan.layers, costs.layers, strict=True)
    ]
    limit = budget.device_bytes if budget.activation_bytes is None else budget.activation_bytes
    return (
        plan.peak_bytes <= costs.fixed_bytes + budget.device_bytes
        and plan.device_bytes <= limit
        and plan.host_bytes == sum(on_host) <= budget.host_bytes
        and plan.buffer_bytes == costs.num_buffers * max(on_host)
        and max(plan.link_fill, plan.reload_fill) <= 0.85
        and on_host[-1] == 0
        and not (costs.link.is_shared and plan.host_bytes)
    )


def fits_by_the_bound(plan: ActivationPlan, costs: ModelCosts, budget: Budget) -> bool:
    """Whether the plan fits where every layer works as one that stores its input alone, as the search takes it."""
    work = work_bytes(costs, largest_host_bytes=plan.buffer_bytes // costs.num_buffers)
    return plan.device_bytes + work <= budget.device_bytes


def best_by_trying_all(costs: ModelCosts, budget: Budget) -> tuple[float | None, float | None]:
    """The least time of a step among all plans, and among those that fit by the bound."""
    options = [[figures.plan for figures in layer_options(kind, may_use_host=True)] for kind in costs.kinds]
    plans = (assess_plan(layers, costs) for layers in product(*(options[kind] for kind in costs.layers)))
    fitting = [plan for plan in plans if keeps_to(plan, costs, budget)]
    bounded = [plan for plan in fitting if fits_by_the_bound(plan, costs, budget)]
    least, bound = (min((plan.step_seconds for plan in some), default=None) for some in (fitting, bounded))
    return least, bound


@st.composite
def kinds(draw: Any, num_groups: int) -> LayerCosts:
    sizes, saved = st.integers(1, 60), st.floats(-0.1, 0.5)
    names = [Group.QKV, Group.ATTENTION, Group.GATE_UP][:num_groups]
    groups = {Group.INPUT: GroupCost(draw(sizes), 0.0)} | {name: GroupCost(draw(sizes), draw(saved)) for name in names}
    forward = draw(st.floats(0.6, 2.0))
    remade = sum(max(0.0, cost.seconds) for cost in groups.values())
    whole = forward + forward * draw(st.floats(0.8, 2.0))
    return LayerCosts(
        groups=groups,
        forward_seconds=forward,
        backward_seconds=whole - forward + remade + draw(st.floats(0.0, 0.2)),
        whole_seconds=whole,
        whole_bytes=draw(st.none() | st.integers(60, 300)),
        forward_peak_bytes=draw(st.integers(0, 60)),
        backward_peak_bytes=draw(st.integers(0, 120)),
    )


@st.composite
def models(draw: Any, *, max_layers: int = 5, num_groups: int = 1) -> ModelCosts:
    made = tuple(draw(st.lists(kinds(num_groups), min_size=1, max_size=2)))
    rate = st.floats(5.0, 200.0)
    return ModelCosts(
        kinds=made,
        layers=tuple(draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=max_layers))),
        fixed_bytes=draw(st.integers(0, 100)),
        head_seconds=0.1,
        head_peak_bytes=draw(st.integers(0, 100)),
        optimizer_seconds=0.1,
        num_micro_batches=1,
        link=Link(draw(rate), draw(rate), is_shared=draw(st.integers(0, 9)) == 0),
        num_buffers=draw(st.sampled_from([1, 2])),
    )


budgets = st.builds(
    Budget,
    device_bytes=st.integers(0, 900),
    host_bytes=st.integers(0, 300),
    activation_bytes=st.none() | st.integers(0, 800),
)


def planned(costs: ModelCosts, budget: Budget) -> ActivationPlan | None:
    try:
        return plan_activations(costs, budget)
    except BudgetTooSmall:
        return None


def compare_with_all(costs: ModelCosts, budget: Budget) -> None:
    (least, bound), plan = best_by_trying_all(costs, budget), planned(costs, budget)
    assert (bound is None) == (plan is None)
    if bound is not None and plan is not None and least is not None:
        assert keeps_to(plan, costs, budget)
        assert least * (1 - 1e-9) <= plan.step_seconds <= bound * 1.03


@settings(max_examples=60, deadline=None)
@given(models(max_layers=4), budgets)
def test_small_models_are_close_to_the_best_of_all_plans(costs: ModelCosts, budget: Budget) -> None:
    compare_with_all(costs, budget)


@settings(max_examples=15, deadline=None)
@given(models(max_layers=3, num_groups=2), budgets)
def test_more_groups_are_close_to_the_best_of_all_plans(costs: ModelCosts, budget: Budget) -> None:
    compare_with_all(costs, budget)


@settings(max_examples=8, deadline=None)
@given(models(max_layers=5), budgets)
def test_five_layers_are_close_to_the_best_of_all_plans(costs: ModelCosts, budget: Budget) -> None:
    assume(len(costs.layers) == 5)
    compare_with_all(costs, budget)


@settings(max_examples=60, deadline=None)
@given(models(max_layers=30, num_groups=3), budgets, st.integers(0, 6))
def test_no_budget_is_broken(costs: ModelCosts, budget: Budget, factor: int) -> None:
    budget = replace(budget, device_bytes=budget.device_bytes * factor, host_bytes=budget.host_bytes * factor)
    plan = planned(costs, budget)
    assert plan is None or keeps_to(plan, costs, budget)


@settings(max_examples=60, deadline=None)
@given(models(max_layers=30, num_groups=3), budgets)
def test_what_would_work_does(costs: ModelCosts, budget: Budget) -> None:
    """The figures of the error are enough, and one byte less is not."""
    try:
        plan_activations(costs, budget)
    except BudgetTooSmall as error:
        enough = replace(budget, device_bytes=error.device_bytes, activation_bytes=error.activation_bytes)
        assert error.short and all(getattr(enough, name) > getattr(budget, name) for name in error.short)
        assert keeps_to(plan_activations(costs, enough), costs, enough)
        for name in error.short:
            with pytest.raises(BudgetTooSmall):
                plan_activations(costs, replace(enough, **{name: getattr(enough, name) - 1}))
        if error.host_bytes is not None:
            assert error.host_bytes > budget.host_bytes
            plan_activations(costs, replace(budget, host_bytes=error.host_bytes))
            with pytest.raises(BudgetTooSmall):
                plan_activations(costs, replace(budget, host_bytes=error.host_bytes - 1))


@settings(max_examples=60, deadline=None)
@given(models(max_layers=20, num_groups=3), budgets, st.sampled_from(["device_bytes", "host_bytes"]), st.data())
def test_more_memory_is_never_slower(costs: ModelCosts, budget: Budget, name: str, data: Any) -> None:
    """Within what the search may leave in models of a few bytes: it stops a thousandth above its bound, or when it has
    looked long enough, and fills what is left of the budget in a few rounds."""
    more = replace(budget, **{name: getattr(budget, name) + data.draw(st.integers(1, 500))})
    plan = planned(costs, budget)
    assume(plan is not None)
    assert plan is not None and plan_activations(costs, more).step_seconds <= plan.step_seconds * 1.05


def test_a_given_plan_by_hand() -> None:
    costs = small_costs()
    offloaded = LayerPlan(places={Group.INPUT: HOST, Group.QKV: HOST})
    layers = [offloaded, LayerPlan(), LayerPlan(places={Group.INPUT: HOST}), LayerPlan(is_whole=True, places={})]
    plan = assess_plan(layers, costs)
    assert plan.buffer_bytes == 2 * 300
    assert plan.device_bytes == 600 + 100 + 1000
    assert plan.host_bytes == 400
    assert plan.peak_bytes == 10_000 + 1700 + (500 + 2 * 300)
    assert plan.step_seconds == pytest.approx(2 * (3.8 + 4 + 4 + 3 + 0.5) + 0.25)
    assert plan.link_fill == pytest.approx(400 / 200 / 4)
    assert plan.reload_fill == pytest.approx(400 / 100 / (2.8 + 3 + 3 + 2))
    assert plan.recomputed == pytest.approx((0.6 + 0.8 + 0.8) / 4)
    assert plan.stall_seconds == 0


def test_one_buffer_waits_for_every_copy() -> None:
    layers = [LayerPlan(places={Group.INPUT: HOST, Group.QKV: HOST}), LayerPlan(places={Group.INPUT: HOST})]
    plan = assess_plan([*layers, LayerPlan(), LayerPlan()], small_costs(num_buffers=1))
    assert plan.stall_seconds == pytest.approx(3 + 1)
    assert plan.buffer_bytes == 300
    assert plan.step_seconds == pytest.approx(2 * (3.8 + 4 + 4 + 4 + 4 + 0.5) + 0.25)


def test_two_buffers_wait_for_what_backward_does_not_hide() -> None:
    """Copies of 3 and 7 s: the first hides under 2 s of the last layer, the second under 2.2 + 3 s."""
    first = LayerPlan(places={Group.INPUT: HOST, Group.QKV: HOST, Group.GATE_UP: HOST})
    third = LayerPlan(places={Group.INPUT: HOST, Group.QKV: HOST})
    plan = assess_plan([first, LayerPlan(), third, LayerPlan(is_whole=True, places={})], small_costs())
    assert plan.stall_seconds == pytest.approx((7 - (2.8 + 3)) + (3 - 2))


def test_with_room_for_everything_all_layers_are_whole() -> None:
    plan = plan_activations(small_costs(), PLENTY)
    assert all(layer.is_whole for layer in plan.layers)
    assert (plan.step_seconds, plan.recomputed, plan.host_bytes) == (2 * (4 * 3 + 0.5) + 0.25, 0, 0)
    assert plan.peak_bytes == 10_000 + 4 * 1000 + 700
    edge = Budget(device_bytes=4700, host_bytes=0)
    assert plan_activations(small_costs(), edge) == plan
    assert not all(layer.is_whole for layer in plan_activations(small_costs(), replace(edge, device_bytes=4699)).layers)


def test_with_room_for_inputs_alone_all_else_is_remade() -> None:
    plan = plan_activations(small_costs(), Budget(device_bytes=4 * 100 + 700, host_bytes=0))
    assert plan.layers == (LayerPlan(),) * 4
    assert plan.step_seconds == pytest.approx(2 * (4 * 4 + 0.5) + 0.25)
    assert plan.recomputed == pytest.approx(0.8)


def test_the_group_that_saves_most_a_byte_is_stored_first() -> None:
    """Room for two of `gate_up` (0.6 s in 400 bytes) or four of `qkv` (0.2 s in 200): the former, in late layers."""
    kind = replace(small_costs().kinds[0], whole_bytes=None)
    plan = plan_activations(small_costs(kinds=(kind,)), Budget(device_bytes=400 + 700 + 800, host_bytes=0))
    stored = LayerPlan(places={Group.INPUT: DEVICE, Group.GATE_UP: DEVICE})
    assert plan.layers == (LayerPlan(), LayerPlan(), stored, stored)


@pytest.mark.parametrize("seconds", [0.0, -0.1])
def test_a_group_that_saves_nothing_is_never_stored(seconds: float) -> None:
    kind = small_costs().kinds[0]
    kind = replace(kind, whole_bytes=None, groups=dict(kind.groups) | {Group.QKV: GroupCost(1, seconds)})
    plan = plan_activations(small_costs(kinds=(kind,)), PLENTY)
    assert all(Group.QKV not in layer.places and Group.GATE_UP in layer.places for layer in plan.layers)


def test_whole_only_where_it_is_fastest() -> None:
    kind = replace(small_costs().kinds[0], whole_seconds=3.5)
    plan = plan_activations(small_costs(kinds=(kind,)), PLENTY)
    assert not any(layer.is_whole for layer in plan.layers)
    assert plan.step_seconds == pytest.approx(2 * (4 * 3.2 + 0.5) + 0.25)


def test_the_recipe_limit_bounds_what_is_stored_and_the_buffers() -> None:
    plan = plan_activations(qwen3_14b_costs(), Budget(100 * GIB, 64 * GIB, activation_bytes=6 * GIB))
    assert 0 < plan.buffer_bytes < plan.device_bytes <= 6 * GIB
    with pytest.raises(BudgetTooSmall) as caught:
        plan_activations(small_costs(), replace(PLENTY, activation_bytes=200, host_bytes=0))
    assert caught.value.short == ("activation_bytes",) and caught.value.activation_bytes == 400
    assert "activation_bytes must be 400 or more" in str(caught.value)


def test_shared_memory_holds_nothing_on_the_host() -> None:
    costs = qwen3_14b_costs()
    budget = Budget(12 * GIB, 64 * GIB)
    assert plan_activations(costs, budget).host_bytes > 0
    shared = replace(costs, link=replace(costs.link, is_shared=True))
    assert plan_activations(shared, budget).host_bytes == 0


def test_offloaded_layers_are_spread_among_the_others() -> None:
    plan = plan_activations(qwen3_14b_costs(), Budget(int((79 - 8.2) * GIB), 64 * GIB))
    away = [index for index, layer in enumerate(plan.layers) if HOST in layer.places.values()]
    gaps = [after - before for before, after in pairwise(away)]
    assert 5 <= len(away) <= 9 and max(gaps) - min(gaps) <= 1 and min(gaps) >= 4
    assert plan.stall_seconds == 0


def test_nothing_goes_to_the_host_without_need() -> None:
    assert plan_activations(qwen3_14b_costs(), Budget(160 * GIB, 64 * GIB)).host_bytes == 0


def test_more_memory_is_never_slower_for_a_large_model() -> None:
    costs = qwen3_14b_costs()
    times = [
        plan_activations(costs, Budget(int(cap * GIB) - costs.fixed_bytes, 64 * GIB)).step_seconds
        for cap in (12, 14, 16, 19, 23, 31, 47, 79, 139)
    ]
    assert all(after <= before * 1.001 for before, after in pairwise(times))
    assert times[-1] == pytest.approx(40 * 0.036 + 0.08 + 0.03, rel=0.01)


def test_layers_of_equal_kinds_listed_twice() -> None:
    """The last layer takes over what one of another class, of equal costs, stores."""
    costs = small_costs()
    budget = Budget(device_bytes=400 + 700 + 900, host_bytes=0)
    twice = replace(costs, kinds=costs.kinds * 2, layers=(0, 1, 1, 0))
    plan = plan_activations(twice, budget)
    assert plan.step_seconds == plan_activations(costs, budget).step_seconds
    assert keeps_to(plan, twice, budget) and Group.GATE_UP in plan.layers[-1].places


def test_planning_is_fast() -> None:
    """Bound for a loaded machine; on one free core no case takes 0.3 s."""
    costs = qwen3_14b_costs(num_layers=80, num_kinds=2)
    for cap in (16, 31, 63, 100, 139):
        start = time.process_time()
        plan_activations(costs, Budget(int(cap * GIB) - costs.fixed_bytes, 64 * GIB))
        assert time.process_time() - start < 1.0


def test_tighter_takes_less_than_the_plan_that_failed() -> None:
    costs = qwen3_14b_costs()
    roomy = Budget(100 * GIB, 64 * GIB)
    failed = plan_activations(costs, roomy)
    budget = tighter(costs, roomy, by_bytes=2 * GIB)
    assert budget == Budget(failed.peak_bytes - costs.fixed_bytes - 2 * GIB, 64 * GIB)
    assert plan_activations(costs, budget).peak_bytes <= failed.peak_bytes - 2 * GIB
    limited = tighter(costs, replace(roomy, activation_bytes=20 * GIB), by_bytes=2 * GIB)
    assert limited.activation_bytes is not None and 17 * GIB < limited.activation_bytes <= 18 * GIB
    assert tighter(small_costs(), PLENTY, by_bytes=10**6) == replace(PLENTY, device_bytes=0)


def test_what_cannot_be_planned_is_named() -> None:
    with pytest.raises(ValueError, match="0 layers"):
        plan_activations(small_costs(num_layers=0), PLENTY)
    with pytest.raises(ValueError, match="0 reload buffers"):
        plan_activations(small_costs(num_buffers=0), PLENTY)
    with pytest.raises(ValueError, match="3 layers cannot serve a model of 4"):
        assess_plan([LayerPlan()] * 3, small_costs())
    with pytest.raises(ValueError, match="stores attention"):
        assess_plan([LayerPlan(places={Group.INPUT: DEVICE, Group.ATTENTION: DEVICE})] * 4, small_costs())
    kind = replace(small_costs().kinds[0], whole_bytes=None)
    with pytest.raises(ValueError, match="was not measured"):
        assess_plan([LayerPlan(is_whole=True, places={})] * 4, small_costs(kinds=(kind,)))


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['finetune.optimizations'] = package = types.ModuleType('finetune.optimizations')\n"
        "import finetune; package.__path__ = [finetune.__path__[0] + '/optimizations']\n"
        "import finetune.optimizations.activations.planner, finetune.optimizations.activations.describe\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_many_kinds_of_layers_are_planned_in_time() -> None:
    """Also where nothing fits, and every way to offload was looked at."""
    one = small_costs()
    kinds = tuple(replace(one.kinds[0], backward_peak_bytes=700 + number) for number in range(16))
    costs = replace(one, kinds=kinds, layers=tuple(range(16)) * 2)
    start = time.process_time()
    with pytest.raises(BudgetTooSmall) as caught:
        plan_activations(costs, Budget(device_bytes=1, host_bytes=10**9))
    assert time.process_time() - start < 5.0
    enough = Budget(device_bytes=caught.value.device_bytes, host_bytes=10**9)
    assert keeps_to(plan_activations(costs, enough), costs, enough)
