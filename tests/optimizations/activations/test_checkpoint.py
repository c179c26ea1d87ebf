"""Layers under a plan give the loss and every gradient of layers without checkpoints, bit by bit, wherever the plan has
their tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from activation_models import KEPT, ON_HOST, WHOLE, TinyModel, plan_of, tiny_model
from numerics import assert_bitwise_equal

from finetune.optimizations.activations.record import ChangedInPlace
from finetune.optimizations.activations.types import Group, LayerPlan, Place
from finetune.optimizations.attention import sdpa_kernels

ALL = tuple(group for group in Group if group is not Group.INPUT)
KINDS = ["qwen3", "llama", "qwen3_moe", "gpt_oss"]


def assert_equal_steps(one: tuple, other: tuple) -> None:
    assert torch.equal(one[0], other[0])
    assert_bitwise_equal(one[1], other[1])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all", "qv"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_group_in_every_place_gives_equal_gradients(kind: str, targets: object) -> None:
    """What a recompute leaves out is filled with NaN: nothing may read it."""
    tiny = tiny_model(kind, targets=targets)
    expected = tiny.step()
    tiny.outputs.fill = float("nan")
    for place in Place:
        for groups in [(), *((group,) for group in ALL), ALL]:
            plan = plan_of(place, *groups)
            for plans in ([plan, plan, plan, KEPT], [plan, WHOLE, plan, KEPT], [plan] * 4):
                tiny.install(plans)
                assert_equal_steps(tiny.step(), expected)
                assert_equal_steps(tiny.step(), expected)
                assert tiny.leased() == []


@pytest.mark.parametrize("place", list(Place))
@pytest.mark.parametrize("backend", ["segments", "sdpa"])
def test_stored_attention_is_not_computed_again(backend: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_model("gpt_oss")
    tiny.attend_with(backend, lengths=[(9, 20, 8), (30, 7)])
    expected = tiny.step()
    calls = []
    compute = sdpa_kernels._forward
    monkeypatch.setattr(sdpa_kernels, "_forward", lambda *args: calls.append(1) or compute(*args))
    tiny.install([plan_of(place, Group.ATTENTION)] * 4)
    assert_equal_steps(tiny.step(), expected)
    a_layer = 5 if backend == "segments" else 1  # one call a document, or one for both rows
    assert len(calls) == 4 * a_layer
    tiny.install([KEPT] * 4)
    assert_equal_steps(tiny.step(), expected)
    assert len(calls) == 3 * 4 * a_layer


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_reloads_are_under_way_before_they_are_needed(num_buffers: int) -> None:
    """With two buffers no layer waits for a copy that begins only when its backward does; with one every layer does."""
    tiny = tiny_model("qwen3")
    expected = tiny.step()
    reload = tiny.install([ON_HOST, ON_HOST, ON_HOST, KEPT], num_buffers=num_buffers)
    for number in (1, 2):
        assert_equal_steps(tiny.step(), expected)
        assert reload.num_misses == (0 if num_buffers == 2 else 3 * number)


@pytest.mark.parametrize("last", ["whole", "host"])
def test_the_first_reload_of_a_backward_is_under_way_too(last: str) -> None:
    """Also where the last layers have no record, or the last one itself is on the host."""
    tiny = tiny_model("qwen3")
    expected = tiny.step()
    plans = [ON_HOST, ON_HOST, WHOLE, WHOLE] if last == "whole" else [ON_HOST] * 4
    reload = tiny.install(plans)
    assert_equal_steps(tiny.step(), expected)
    assert reload.num_misses == 0


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_two_forwards_before_a_backward(num_buffers: int) -> None:
    """The second graph finds the slots taken and keeps its tensors on the device; both get their own back."""
    tiny = tiny_model("qwen3")
    losses = [tiny.step(seed=seed) for seed in (0, 1)]
    reload = tiny.install([ON_HOST, ON_HOST, ON_HOST, KEPT], num_buffers=num_buffers)
    for order in ((0, 1), (1, 0)):
        tiny.model.zero_grad()
        graphs = [tiny.loss(seed=seed) for seed in (0, 1)]
        assert tiny.leased() == [0, 1, 2]
        for number in order:
            tiny.model.zero_grad()
            graphs[number].backward()
            assert_equal_steps((graphs[number].detach(), tiny.grads()), losses[number])
        del graphs
        assert tiny.leased() == []
    assert reload.num_refused == 6


def test_the_sum_of_two_graphs() -> None:
    tiny = tiny_model("qwen3")

    def both() -> dict[str, torch.Tensor]:
        tiny.model.zero_grad()
        (tiny.loss(seed=0) + tiny.loss(seed=1)).backward()
        return tiny.grads()

    expected = both()
    tiny.install([ON_HOST] * 4)
    assert_bitwise_equal(both(), expected)
    assert tiny.leased() == []


def test_a_second_backward_through_a_kept_graph() -> None:
    tiny = tiny_model("qwen3")
    tiny.model.zero_grad()
    loss = tiny.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    expected = tiny.grads()
    tiny.install([plan_of(Place.HOST, *ALL)] * 4)
    tiny.model.zero_grad()
    loss = tiny.loss()
    loss.backward(retain_graph=True)
    assert tiny.leased() == [0, 1, 2, 3]
    loss.backward()
    assert_bitwise_equal(tiny.grads(), expected)
    del loss
    assert tiny.leased() == []


def test_evaluation_between_micro_batches_leaves_them_alone() -> None:
    tiny = tiny_model("qwen3")

    def accumulated() -> dict[str, torch.Tensor]:
        tiny.model.zero_grad()
        first = tiny.loss(seed=0)
        tiny.model.eval()
        with torch.no_grad():
            tiny.loss(seed=5)
        tiny.model.train()
        first.backward()
        tiny.loss(seed=1).backward()
        return tiny.grads()

    expected = accumulated()
    tiny.install([ON_HOST, plan_of(Place.HOST, *ALL), ON_HOST, KEPT])
    assert_bitwise_equal(accumulated(), expected)


def test_an_exception_in_the_middle_of_a_forward_frees_its_slots() -> None:
    tiny = tiny_model("qwen3")
    expected = tiny.step()
    reload = tiny.install([ON_HOST] * 4)
    handle = tiny.layers[2].mlp.register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        tiny.loss()
    handle.remove()
    gc.collect()
    assert tiny.leased() == []
    assert_equal_steps(tiny.step(), expected)
    assert reload.num_refused == 0


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_an_exception_in_the_middle_of_a_backward() -> None:
    tiny = tiny_model("qwen3")
    expected = tiny.step()
    tiny.install([ON_HOST] * 4)
    loss = tiny.loss()
    handle = next(p for n, p in tiny.model.named_parameters() if "layers.1" in n and "lora_A" in n).register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    gc.collect()
    assert_equal_steps(tiny.step(), expected)
    assert tiny.leased() == []


def test_rows_longer_than_planned_stay_on_the_device() -> None:
    tiny = tiny_model("qwen3")
    expected = tiny.step(length=53)
    reload = tiny.install([ON_HOST] * 4, slot_bytes=2 * 37 * 64 * 4)
    tiny.step(length=37)
    assert reload.num_refused == 0
    assert_equal_steps(tiny.step(length=53), expected)
    assert reload.num_refused == 4


def test_dropout_is_drawn_again_as_it_was() -> None:
    """P37: the recompute sees the forward's dropout."""
    tiny = tiny_model("qwen3", dropout=0.3)
    torch.manual_seed(3)
    expected = tiny.step()
    tiny.install([plan_of(Place.HOST, *ALL), ON_HOST, KEPT, KEPT])
    torch.manual_seed(3)
    assert_equal_steps(tiny.step(), expected)


