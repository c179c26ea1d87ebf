"""Every kind of adapter, trained for a few steps: what is saved gives the same logits in stock transformers and PEFT,
and nothing else of the model has changed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from numerics import assert_bitwise_equal
from peft import PeftModel
from runs import build, losses
from safetensors.torch import load_file
from tiny import make_chat_file, make_model_folder, make_recipe
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerBase

from finetune.cli import main
from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.load import vocabulary_rows
from finetune.model.quantize import keep_training_layout
from finetune.recipe.load import load_recipe
from finetune.recipe.schema import LoraAdapter
from finetune.trainer.prepare import prepare
from finetune.trainer.result import save_weights
from finetune.trainer.sft import SftTrainer

TIED, UNTIED = "qwen3", "llama"
LORA = {"type": "lora", "rank": 4, "alpha": 8}
ENDS = ("embed_tokens.weight", "lm_head.weight")
KNOWN_ROWS = 259
"""Rows of the tiny models' tokens; one more is spare."""
NEW = {"new_tokens": ["say", "cat"], "new_special_tokens": ["<|tool|>"]}
"""Two words of the data, which are trained on, and a control token that is not in it."""

CASES = [
    pytest.param(TIED, {}, {}, id="lora"),
    pytest.param(TIED, {}, {"rslora": True}, id="rslora"),
    pytest.param(TIED, {}, {"dora": True, "dropout": 0.1}, id="dora"),
    pytest.param(UNTIED, {}, {"layers": [1]}, id="layers"),
    pytest.param(UNTIED, {}, {"targets": ["model.layers.0.mlp.up_proj", "v_proj"]}, id="paths"),
    pytest.param(TIED, {}, {"modules_to_save": ["norm", "layers.0.mlp"]}, id="modules-to-save"),
    pytest.param(TIED, {}, {"modules_to_save": ["embed_tokens"]}, id="embeddings-tied"),
    pytest.param(TIED, {}, {"modules_to_save": ["lm_head"]}, id="lm-head-tied"),
    pytest.param(UNTIED, {}, {"modules_to_save": ["embed_tokens", "lm_head"]}, id="embeddings-untied"),
    pytest.param(TIED, NEW, {}, id="tokens-tied"),
    pytest.param(UNTIED, NEW, {}, id="tokens-untied"),
    pytest.param(UNTIED, {"new_tokens": ["say"]}, {}, id="token-in-spare-row"),
    pytest.param(UNTIED, NEW, {"modules_to_save": ["embed_tokens"]}, id="tokens-and-embedding"),
    pytest.param(TIED, NEW, {"modules_to_save": ["embed_tokens"]}, id="tokens-and-embeddings-tied"),
    pytest.param("qwen3_moe", {}, {"rslora": True, "layers": [0]}, id="experts-of-a-layer"),
    pytest.param("qwen3_moe", {}, {"modules_to_save": ["mlp.gate"]}, id="router-saved"),
    pytest.param(TIED, {"quantization": "nf4"}, {}, id="nf4"),
    pytest.param(UNTIED, {"quantization": "int8"}, {}, id="int8"),
    pytest.param(UNTIED, {"quantization": "nf4", **NEW}, {"dora": True}, id="nf4-dora-tokens"),
    pytest.param(TIED, {"quantization": "int8", **NEW}, {"rslora": True}, id="int8-tokens"),
    pytest.param(TIED, {"quantization": "int8"}, {"modules_to_save": ["embed_tokens"]}, id="int8-embeddings"),
    pytest.param(TIED, {"dtype": "bf16", **NEW}, {"modules_to_save": ["norm"]}, id="bf16-tokens"),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for kind in (TIED, UNTIED, "qwen3_moe"):
        make_model_folder(root / kind, kind)
    make_chat_file(root / "train.jsonl", rows=30)
    return root


@dataclass
class Trained:
    """A run of three steps, and where its trained weights began."""

    trainer: SftTrainer
    begun: dict[str, torch.Tensor]

    @property
    def model(self) -> nn.Module:
        return self.trainer.trained


def train(parts: Path, out: Path, kind: str, model: dict, adapter: dict, **training: Any) -> Trained:
    recipe = make_recipe(parts / kind, parts / "train.jsonl", out)
    recipe["model"] |= model
    recipe["data"]["max_length"] = 128
    recipe["adapter"] = LORA | adapter
    recipe["training"] |= {"max_steps": 3} | training
    trainer, _ = build(recipe)
    begun = {name: value.detach().clone() for name, value in trainer.trained.named_parameters() if value.requires_grad}
    trainer.train()
    return Trained(trainer, begun)


def saved(run: Trained, out: Path) -> Path:
    tokenizer = run.trainer.processing_class
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    save_weights(run.model, out / "adapter", tokenizer=tokenizer, stop_ids=[])
    return out / "adapter"


def stock_base(folder: Path, adapter: Path, model: dict) -> Any:
    """The base as `docs/adapters.md` tells to load it: with as many rows as the saved tokenizer needs."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    quantization = {"nf4": nf4, "int8": BitsAndBytesConfig(load_in_8bit=True)}
    base = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16 if model.get("dtype") == "bf16" else torch.float32,
        quantization_config=quantization.get(model.get("quantization", "")),
        device_map={"": "cpu"},
    )
    keep_training_layout(base)  # some CPUs have another NF4 product for inference, which rounds otherwise
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    if len(tokenizer) > base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(len(tokenizer))
    return base


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """Of random tokens, and of the last four rows of the embedding; a bf16 model in autocast, as it was trained."""
    num_rows = vocabulary_rows(model)  # pyright: ignore[reportArgumentType] - a PeftModel passes the call on
    tokens = torch.randint(0, num_rows, (2, 24), generator=torch.Generator().manual_seed(5))
    tokens[:, -4:] = torch.arange(num_rows - 4, num_rows)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")  # as a stock user computes
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        return model.eval()(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize(("kind", "model", "adapter"), CASES)
def test_stock_peft_gives_the_same_logits(parts: Path, tmp_path: Path, kind: str, model: dict, adapter: dict) -> None:
    """P4, P5, P6, P27: bit for bit on the CPU. Every trained tensor moved, and no frozen one did."""
    run = train(parts, tmp_path, kind, model, adapter)
    folder = saved(run, tmp_path)
    base = stock_base(parts / kind, folder, model)
    frozen = {name: value.clone() for name, value in base.named_parameters()}
    loaded = PeftModel.from_pretrained(base, folder)
    assert torch.equal(logits(loaded), logits(run.model))
    now = dict(run.model.named_parameters())
    still = [name for name, value in run.begun.items() if torch.equal(value, now[name])]
    assert run.begun
    assert not still
    for name, value in now.items():
        if name not in run.begun:
            plain = plain_name(name)
            rows = KNOWN_ROWS if plain.endswith(ENDS) else None
            assert torch.equal(value[:rows], frozen[plain][:rows]), name
    with loaded.disable_adapter():
        assert not torch.equal(logits(loaded), logits(run.model))


def plain_name(name: str) -> str:
    """The base model's own name of a parameter that PEFT has wrapped."""
    for part in ("base_model.model.", ".base_layer", ".original_module", ".token_adapter"):
        name = name.replace(part, "")
    return name


def test_new_rows_begin_as_the_mean_and_no_other_row_changes(parts: Path, tmp_path: Path) -> None:
    """P6, P27: rows after training are those before, byte for byte, but for the new tokens; all are in the file."""
    run = train(parts, tmp_path, UNTIED, NEW, {})
    folder = saved(run, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(parts / UNTIED)
    stored = load_file(folder / "adapter_model.safetensors")
    for name, before in (("model.embed_tokens", base.model.embed_tokens), ("lm_head", base.lm_head)):
        delta = f"base_model.model.{name}.token_adapter.trainable_tokens_delta"
        mean = before.weight[:KNOWN_ROWS].mean(0)
        assert torch.equal(run.begun[f"{delta}.default"], mean.expand(3, -1))
        merged = run.model.get_submodule(f"base_model.model.{name}").weight
        assert torch.equal(merged[:KNOWN_ROWS], before.weight[:KNOWN_ROWS])
        assert torch.equal(merged[KNOWN_ROWS:], stored[delta])
        assert merged.shape[0] == KNOWN_ROWS + 3
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == KNOWN_ROWS + 3
    assert tokenizer("say<|tool|>cat").input_ids == [259, 261, 260]
    assert tokenizer.decode([259, 261, 260], skip_special_tokens=True) == "saycat"


def test_the_data_has_the_new_tokens(parts: Path, tmp_path: Path) -> None:
    recipe = make_recipe(parts / TIED, parts / "train.jsonl", tmp_path, data={"max_length": 128}, model=NEW)
    recipe["model"]["path"] = str(parts / TIED)
    trainer, prepared = build(recipe)
    ids = {int(token) for row in range(len(prepared.train_rows)) for token in prepared.train_rows[row]["input_ids"]}
    assert {259, 260} <= ids
    assert prepared.plan_dict()["new_token_ids"] == [259, 260, 261]
    uses = prepared.plan_dict()["new_token_uses"]
    all_ids = [int(token) for sample in prepared.dataset.train for token in sample.input_ids]
    assert uses == {"say": all_ids.count(259), "cat": all_ids.count(260), "<|tool|>": 0}
    assert prepared.plan_dict()["vocabulary_rows"] == 262 == vocabulary_rows(trainer.trained)  # pyright: ignore


def test_a_new_token_that_never_occurs_is_warned_of(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing told a token that was spelled otherwise in the data; and one token had `ids 259 to 259`."""
    model = {"new_tokens": ["say"], "new_special_tokens": []}
    recipe = make_recipe(parts / TIED, parts / "train.jsonl", tmp_path / "run", data={"max_length": 128}, model=model)
    recipe["model"]["path"] = str(parts / TIED)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["train", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr()
    (line,) = [line for line in shown.out.splitlines() if line.startswith("tokens ")]
    assert "1 new (id 259)" in line and re.search(r"in the training data: 'say' [1-9]\d* x$", line)
    assert "never occurs" not in shown.err
    assert main(["train", str(path), "--dry-run", "model.new_tokens=[sya]"]) == 0
    shown = capsys.readouterr()
    assert "'sya' 0 x" in shown.out and "'sya': a new token that never occurs" in " ".join(shown.err.split())


@pytest.mark.parametrize("kind", [TIED, UNTIED])
def test_full_fine_tuning_learns_new_tokens(parts: Path, tmp_path: Path, kind: str) -> None:
    """P6: the saved model has as many rows as the tokenizer has tokens, in config and weights."""
    base = AutoModelForCausalLM.from_pretrained(parts / kind)
    recipe = make_recipe(parts / kind, parts / "train.jsonl", tmp_path, adapter={"type": "none"})
    recipe["model"] |= NEW
    recipe["data"]["max_length"] = 128
    trainer, _ = build(recipe)
    model: Any = trainer.trained
    mean = base.model.embed_tokens.weight[:KNOWN_ROWS].mean(0)
    assert torch.equal(model.model.embed_tokens.weight[KNOWN_ROWS:], mean.expand(3, -1))
    trainer.train()
    assert not (model.model.embed_tokens.weight[KNOWN_ROWS : KNOWN_ROWS + 2] == mean).all(1).any()
    save_weights(model, tmp_path / "model", tokenizer=trainer.processing_class, stop_ids=[258])  # pyright: ignore
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 262
    assert torch.equal(logits(loaded), logits(model))


def test_dropout_acts_in_training_alone(parts: Path, tmp_path: Path) -> None:
    """P37: with dropout two forward passes differ while training, and are equal in evaluation."""
    run = train(parts, tmp_path, TIED, {}, {"dropout": 0.5})
    run.model.get_base_model().set_attn_implementation("sdpa")
    tokens = torch.arange(24)[None]
    first, second = (run.model.train()(input_ids=tokens).logits for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (run.model.eval()(input_ids=tokens).logits for _ in range(2))
    assert torch.equal(first, second)
    without = train(parts, tmp_path / "without", TIED, {}, {})
    assert losses(run.trainer) != losses(without.trainer)


@pytest.mark.parametrize(("model", "adapter"), [(NEW, {"modules_to_save": ["norm"]}), ({}, {"dora": True})])
def test_an_earlier_adapter_is_trained_on(parts: Path, tmp_path: Path, model: dict, adapter: dict) -> None:
    """Its settings come from its own file, each of its tensors arrives, and training moves all of them."""
    first = train(
        parts, tmp_path / "first", UNTIED, model, {"targets": ["q_proj", "down_proj"], "layers": [1], **adapter}
    )
    saved(first, tmp_path / "first")
    recipe = make_recipe(parts / UNTIED, parts / "train.jsonl", tmp_path / "second", data={"max_length": 128})
    recipe["model"] |= model
    recipe["adapter"] = {"continue_from": "first/adapter"}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    parsed = load_recipe(path)
    assert isinstance(parsed.adapter, LoraAdapter)
    assert (parsed.adapter.rank, parsed.adapter.alpha, parsed.adapter.layers) == (4, 8.0, [1])
    trainer, _ = build(parsed.model_dump())
    ours = {name: value for name, value in trainer.trained.named_parameters() if value.requires_grad}
    theirs = dict(first.model.named_parameters())
    assert ours.keys() == first.begun.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert torch.equal(logits(trainer.trained), logits(first.model))
    trainer.train()
    assert not [name for name, value in ours.items() if torch.equal(value, theirs[name])]
    again = saved(Trained(trainer, {}), tmp_path / "second")
    loaded = PeftModel.from_pretrained(stock_base(parts / UNTIED, again, model), again)
    assert torch.equal(logits(loaded), logits(trainer.trained))


def test_a_recipe_that_contradicts_the_earlier_adapter_is_refused(parts: Path, tmp_path: Path) -> None:
    """The error names the key, both values and the adapter's file; other tensors are told before the weights load."""
    folder = saved(train(parts, tmp_path / "first", UNTIED, {}, {"targets": ["q_proj"]}), tmp_path / "first")
    recipe = make_recipe(parts / UNTIED, parts / "train.jsonl", tmp_path / "second", data={"max_length": 128})
    path = tmp_path / "recipe.yaml"

    def error(kind: str, **adapter: Any) -> RecipeError:
        recipe["model"]["path"] = str(parts / kind)
        recipe["adapter"] = {"type": "lora", "continue_from": str(folder), **adapter}
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        with pytest.raises(RecipeError) as caught:
            prepare(load_recipe(path), say=lambda text: None)
        return caught.value

    rank = error(UNTIED, rank=8)
    assert "`adapter.rank` must be 4, or left out, found 8" in rank.message
    assert str(folder / "adapter_config.json") in rank.message
    assert "must be false, or left out, found true" in error(UNTIED, dora=True).message
    targets = error(UNTIED, targets="all-linear")
    assert "absent in the file" in targets.message
    assert str(folder) in targets.place
    make_model_folder(parts / "wide", UNTIED, hidden_size=32)
    assert "4x64 in the file, 4x32 here" in error("wide").message
    recipe["model"]["path"] = str(make_model_folder(tmp_path / "other", UNTIED))
    recipe["adapter"] = {"continue_from": str(folder)}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    said: list[str] = []
    prepare(load_recipe(path), say=lambda text: None, warn=said.append)
    assert [text for text in said if "is it the same model" in text and str(parts / UNTIED) in text]
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        prepare(load_recipe(path), say=lambda text: None)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "all"}')
    assert "bias 'all'" in error(UNTIED).message
    assert "cannot be read" in error(UNTIED, continue_from=str(tmp_path / "none")).message


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "adapter.modules_to_save", "held in fp16"),
        ({"target_modules": None}, "adapter.targets", "without a name there is nothing to adapt"),
    ],
)
def test_what_an_earlier_adapter_brings_keeps_the_rules(
    tmp_path: Path, values: dict[str, Any], key: str, reason: str
) -> None:
    """Values that the recipe leaves out are checked as those that it holds, and said to be the adapter's."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **values}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: org/name, dtype: fp16}\nadapter: {continue_from: .}\n"
        "data: {train: [{path: a.jsonl}]}\noutput: {dir: out}\n",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert f"`{key}` must be" in caught.value.message and reason in caught.value.message
    assert "the value is that of `adapter.continue_from`" in caught.value.message


def test_a_run_with_all_kinds_resumes_bit_equal(parts: Path, tmp_path: Path) -> None:
    """Two steps, then two more from the checkpoint, end as four steps do: token rows, tied ends and magnitudes too."""
    ends = []
    for name, steps in (("straight", [4]), ("broken", [2, 4])):
        for max_steps in steps:
            recipe = make_recipe(parts / TIED, parts / "train.jsonl", tmp_path / name, data={"max_length": 128})
            recipe["model"] |= NEW
            recipe["adapter"] = LORA | {"dora": True, "modules_to_save": ["norm"]}
            recipe["training"] |= {"max_steps": max_steps, "schedule": "constant"}
            trainer, _ = build(recipe)
            found = sorted((tmp_path / name / "checkpoints").glob("checkpoint-2"))
            trainer.train_from(found[0] if found else None)
        ends.append(load_file(tmp_path / name / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors"))
    assert_bitwise_equal(*ends)
    assert not [name for name in ends[0] if "base_layer" in name]


def test_the_command_trains_its_own_adapter_on(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the plan's lines to generated answers; keys given beside `continue_from` agree."""
    monkeypatch.chdir(tmp_path)
    sections = {"evaluation": {"samples": 1, "max_new_tokens": 4}, "data": {"max_length": 128}}
    recipe = make_recipe(parts / TIED, parts / "train.jsonl", Path("first"), **sections)
    recipe["model"] |= NEW
    recipe["data"]["eval"] = {"fraction": 0.1}
    recipe["adapter"] |= {"dora": True, "modules_to_save": ["norm"]}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["train", "recipe.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "3 new (ids 259 to 261), for which the embedding grows from 260 to 262 rows" in shown
    assert "model.embed_tokens (new tokens)" in shown
    assert main(["train", "recipe.yaml", "output.dir=second", "adapter={continue_from: first/adapter}"]) == 0
    written = load_recipe("second/recipe.yaml")
    assert isinstance(written.adapter, LoraAdapter)
    assert (written.adapter.dora, written.adapter.modules_to_save) == (True, ["norm"])
    reports = [json.loads(Path(run, "report.json").read_text())["summary"] for run in ("first", "second")]
    assert reports[1]["eval_loss_before"] == pytest.approx(reports[0]["eval_loss_after"], rel=1e-6)
