"""Targets: what gets an adapter, what must not, and names that match nothing."""

from __future__ import annotations

import pytest
import torch
from tiny import make_config
from transformers import AutoModelForCausalLM

from finetune.errors import RecipeError
from finetune.model.adapter import add_adapter, choose_targets
from finetune.model.trainable import trainable_table
from finetune.recipe.schema import LoraAdapter

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def skeleton(kind: str):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config(kind))


def endings(names: tuple[str, ...]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    ("kind", "modules", "parameters"),
    [
        ("qwen3", ATTENTION | {"gate_proj", "up_proj", "down_proj"}, set()),
        ("llama", ATTENTION | {"gate_proj", "up_proj", "down_proj"}, set()),
        ("qwen3_moe", ATTENTION, {"gate_up_proj", "down_proj"}),
        ("gpt_oss", ATTENTION, {"gate_up_proj", "down_proj"}),
    ],
)
def test_all_linear_means_attention_and_mlp(kind: str, modules: set[str], parameters: set[str]) -> None:
    targets = choose_targets(skeleton(kind), LoraAdapter())
    assert endings(targets.modules) == modules
    assert endings(targets.parameters) == parameters


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_all_linear_does_not_train_the_router(kind: str) -> None:
    """PEFT's own `all-linear` adds the router of a mixture of experts without a word."""
    model = skeleton(kind)
    adapter = LoraAdapter()
    wrapped = add_adapter(model, adapter, targets=choose_targets(model, adapter))
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert trained
    assert not [name for name in trained if "router" in name or ".gate." in name]
    assert [name for name in trained if "experts" in name]


def test_attention_only() -> None:
    targets = choose_targets(skeleton("qwen3_moe"), LoraAdapter(targets="attention"))
    assert endings(targets.modules) == ATTENTION
    assert targets.parameters == ()


def test_names_match_by_their_end() -> None:
    targets = choose_targets(skeleton("qwen3_moe"), LoraAdapter(targets=["q_proj", "mlp.experts.down_proj"]))
    assert (endings(targets.modules), endings(targets.parameters)) == ({"q_proj"}, {"down_proj"})


@pytest.mark.parametrize(("target", "nearest"), [("q_porj", "q_proj"), ("gate_up", "gate_up_proj")])
def test_a_target_that_matches_nothing_is_an_error(target: str, nearest: str) -> None:
    with pytest.raises(RecipeError) as caught:
        choose_targets(skeleton("qwen3_moe"), LoraAdapter(targets=["v_proj", target]))
    assert caught.value.place == "adapter.targets"
    assert target in caught.value.message
    assert nearest in caught.value.remedy


def test_dropout_on_experts_is_refused() -> None:
    with pytest.raises(RecipeError, match="dropout"):
        choose_targets(skeleton("qwen3_moe"), LoraAdapter(dropout=0.1))


def test_full_fine_tuning_leaves_the_model_alone() -> None:
    model = skeleton("qwen3")
    assert add_adapter(model, LoraAdapter(), targets=None) is model


def test_the_table_counts_what_is_trained() -> None:
    model = skeleton("qwen3")
    adapter = LoraAdapter(rank=4)
    table = trainable_table(add_adapter(model, adapter, targets=choose_targets(model, adapter)))
    wide = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64)}
    wide |= {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    expected = 2 * sum(4 * (inside + outside) for inside, outside in wide.values())
    assert table.num_trainable == expected == sum(group.num_parameters for group in table.groups)
    assert table.trainable_bytes == 4 * expected
    assert {group.dtype for group in table.groups} == {"float32"}
