"""Targets: what gets an adapter, what must not, and names that match nothing."""

from __future__ import annotations

import pytest
import torch
from tiny import make_config
from transformers import AutoModelForCausalLM

from finetune.errors import RecipeError
from finetune.model.adapter import add_adapter
from finetune.model.targets import choose_targets, names_for_peft
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


@pytest.mark.parametrize(("key", "value"), [("dropout", 0.1), ("dora", True)])
def test_what_experts_cannot_have_is_refused(key: str, value: object) -> None:
    """P37: PEFT has neither dropout nor DoRA on expert parameters; said before the weights are read."""
    adapter = LoraAdapter.model_validate({key: value})
    with pytest.raises(RecipeError, match=r"expert weights \(model\.layers\.\*\.mlp\.experts") as caught:
        choose_targets(skeleton("qwen3_moe"), adapter)
    assert caught.value.place == f"adapter.{key}"
    assert choose_targets(skeleton("qwen3_moe"), adapter.model_copy(update={"targets": "attention"})).modules


def test_layers_and_full_paths() -> None:
    in_layer = choose_targets(skeleton("qwen3_moe"), LoraAdapter(layers=[1]))
    assert {name.split(".")[2] for name in (*in_layer.modules, *in_layer.parameters)} == {"1"}
    path = "model.layers.1.self_attn.q_proj"
    assert choose_targets(skeleton("qwen3"), LoraAdapter(targets=[path])).modules == (path,)


def test_layers_of_paths_with_two_numbers_have_full_names() -> None:
    """The expert's number must not be taken for that of the layer."""
    names = [f"layers.{layer}.mlp.experts.{expert}.up_proj" for layer in (0, 1) for expert in (0, 1)]
    assert names_for_peft(names[:2], names, parts=1, layers=[0]) == names[:2]
    plain = ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]
    assert names_for_peft(plain[:1], plain, parts=1, layers=[0]) == ["up_proj"]


@pytest.mark.parametrize(
    ("layers", "targets", "message"),
    [
        ([0, 2, 5], "all-linear", r"layers 2, 5, but the model has the layers 0 to 1"),
        ([0, 1], ["model.layers.1.self_attn.q_proj"], r"layer 0, where adapter.targets matches nothing"),
    ],
)
def test_layers_without_a_target_are_an_error(layers: list[int], targets: object, message: str) -> None:
    adapter = LoraAdapter.model_validate({"layers": layers, "targets": targets})
    with pytest.raises(RecipeError, match=message) as caught:
        choose_targets(skeleton("qwen3"), adapter)
    assert caught.value.place == "adapter.layers"


@pytest.mark.parametrize("wanted", ["embed_tokens", "lm_head"])
def test_a_tied_embedding_is_saved_at_both_ends(wanted: str) -> None:
    """P4: naming one end of a tied weight means both; of an untied one, that end alone."""
    assert choose_targets(skeleton("qwen3"), LoraAdapter(modules_to_save=[wanted])).saved[0].endswith(wanted)
    assert len(choose_targets(skeleton("qwen3"), LoraAdapter(modules_to_save=[wanted])).saved) == 2
    assert len(choose_targets(skeleton("llama"), LoraAdapter(modules_to_save=[wanted])).saved) == 1


def test_modules_to_save_are_matched_by_whole_names() -> None:
    """P5: PEFT looks at the last letters, so that its `norm` is every layer's `input_layernorm` and `q_norm` too."""
    model = skeleton("qwen3")
    adapter = LoraAdapter(modules_to_save=["norm"])
    wrapped = add_adapter(model, adapter, targets=choose_targets(model, adapter))
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad and "lora" not in name]
    assert trained == ["base_model.model.model.norm.modules_to_save.default.weight"]
    assert "model.norm" in [group.name.removesuffix(".weight") for group in trainable_table(wrapped).groups]


@pytest.mark.parametrize(
    ("wanted", "message", "remedy"),
    [
        (["lm_haed"], "`lm_haed`", "Nearest: `lm_head`"),
        (["mlp", "up_proj"], "as well as a module around it", "one of them"),
        (["self_attn", "mlp"], "every target", "fewer modules"),
    ],
)
def test_modules_that_cannot_be_saved(wanted: list[str], message: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as caught:
        choose_targets(skeleton("llama"), LoraAdapter(modules_to_save=wanted))
    assert caught.value.place == "adapter.modules_to_save"
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_quantized_layers_are_not_saved() -> None:
    with pytest.raises(RecipeError, match="quantized linear layers"):
        choose_targets(skeleton("llama"), LoraAdapter(modules_to_save=["0.mlp"]), is_quantized=True)
    ends = LoraAdapter(modules_to_save=["lm_head", "norm"])
    assert choose_targets(skeleton("llama"), ends, is_quantized=True).saved == ("lm_head", "model.norm")


def test_a_tied_embedding_counts_twice_in_the_file() -> None:
    model = skeleton("qwen3")
    adapter = LoraAdapter(modules_to_save=["embed_tokens"])
    table = trainable_table(add_adapter(model, adapter, targets=choose_targets(model, adapter)))
    assert table.saved_bytes - table.trainable_bytes == 260 * 64 * 4
    assert table.checkpoint_bytes == table.saved_bytes + 8 * table.num_trainable


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
