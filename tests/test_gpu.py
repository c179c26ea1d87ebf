"""On a CUDA device: the same numbers as on the CPU, NF4 within its memory, the whole command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from numerics import assert_same_trajectory
from runs import build, build_model, losses
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.cli import main
from finetune.model.config import plan_model
from finetune.model.load import load_model
from finetune.recipe.schema import ModelSection
from finetune.run.folder import RunFolder
from finetune.run.metrics import read_metrics
from finetune.trainer.build import build_trainer
from finetune.trainer.checks import check_documents_are_separate
from finetune.trainer.evaluation import Evaluator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu")
    for kind in ("qwen3", "qwen3_moe", "gpt_oss"):
        make_model_folder(root / kind, kind)
    make_chat_file(root / "train.jsonl", rows=43)
    return root


def recipe(parts: Path, out: Path, kind: str = "qwen3", **sections: dict) -> dict:
    made = make_recipe(parts / kind, parts / "train.jsonl", out, **sections)
    made["data"] |= {"max_length": 128}
    return made


@pytest.mark.parametrize("adapter", [{"type": "lora", "rank": 4, "alpha": 8}, {"type": "none"}], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_losses_equal_those_of_the_cpu(parts: Path, tmp_path: Path, kind: str, adapter: dict) -> None:
    traces = []
    for device in ("cpu", "cuda"):
        made = recipe(parts, tmp_path / device, kind, adapter=adapter)
        made["model"]["device"] = device
        trainer, _ = build(made)
        trainer.train()
        traces.append(losses(trainer))
    assert_same_trajectory(traces[1], traces[0], relative=2e-3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_documents_are_separate(parts: Path, attention: str, dtype: str) -> None:
    section = ModelSection(path=str(parts / "qwen3_moe"), device="cuda", dtype=dtype, attention=attention)
    model = load_model(plan_model(section), seed=0)
    assert check_documents_are_separate(model, num_rows=260).ok


def test_random_nf4_never_holds_all_16_bit_weights(tmp_path: Path) -> None:
    folder = make_model_folder(
        tmp_path / "model", "llama", weights=False, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16
    )
    section = ModelSection(path=str(folder), device="cuda", dtype="bf16", init="random", quantization="nf4")
    plan = plan_model(section)
    full = 2 * sum(parameter.numel() for parameter in plan.skeleton.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load_model(plan, seed=0)
    assert torch.cuda.max_memory_allocated() - before < 0.5 * full


EVALUATION_MARGIN = 1.05
"""The peak of evaluation and generation over that of training: room for the allocator's rounding, not for logits."""


def test_evaluation_needs_no_more_memory_than_training(tmp_path: Path) -> None:
    """P52: held-out loss and generation peak at most at training's peak, on a vocabulary whose logits would show: a row
    of 2,048 tokens has 1.2 GB of them in fp32, more than model and training together."""
    folder = make_model_folder(
        tmp_path / "model",
        "llama",
        weights=False,
        hidden_size=512,
        intermediate_size=1024,
        vocab_size=152_064,
        max_position_embeddings=4096,
    )
    make_chat_file(tmp_path / "train.jsonl", rows=400)
    made = make_recipe(folder, tmp_path / "train.jsonl", tmp_path / "run", training={"max_steps": 2})
    made["model"] |= {"device": "cuda", "dtype": "bf16", "init": "random"}
    made["data"] |= {"max_length": 2048, "eval": {"fraction": 0.5}}
    made["training"] |= {"rows_per_step": 2, "rows_per_micro_batch": 2}
    made["evaluation"] = {"samples": 8, "max_new_tokens": 64}
    parsed, prepared, model = build_model(made)
    assert prepared.eval_rows is not None and len(prepared.eval_rows) >= 2
    run = RunFolder(Path(parsed.output.dir))
    run.path.mkdir()
    trainer = build_trainer(parsed, prepared, model=model, run=run, callbacks=[])
    evaluator = Evaluator(parsed, prepared, trainer, run, say=lambda text: None)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    of_training = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert evaluator.measure() is not None
    of_evaluation = torch.cuda.max_memory_allocated()
    assert of_evaluation <= EVALUATION_MARGIN * of_training


def test_fp16_goes_on_over_skipped_steps(parts: Path, tmp_path: Path) -> None:
    """The loss scale overflows now and then by design; the step is left out and counted, and the run goes on."""
    made = recipe(parts, tmp_path / "run", training={"max_steps": 8, "learning_rate": 1e-3})
    made["model"] |= {"device": "cuda", "dtype": "fp16"}
    trainer, _ = build(made)
    trainer.accelerator.scaler._init_scale = 2.0**40
    trainer.train()
    records = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(records) == 8
    assert records[-1]["skipped_steps"] > 0


def test_the_whole_command_in_nf4(parts: Path, tmp_path: Path) -> None:
    made = recipe(parts, tmp_path / "run", training={"max_steps": 8, "optimizer": "adamw_8bit"})
    made["model"] |= {"device": "cuda", "dtype": "bf16", "quantization": "nf4"}
    made["data"]["eval"] = {"fraction": 0.2}
    made["evaluation"] = {"metrics": ["exact_match"], "samples": 1, "max_new_tokens": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["peak_memory_bytes"] > 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ({"quantization": "int8"}, {"dora": True}),
        ({"quantization": "int8", "init": "random"}, {}),
        ({"quantization": "nf4"}, {"dora": True, "dropout": 0.1}),
        ({"new_tokens": ["say"], "new_special_tokens": ["<|tool|>"]}, {"rslora": True, "modules_to_save": ["norm"]}),
        ({"new_tokens": ["say"]}, {"modules_to_save": ["embed_tokens"]}),
    ],
    ids=["int8-dora", "int8-random", "nf4-dora", "tokens", "embeddings"],
)
def test_the_whole_command_with_each_kind_of_adapter(
    parts: Path, tmp_path: Path, model: dict[str, object], adapter: dict[str, object]
) -> None:
    made = recipe(parts, tmp_path / "run", training={"max_steps": 8})
    made["model"] |= {"device": "cuda", "dtype": "bf16"} | model
    made["adapter"] |= adapter
    made["data"]["eval"] = {"fraction": 0.2}
    made["evaluation"] = {"samples": 1, "max_new_tokens": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert records[-1]["loss"] < records[0]["loss"]
