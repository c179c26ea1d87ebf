"""LoRA+: two rates, for every optimizer, over the schedule and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numerics import assert_bitwise_equal
from runs import build, losses
from tiny import make_chat_file, make_model_folder, make_recipe
from transformers import TrainerCallback

RATIO = 8.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loraplus")
    for kind in ("qwen3", "qwen3_moe"):
        make_model_folder(root / kind, kind)
    make_chat_file(root / "train.jsonl", rows=30)
    return root


class Rates(TrainerCallback):
    """Notes the rates that each step is made with, by the matrix that they are for."""

    def __init__(self) -> None:
        self.steps: list[dict[str, set[float]]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        names = {parameter: name for name, parameter in kwargs["model"].named_parameters()}
        rates: dict[str, set[float]] = {}
        for group in kwargs["optimizer"].param_groups:
            for parameter in group["params"]:
                rates.setdefault("B" if "lora_B" in names[parameter] else "A", set()).add(group["lr"])
        self.steps.append(rates)


def recipe(folder: Path, out: Path, kind: str = "qwen3", **training: Any) -> dict[str, Any]:
    adapter = {"type": "lora", "rank": 4, "alpha": 8, "loraplus_ratio": RATIO}
    training = {"learning_rate": 1e-3, "warmup_fraction": 0.25, "schedule": "linear"} | training
    made = make_recipe(folder / kind, folder / "train.jsonl", out, adapter=adapter, training=training)
    made["training"]["max_steps"] = 4
    made["data"]["max_length"] = 128
    return made


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("qwen3", "adamw"), ("qwen3_moe", "adamw"), ("qwen3", "adamw_8bit"), ("qwen3", "paged_adamw_8bit")],
)
def test_b_matrices_learn_faster(folder: Path, tmp_path: Path, kind: str, optimizer: str) -> None:
    rates = Rates()
    trainer, prepared = build(recipe(folder, tmp_path / "run", kind, optimizer=optimizer), callbacks=[rates])
    try:
        trainer.train()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        if optimizer == "adamw":
            raise
        pytest.skip(f"bitsandbytes has no {optimizer} here: {error}")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    expected = [1e-3 * factor for factor in (1 / 2, 1.0, 2 / 3, 1 / 3)]
    for step, rate in enumerate(expected):
        assert list(rates.steps[step]["A"]) == pytest.approx([rate])
        assert list(rates.steps[step]["B"]) == pytest.approx([RATIO * rate])
        assert logs[step]["learning_rate"] == pytest.approx(rate)
        assert logs[step]["learning_rate_lora_b"] == pytest.approx(RATIO * rate)
    in_groups = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    assert in_groups == prepared.table.num_trainable
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize(
    ("model", "adapter", "others"),
    [
        ({}, {"dora": True}, {"lora_A", "lora_magnitude_vector"}),
        ({}, {"modules_to_save": ["norm", "embed_tokens"]}, {"lora_A", "modules_to_save"}),
        ({"new_tokens": ["say"]}, {}, {"lora_A", "trainable_tokens_delta"}),
    ],
    ids=["dora", "saved", "tokens"],
)
def test_only_b_matrices_learn_faster(
    folder: Path, tmp_path: Path, model: dict[str, Any], adapter: dict[str, Any], others: set[str]
) -> None:
    made = recipe(folder, tmp_path / "run", weight_decay=0.1)
    made["adapter"] |= adapter
    made["model"] |= model
    trainer, prepared = build(made)
    trainer.create_optimizer()
    names = {parameter: name for name, parameter in trainer.trained.named_parameters()}
    seen: set[str] = set()
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            parts = names[parameter].split(".")
            kind = next(kind for kind in ("lora_B", *others) if kind in parts)
            assert group["lr"] == pytest.approx(1e-3 * (RATIO if kind == "lora_B" else 1.0)), names[parameter]
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0), names[parameter]
            seen.add(kind)
    assert seen == others | {"lora_B"}
    in_groups = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    assert in_groups == prepared.table.num_trainable


def test_a_ratio_of_one_is_plain_lora(folder: Path, tmp_path: Path) -> None:
    states = []
    for ratio in (1.0, None):
        made = recipe(folder, tmp_path / str(ratio))
        made["adapter"]["loraplus_ratio"] = ratio
        trainer, _ = build(made)
        trainer.train()
        states.append(dict(trainer.model.state_dict()))
    assert_bitwise_equal(states[0], states[1])


def test_a_resumed_run_keeps_its_rates(folder: Path, tmp_path: Path) -> None:
    straight, _ = build(recipe(folder, tmp_path / "straight") | {"output": output(tmp_path / "straight")})
    straight.train()
    resumed, _ = build(recipe(folder, tmp_path / "resumed") | {"output": output(tmp_path / "resumed")})
    resumed.train_from(tmp_path / "straight" / "checkpoints" / "checkpoint-2")
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    assert_bitwise_equal(dict(resumed.model.state_dict()), dict(straight.model.state_dict()))


def output(out: Path) -> dict[str, Any]:
    return {"dir": str(out), "save_every_steps": 2}
