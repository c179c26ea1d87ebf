"""The plan in words and as plain values."""

from __future__ import annotations

import json
from itertools import product

import pytest
from activation_costs import qwen3_14b_costs, small_costs

from finetune.optimizations.activations.assess import assess_plan
from finetune.optimizations.activations.describe import plan_dict, plan_lines
from finetune.optimizations.activations.planner import plan_activations
from finetune.optimizations.activations.types import GIB, ActivationPlan, Budget, Group, LayerPlan, Place

WHOLE = LayerPlan(is_whole=True, places={})
OFFLOADED = LayerPlan(places={Group.INPUT: Place.HOST, Group.QKV: Place.DEVICE})


def test_one_way_for_all_layers_is_one_line() -> None:
    costs = qwen3_14b_costs()
    assert plan_lines(plan_activations(costs, Budget(200 * GIB, 0)), costs) == [
        "activations: 40 layers whole",
        "expected: peak 162.5 GiB (8.2 fixed, 152.7 for activations, 1.5 work), nothing on the host,",
        "          0% of a forward pass remade, 1.55 s a step",
    ]


def test_each_way_is_a_line_the_most_common_first() -> None:
    costs = small_costs(fixed_bytes=3 * GIB)
    lines = plan_lines(assess_plan([WHOLE, OFFLOADED, WHOLE, WHOLE], costs), costs)
    assert lines[:3] == [
        "activations:",
        "  3 layers whole",
        "  1 layer with qkv on the device and input on the host",
    ]
    assert "host 0.0 GiB pinned, link busy 12% of forward" in lines[4]
    assert "15% of a forward pass remade" in lines[4] and lines[5].strip() == "26.85 s a step"
    assert "waiting" not in " ".join(lines)


def test_waits_that_matter_are_told() -> None:
    costs = small_costs(num_buffers=1)
    lines = plan_lines(assess_plan([OFFLOADED, OFFLOADED, LayerPlan(), LayerPlan()], costs), costs)
    assert "(11% of it waiting for reloads)" in " ".join(lines)


@pytest.mark.parametrize("cap", [12, 14, 16, 19, 23, 31, 39, 47, 63, 79, 139])
def test_lines_fit_the_terminal(cap: int) -> None:
    costs = qwen3_14b_costs(num_layers=80, num_kinds=2)
    lines = plan_lines(plan_activations(costs, Budget(cap * GIB, 64 * GIB)), costs)
    assert len(lines) <= 8 and max(map(len, lines)) <= 100


def longest_plan() -> ActivationPlan:
    """100 layers in 31 ways, each with every group stored, and figures as wide as they get."""
    ways = list(product(Place, repeat=5))[:-1]
    layers = [LayerPlan(places=dict(zip(Group, places, strict=True))) for places in ways]
    one = layers[1]
    return ActivationPlan(
        layers=(*[one] * 69, *layers),
        device_bytes=1000 * GIB,
        buffer_bytes=0,
        host_bytes=1000 * GIB,
        peak_bytes=3000 * GIB,
        step_seconds=10_000.0,
        link_fill=0.85,
        recomputed=1.0,
        stall_seconds=5000.0,
    )


def test_the_longest_lines_fit_the_terminal() -> None:
    lines = plan_lines(longest_plan(), qwen3_14b_costs())
    assert len(lines) == 8 and max(map(len, lines)) <= 100
    assert lines[4] == "  28 layers in 28 other ways"


def test_the_report_holds_every_figure() -> None:
    costs = small_costs()
    plan = assess_plan([WHOLE, WHOLE, OFFLOADED, WHOLE], costs)
    values = plan_dict(plan, costs)
    assert json.loads(json.dumps(values)) == values
    assert values["layers"] == [
        {"first_layer": 0, "num_layers": 2, "is_whole": True, "places": {}},
        {"first_layer": 2, "num_layers": 1, "is_whole": False, "places": {"input": "host", "qkv": "device"}},
        {"first_layer": 3, "num_layers": 1, "is_whole": True, "places": {}},
    ]
    assert values["peak_bytes"] == values["fixed_bytes"] + values["device_bytes"] + values["work_bytes"]
    for name in ("buffer_bytes", "host_bytes", "link_fill", "reload_fill", "recomputed", "stall_seconds"):
        assert values[name] == getattr(plan, name)
    assert (values["step_seconds"], values["num_buffers"], values["num_micro_batches"]) == (plan.step_seconds, 2, 2)
