"""What a recompute leaves out is tried before training: a model that reads it after all keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_models import TinyModel, plan_of, tiny_model
from numerics import assert_bitwise_equal
from tiny import KINDS
from torch import nn

from finetune.optimizations.activations.measure import LayerMeter, capture_calls, kinds_of
from finetune.optimizations.activations.skipping import check_skipping
from finetune.optimizations.activations.stored_outputs import base_that_can_be_left_out
from finetune.optimizations.activations.types import Group, Place

ALL = tuple(group for group in Group if group is not Group.INPUT)


def checked(tiny: TinyModel) -> frozenset[Group]:
    with torch.no_grad():
        calls = capture_calls(tiny.layers, kinds_of(tiny.layers), tiny.loss)
    return check_skipping(LayerMeter(tiny.layers, tiny.checkpointing, device=tiny.device), tiny.outputs, calls)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "gpt_oss"])
def test_everything_may_be_left_out_of_usual_layers(kind: str) -> None:
    tiny = tiny_model(kind)
    assert checked(tiny) == frozenset(Group)
    assert tiny.outputs.skips_last and tiny.outputs.fill is None


def test_dropout_is_the_same_in_what_is_compared() -> None:
    """Other masks in each run would refuse everything."""
    tiny = tiny_model("qwen3", dropout=0.3)
    assert checked(tiny) == frozenset(Group)
    assert tiny.outputs.skips_last


def test_a_norm_after_the_mlp_reads_what_down_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": True}
    monkeypatch.setitem(KINDS, "gemma2", gemma)
    tiny = tiny_model("gemma2")
    assert checked(tiny) == frozenset(Group)
    assert not tiny.outputs.skips_last
    expected = tiny.step()
    tiny.install([plan_of(Place.DEVICE, *ALL)] * 4)
    assert_bitwise_equal(tiny.step()[1], expected[1])


def test_a_result_that_is_read_after_all_is_not_left_out() -> None:
    """Here backward wants what the frozen product of the output projection gave, which no group stores."""
    tiny = tiny_model("qwen3")
    layers: list[Any] = tiny.layers
    for layer in layers:
        layer.self_attn.o_proj.get_base_layer().register_forward_hook(lambda module, args, output: output * output)
    expected = tiny.step()
    assert checked(tiny) == frozenset({Group.INPUT})
    assert tiny.outputs.skips_last
    tiny.install([plan_of(Place.DEVICE)] * 4)
    assert_bitwise_equal(tiny.step()[1], expected[1])


@pytest.mark.parametrize("trained", [False, True])
def test_a_trained_weight_is_computed_again(trained: bool) -> None:
    linear = nn.Linear(8, 8)
    linear.requires_grad_(trained)
    assert (base_that_can_be_left_out(linear) is linear) == (not trained)
    assert base_that_can_be_left_out(nn.LayerNorm(8)) is None


def test_dora_reads_the_base_and_computes_it_again() -> None:
    from peft import LoraConfig, get_peft_model

    for dora in (False, True):
        model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), LoraConfig(r=2, target_modules=["0"], use_dora=dora))
        module = model.base_model.model[0]  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
        assert (base_that_can_be_left_out(module) is None) == dora
