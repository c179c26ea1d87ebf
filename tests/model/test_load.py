"""Loading: number formats, attention, devices, incomplete weights, pad tokens, templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CHATML, make_model_folder, make_tokenizer

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.config import plan_model
from finetune.model.load import choose_pad_token, load_model, vocabulary_rows
from finetune.model.new_tokens import plan_new_tokens
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.schema import ModelSection


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("load") / "qwen3", "qwen3")


def section(path: Path, **values: object) -> ModelSection:
    return ModelSection.model_validate({"path": str(path), "device": "cpu"} | values)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_weights_are_held_as_the_recipe_says(folder: Path, dtype: str, expected: torch.dtype, init: str) -> None:
    model = load_model(plan_model(section(folder, dtype=dtype, init=init)), seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_auto_keeps_bf16(tmp_path: Path) -> None:
    """A bf16 checkpoint must not become fp32, which is what a bare model name gives in TRL."""
    folder = make_model_folder(tmp_path / "model", "llama", weights=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert plan_model(section(folder, init="random")).dtype == torch.bfloat16


def test_a_config_without_dtype_must_be_told(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama", weights=False)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"model\.dtype is auto"):
        plan_model(section(folder, init="random"))


def test_random_weights_come_from_the_seed(folder: Path) -> None:
    plan = plan_model(section(folder, init="random"))
    first, again, other = (load_model(plan, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_model_is_loaded_with_the_attention_that_its_architecture_has(folder: Path, tmp_path: Path) -> None:
    assert plan_model(section(folder)).attention == "sdpa"
    oss = make_model_folder(tmp_path / "oss", "gpt_oss", weights=False)
    assert plan_model(section(oss, init="random")).attention == "eager"


def test_missing_tensors_are_not_filled_with_random_ones(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"1 tensors are missing.*up_proj"):
        load_model(plan_model(section(folder)), seed=0)


def test_weights_that_the_model_does_not_use_are_told(tmp_path: Path) -> None:
    """A config with fewer layers than its weights gave a truncated model without a word."""
    folder = make_model_folder(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    said: list[str] = []
    load_model(plan_model(section(folder)), seed=0, say=said.append)
    assert len(said) == 1
    assert "9 tensors" in said[0]
    assert "model.layers.1." in said[0]


def test_fp16_on_the_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="GPU"):
        plan_model(section(folder, dtype="fp16"))


def test_cut_weights_are_an_error(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EnvironmentProblem) as caught:
        load_model(plan_model(section(folder)), seed=0)
    assert str(folder) in caught.value.place


@pytest.mark.parametrize(
    ("pad", "eos", "rows", "expected"), [(3, 5, 10, 3), (None, 5, 10, 5), (12, 5, 10, 5), (12, 11, 10, 0)]
)
def test_pad_token_lies_inside_the_embedding(pad: int | None, eos: int, rows: int, expected: int) -> None:
    """P19: without a pad token, or with one outside the embedding, one of the ids that are there is taken."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token_id, tokenizer.eos_token_id = pad, eos
    assert choose_pad_token(tokenizer, num_rows=rows) == expected


def test_the_embedding_is_never_resized(folder: Path) -> None:
    plan = plan_model(section(folder))
    assert vocabulary_rows(plan.skeleton) == vocabulary_rows(load_model(plan, seed=0)) == 260


def test_a_recipes_chat_template_replaces_the_tokenizers(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("\u00e9\u6c49" + CHATML, encoding="utf-8")
    assert load_tokenizer(section(folder, chat_template=str(template))).chat_template.startswith("\u00e9\u6c49")
    with pytest.raises(RecipeError) as caught:
        load_tokenizer(section(folder, chat_template=str(tmp_path / "none.jinja")))
    assert "none.jinja" in caught.value.place


def test_a_folder_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama", weights=False)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(EnvironmentProblem, match="tokenizer"):
        load_tokenizer(section(folder))


def test_a_new_token_that_is_there_already_is_an_error(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"`<\|im_end\|>` \(id 258\)") as caught:
        load_tokenizer(section(folder, new_tokens=["<cite>"], new_special_tokens=["<|im_end|>"]))
    assert caught.value.place == "model.new_special_tokens"


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    """P6: ids beyond the model's rows before any new token."""
    folder = make_model_folder(tmp_path / "model", "llama", weights=False, vocab_size=200, pad_token_id=None)
    wanted = section(folder, init="random", new_tokens=["<cite>"])
    with pytest.raises(EnvironmentProblem, match="model has 200 rows"):
        plan_new_tokens(wanted, load_tokenizer(wanted), plan_model(wanted).skeleton)
