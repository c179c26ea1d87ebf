"""What is measured of a layer: its kinds, its bytes, its gradients; and that nothing is left of it."""

from __future__ import annotations

import pytest
import torch
from activation_models import WHOLE, TinyModel, plan_of, tiny_model
from numerics import assert_bitwise_equal

from finetune.optimizations.activations.head import measure_head
from finetune.optimizations.activations.measure import LayerMeter, _shared_out, capture_calls, kinds_of, measure_link
from finetune.optimizations.activations.types import Group, GroupCost, LayerPlan, Place

ROWS, LENGTH, HIDDEN, KEY_VALUE, INNER = 2, 37, 64, 32, 128
TOKENS = ROWS * LENGTH
EVERYTHING = plan_of(Place.DEVICE, *(group for group in Group if group is not Group.INPUT))


def calls_of(tiny: TinyModel):
    kinds = kinds_of(tiny.layers)
    with torch.no_grad():
        return capture_calls(tiny.layers, kinds, tiny.loss)


@pytest.mark.parametrize(("kind", "expected"), [("qwen3", (0, 0, 0, 0)), ("gpt_oss", (0, 1, 0, 1))])
def test_layers_are_alike_where_their_weights_and_their_attention_are(kind: str, expected: tuple[int, ...]) -> None:
    assert kinds_of(tiny_model(kind).layers) == expected


def test_a_layer_of_another_width_is_another_kind() -> None:
    tiny = tiny_model("qwen3")
    tiny.layers[2].mlp.gate_proj = torch.nn.Linear(HIDDEN, INNER + 8, bias=False)
    assert kinds_of(tiny.layers) == (0, 0, 1, 0)


def test_the_model_runs_no_further_than_to_the_last_new_kind() -> None:
    tiny = tiny_model("gpt_oss")
    called: list[int] = []
    for index, layer in enumerate(tiny.layers):
        layer.register_forward_hook(lambda *_, index=index: called.append(index))
    calls = calls_of(tiny)
    assert called == [0]
    assert [call.index for call in calls] == [0, 1]
    assert calls[0].hidden.shape == (ROWS, LENGTH, HIDDEN)
    assert not torch.equal(calls[0].hidden, calls[1].hidden)


def test_bytes_and_gradients_of_one_layer() -> None:
    tiny = tiny_model("qwen3")
    (call,) = calls_of(tiny)
    meter = LayerMeter(tiny.layers, tiny.checkpointing, device=tiny.device)
    whole, bare, stored = (meter.run(call, plan) for plan in (WHOLE, LayerPlan(), EVERYTHING))
    assert stored.group_bytes == {
        Group.INPUT: TOKENS * HIDDEN * 4,
        Group.QKV: TOKENS * (HIDDEN + 2 * KEY_VALUE) * 4,
        Group.ATTENTION: 0,  # transformers' own attention cannot be told its result
        Group.ATTENTION_OUTPUT: TOKENS * HIDDEN * 4,
        Group.GATE_UP: TOKENS * 2 * INNER * 4,
    }
    assert (
        bare.group_bytes[Group.INPUT] == TOKENS * HIDDEN * 4 and sum(bare.group_bytes.values()) == TOKENS * HIDDEN * 4
    )
    assert whole.group_bytes == {} and whole.kept_bytes > sum(stored.group_bytes.values())
    expected = {str(index): grad for index, grad in enumerate(whole.grads)}
    for other in (bare, stored):
        assert_bitwise_equal({str(index): grad for index, grad in enumerate(other.grads)}, expected)
    assert all(parameter.grad is None for parameter in tiny.model.parameters())


def test_costs_add_up_to_what_all_groups_save_together() -> None:
    groups = {
        Group.INPUT: GroupCost(10, 0.0),
        Group.QKV: GroupCost(10, 0.3),
        Group.GATE_UP: GroupCost(10, 0.1),
        Group.ATTENTION_OUTPUT: GroupCost(10, -0.2),
    }
    shared = _shared_out(groups, 0.2)
    assert [shared[group].seconds for group in groups] == pytest.approx([0.0, 0.15, 0.05, 0.0])
    assert all(cost.seconds == 0 for cost in _shared_out(groups, -0.1).values())
    assert all(cost.seconds == 0 for cost in _shared_out({Group.INPUT: GroupCost(10, 0.0)}, 0.1).values())


def test_a_whole_layer_is_never_said_to_be_slower_than_one_that_computes_again() -> None:
    tiny = tiny_model("qwen3")
    (call,) = calls_of(tiny)
    costs = LayerMeter(tiny.layers, tiny.checkpointing, device=tiny.device).costs(call, frozenset(Group))
    saved = sum(cost.seconds for cost in costs.groups.values())
    assert costs.whole_seconds < costs.forward_seconds + costs.backward_seconds - saved
    assert set(costs.groups) == set(Group) - {Group.ATTENTION}


def test_the_head_is_measured_without_the_layers() -> None:
    tiny = tiny_model("qwen3")
    called: list[int] = []
    handles = [layer.mlp.register_forward_hook(lambda *_: called.append(1)) for layer in tiny.layers]
    before = tiny.loss().detach()
    assert called
    called.clear()
    costs = measure_head(tiny.model, tiny.layers, tiny.loss, device=tiny.device, repetitions=2)
    assert costs.seconds > 0 and not called
    assert not any("forward" in vars(layer) for layer in tiny.layers)
    assert all(parameter.grad is None for parameter in tiny.model.parameters())
    assert torch.equal(tiny.loss().detach(), before)
    for handle in handles:
        handle.remove()


def test_a_cpu_shares_its_memory_with_itself() -> None:
    assert measure_link(torch.device("cpu")).is_shared
