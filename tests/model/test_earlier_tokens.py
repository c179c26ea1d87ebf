"""The tokens of an earlier adapter are those of the run, by text and id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import make_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.earlier import WEIGHTS_FILE, load_earlier_adapter
from finetune.model.earlier_tokens import check_earlier_tokens
from finetune.model.new_tokens import NewTokens


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("base") / "llama", "llama")


def tokenizer_with(base: Path, *texts: str) -> tuple[PreTrainedTokenizerBase, NewTokens]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    known = len(tokenizer)
    tokenizer.add_tokens(list(texts))
    return tokenizer, NewTokens(texts, tuple(tokenizer.get_vocab()[text] for text in texts), known, known, known)


def saved(base: Path, folder: Path, *texts: str, rows: bool = True) -> Path:
    tokenizer_with(base, *texts)[0].save_pretrained(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"modules_to_save": ["lm_head"] if rows else None}))
    return folder


def test_the_same_tokens_pass(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path, "<a>", "<b>")
    for texts in (("<a>", "<b>"), ("<a>", "<b>", "<c>")):
        tokenizer, new_tokens = tokenizer_with(base, *texts)
        assert check_earlier_tokens(tokenizer, str(folder), new_tokens=new_tokens) == []


@pytest.mark.parametrize("texts", [("<b>",), ("<b>", "<a>"), ("<x>", "<a>"), ()])
def test_other_tokens_or_another_order_are_refused(base: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """The rows of one token went on as those of another without a word."""
    folder = saved(base, tmp_path, "<a>", "<b>")
    tokenizer, new_tokens = tokenizer_with(base, *texts)
    with pytest.raises(RecipeError) as caught:
        check_earlier_tokens(tokenizer, str(folder), new_tokens=new_tokens if texts else None)
    first = len(AutoTokenizer.from_pretrained(base))
    assert f"`<a>` as id {first}" in caught.value.message
    assert caught.value.place == str(folder / "tokenizer.json")
    if "<a>" in texts:
        assert f"here id {first + 1}" in caught.value.message
    if texts:
        assert f"id {first} here `{texts[0]}`" in caught.value.message


@pytest.mark.parametrize("kept", ["tokenizer_config.json", "added_tokens.json"])
def test_other_files_of_tokens_are_read(base: Path, tmp_path: Path, kept: str) -> None:
    tokenizer, new_tokens = tokenizer_with(base, "<b>")
    token_id = new_tokens.ids[0]
    slow = {"added_tokens_decoder": {str(token_id): {"content": "<a>"}}}
    (tmp_path / kept).write_text(json.dumps(slow if "config" in kept else {"<a>": token_id}))
    with pytest.raises(RecipeError, match=f"`<a>` as id {token_id}"):
        check_earlier_tokens(tokenizer, str(tmp_path), new_tokens=new_tokens)
    (tmp_path / kept).write_text("[1]")
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        check_earlier_tokens(tokenizer, str(tmp_path), new_tokens=new_tokens)


def test_what_cannot_be_compared_or_has_no_row_is_a_warning(base: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    (missing,) = check_earlier_tokens(tokenizer, str(tmp_path), new_tokens=None)
    assert str(tmp_path) in missing and "no tokenizer" in missing
    folder = saved(base, tmp_path / "pad", "[PAD]", rows=False)
    (unused,) = check_earlier_tokens(tokenizer, str(folder), new_tokens=None)
    assert "`[PAD]`" in unused


def test_weights_that_are_not_finite_are_called_so(base: Path, tmp_path: Path) -> None:
    """NaN is unlike itself, so such a tensor was said not to have arrived."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model.save_pretrained(str(tmp_path))
    weights = load_file(tmp_path / WEIGHTS_FILE)
    name = sorted(weights)[0]
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match="NaN or infinite") as caught:
        load_earlier_adapter(model, str(tmp_path))
    assert name in caught.value.message and caught.value.place == str(tmp_path / WEIGHTS_FILE)