def test_a_tensor_changed_in_place_is_an_error() -> None:
    """Backward would read another value than forward wrote."""
    tiny = tiny_model("qwen3")
    tiny.install([plan_of(Place.DEVICE, Group.QKV)] * 4)
    handle = tiny.layers[0].self_attn.q_proj.register_forward_hook(_add_in_place)
    loss = tiny.loss()
    with pytest.raises(ChangedInPlace, match="layer 0"):
        loss.backward()
    handle.remove()


def _add_in_place(module: object, args: object, output: torch.Tensor) -> None:
    with torch.no_grad():
        output.add_(1.0)


def test_layers_of_different_widths() -> None:
    """A layer with a wider MLP needs a larger slot than its neighbours."""
    tiny = tiny_model("qwen3")
    from torch import nn

    for name in ("gate_proj", "up_proj"):
        wide = nn.Linear(64, 200, bias=False).requires_grad_(False)
        setattr(tiny.layers[1].mlp, name, wide)
    tiny.layers[1].mlp.down_proj = nn.Linear(200, 64, bias=False).requires_grad_(False)
    rebuilt = TinyModel(
        tiny.kind, tiny.model, tiny.layers, tiny.device, type(tiny.outputs)(tiny.layers), tiny.checkpointing
    )
    expected = rebuilt.step()
    rebuilt.install([plan_of(Place.HOST, *ALL)] * 3 + [KEPT])
    assert_equal_steps(rebuilt.step(), expected)


def test_another_model_and_the_wrapped_one_afterwards_are_untouched() -> None:
    tiny, other = tiny_model("qwen3"), tiny_model("qwen3")
    other.outputs.undo()
    tiny.install([ON_HOST] * 4)
    modules = [module for layer in other.layers for module in layer.modules()]
    assert not any("forward" in vars(module) for module in modules)
    assert not any(layer.gradient_checkpointing for layer in other.layers)
    tiny.checkpointing.remove()
    tiny.outputs.undo()
    modules = [module for layer in tiny.layers for module in layer.modules()]
    assert not any("forward" in vars(module) for module in modules)


def test_the_setter_of_transformers_sets_what_we_set() -> None:
    """A canary: `set_checkpoint_function` stands for transformers' private `_set_gradient_checkpointing`."""
    tiny = tiny_model("qwen3")
    called = []

    def own(function: object, *args: torch.Tensor) -> torch.Tensor:
        called.append(args)
        return function(*args)

    tiny.model.get_base_model()._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=own)
    assert all(layer._gradient_checkpointing_func is own and layer.gradient_checkpointing for layer in tiny.layers)
    tiny.loss()
    assert len(called) == 4
    assert all(len(args) == 1 and args[0].dim() == 3 for args in called)


def test_a_layer_plan_says_what_it_is() -> None:
    assert WHOLE.label == "whole"
    assert LayerPlan(places={Group.INPUT: Place.HOST, Group.QKV: Place.DEVICE}).label == "input host, qkv device"
