"""Real tokenizers, configs and data, where the folder named by FINETUNE_TEST_ASSETS holds them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from markers import ASSETS, requires_assets
from runs import build, losses

pytestmark = [requires_assets, pytest.mark.slow]
MODELS = ["qwen3", "llama3_1", "qwen3-moe", "gpt-oss"]


def recipe(out: Path, model: str, data: str, **training: object) -> dict:
    return {
        "model": {"path": str(ASSETS / "models" / model), "device": "cpu"},
        "data": {
            "train": [{"path": str(ASSETS / "data" / data), "max_rows": 300}],
            "max_length": 1024,
            "over_length": "drop",
            "packing": "gpt-oss" not in model,
            "cache": False,
        },
        "training": {"max_steps": 20, "epochs": 50, "rows_per_step": 2, "learning_rate": 5e-3} | training,
        "output": {"dir": str(out)},
    }


def assert_falls(values: list[float]) -> None:
    """The mean of the last five steps lies below that of the first five by more than their spread."""
    assert len(values) == 20
    first, last = values[:5], values[-5:]
    assert statistics.mean(last) < statistics.mean(first) - max(statistics.stdev(first), statistics.stdev(last))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["lora", "full", "nf4"])
def test_each_architecture_learns(tmp_path: Path, model: str, how: str) -> None:
    made = recipe(tmp_path / "run", f"tiny-random-{model}", "messages_alpaca_en.jsonl")
    made["adapter"] = {"type": "none"} if how == "full" else {"type": "lora", "rank": 16, "alpha": 32}
    made["model"]["quantization"] = "nf4" if how == "nf4" else "none"
    trainer, _ = build(made)
    trainer.train()
    assert_falls(losses(trainer))


def test_a_pretrained_model_continues_on_plain_text(tmp_path: Path) -> None:
    made = recipe(tmp_path / "run", "stories260K", "c4_demo.jsonl", learning_rate=1e-3, rows_per_step=4)
    made["adapter"] = {"type": "none"}
    made["data"] |= {"max_length": 512, "over_length": "split"}
    trainer, _ = build(made)
    trainer.train()
    assert_falls(losses(trainer))
