"""The plan of a run: what the recipe may ask of it, what it says, and that measuring leaves no trace."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import assert_bitwise_equal
from runs import build, losses
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.errors import RecipeError
from finetune.optimizations.activations.types import GIB
from finetune.recipe.schema import Recipe
from finetune.trainer import activations
from finetune.trainer.activations import check_plan, end_activations

LAYERS, ROW = 4, 128
INPUT_BYTES = 2 * ROW * 64 * 4


def recipe(tmp_path: Path, name: str = "run", kind: str = "qwen3", **sections: Any) -> dict[str, Any]:
    if not (tmp_path / kind).exists():
        make_model_folder(tmp_path / kind, kind, num_hidden_layers=LAYERS)
        make_chat_file(tmp_path / "train.jsonl", rows=40)
    made = make_recipe(tmp_path / kind, tmp_path / "train.jsonl", tmp_path / name, **sections)
    made["data"] |= {"max_length": ROW}
    return made


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_measuring_leaves_no_trace(tmp_path: Path, kind: str) -> None:
    """A planned run and one with plain checkpoints draw the same dropout and learn the same, bit by bit; no gradient,
    no mode and no count is left of what was measured."""
    runs = []
    for value in ("auto", True, False):
        made = recipe(tmp_path, f"{value}", kind, training={"gradient_checkpointing": value})
        made["adapter"] |= {"dropout": 0.2 if kind == "qwen3" else 0.0}
        trainer, _ = build(made)
        assert all(parameter.grad is None for parameter in trainer.trained.parameters())
        assert (trainer.activations is not None) == (value == "auto")
        before = torch.get_rng_state()
        trainer.train()
        weights = {name: p for name, p in trainer.trained.state_dict().items() if "lora" in name}
        builds = [entry["metadata_builds"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses(trainer), weights, before, builds[0]))
    for trace, weights, state, builds in runs[1:]:
        assert trace == runs[0][0]
        assert_bitwise_equal(weights, runs[0][1])
        assert torch.equal(state, runs[0][2])
        assert builds == runs[0][3] == 2  # one a micro-batch, none of the measuring


def test_a_budget_below_the_least_names_the_least(tmp_path: Path) -> None:
    made = recipe(tmp_path, optimizations={"activation_memory": 1 / GIB})
    with pytest.raises(RecipeError, match=r"smallest that works is 0\.0002") as caught:
        build(made)
    least = float(caught.value.message.rpartition(" ")[2])
    made["optimizations"]["activation_memory"] = least
    trainer, _ = build(made)
    assert trainer.activations is not None and trainer.activations.plan is not None
    assert trainer.activations.plan.device_bytes == LAYERS * INPUT_BYTES


def test_more_host_memory_than_there_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recipe(tmp_path, optimizations={"host_memory": 1e6, "activation_memory": 3 * INPUT_BYTES / GIB})
    said: list[str] = []
    trainer, _ = build(made, say=said.append)
    assert any("1000000.0 GiB" in line and "free" in line for line in said)
    assert trainer.activations is not None and trainer.activations.plan is not None
    assert trainer.activations.plan.host_bytes == (LAYERS - 1) * INPUT_BYTES


def test_the_plan_is_set_beside_what_was_measured(tmp_path: Path) -> None:
    trainer, _ = build(recipe(tmp_path, training={"max_steps": 6}))
    assert check_plan(trainer).detail == "too few steps to compare with"
    trainer.train()
    check = check_plan(trainer)
    assert check.ok is None and "a step" in check.detail and "measured" in check.detail
    trainer, _ = build(recipe(tmp_path, "plain", training={"gradient_checkpointing": True}))
    assert check_plan(trainer).ok is None


def test_tiles_are_measured_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of a few tokens the MLPs run in them, and the losses stay within rounding."""
    from finetune.optimizations.activations import runtime

    monkeypatch.setattr(runtime, "tile_tokens_for", lambda tokens: 50)
    tight = {"activation_memory": 3 * INPUT_BYTES / GIB, "host_memory": 1.0}
    monkeypatch.setattr(runtime, "WORTH_TILES", -0.9)  # whatever the time
    tiled, _ = build(recipe(tmp_path, "tiled", optimizations=tight))
    assert tiled.activations is not None and tiled.activations.plan is not None
    assert tiled.activations.plan.tile_tokens == 50
    tiled.train()
    plain, _ = build(recipe(tmp_path, "plain", training={"gradient_checkpointing": True}))
    plain.train()
    assert losses(tiled) == pytest.approx(losses(plain), rel=1e-5)
    tiled.activations.close()
    assert not any("forward" in vars(module) for module in tiled.trained.modules() if "MLP" in type(module).__name__)


def test_a_model_without_such_layers_is_checkpointed_as_transformers_does(tmp_path: Path, monkeypatch: Any) -> None:
    """It cannot be planned, is said not to be, and trains."""
    monkeypatch.setattr(activations, "_layers", lambda model: [])
    trainer, _, ending = build(recipe(tmp_path), with_ending=True)
    assert trainer.activations is None
    assert trainer.trained.get_base_model().model.layers[0].gradient_checkpointing  # pyright: ignore
    assert [flag.state for flag in ending.applied] == ["not applicable"]
    assert "no layers" in ending.applied[0].reason and "compute all else again" in ending.applied[0].reason
    trainer.train()


def test_what_training_alone_needs_is_given_back(tmp_path: Path) -> None:
    tight = {"activation_memory": 3 * INPUT_BYTES / GIB, "host_memory": 1.0}
    made = recipe(tmp_path, optimizations=tight)
    trainer, _, ending = build(made, with_ending=True)
    assert trainer.activations is not None and trainer.activations.reload is not None
    pool = weakref.ref(trainer.activations.reload._pool)
    trainer.train()
    end_activations(Recipe.model_validate(made), trainer, ending)
    gc.collect()
    assert pool() is None
    assert not any(
        "forward" in vars(module) for module in trainer.trained.modules() if "Layer" in type(module).__name__
    )
    assert ending.activation_plan["host_bytes"] == (LAYERS - 1) * INPUT_BYTES
    assert [check.name for check in ending.checks] == ["the plan of activations predicts the run"]


def test_a_budget_for_a_model_that_cannot_be_planned_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(activations, "_layers", lambda model: [])
    with pytest.raises(RecipeError, match="no layers") as caught:
        build(recipe(tmp_path, optimizations={"host_memory": 1.0}))
    assert caught.value.place == "optimizations.host_memory"
