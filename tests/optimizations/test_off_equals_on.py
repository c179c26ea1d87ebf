"""Every optimization off gives the run that it gives on: 20 steps of a tiny model, bit by bit where the maths is the
same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from numerics import assert_bitwise_equal
from runs import build, losses
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.optimizations.activations.types import GIB, Group, Place
from finetune.recipe.schema import OptimizationsSection
from finetune.trainer.sft import SftTrainer

LAYERS, STEPS, MICRO_BATCHES, ROW = 4, 20, 2, 128
INPUT_BYTES = 2 * ROW * 64 * 4
TIGHT = {"activation_memory": 3 * INPUT_BYTES / GIB, "host_memory": 1.0}
"""Two reload buffers and the last layer's input: all others have to go to the host."""


@dataclass(frozen=True)
class Case:
    """The values of one field that must not make a difference, and what is set beside it."""

    values: tuple[Any, ...]
    states: tuple[str, ...] = ()
    """What the flag's line may say of each, separated by `|`; none where the field is no flag."""
    beside: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


CASES = {
    "packed_metadata_cache": Case(
        (True, False, "auto"), ("on", "off", "on"), training={"gradient_checkpointing": True}
    ),
    "double_buffered_reload": Case((True, False, "auto"), ("on", "off", "on|off"), beside=TIGHT),
    "activation_memory": Case(("auto", TIGHT["activation_memory"], 1.0), beside={"host_memory": 1.0}),
    "host_memory": Case(("auto", 1.0, 2.0), beside={"activation_memory": 8 * INPUT_BYTES / GIB}),
}


def run(folder: Path, name: str, attention: str, optimizations: dict, training: dict) -> tuple[SftTrainer, dict]:
    made = make_recipe(folder / "model", folder / "train.jsonl", folder / name)
    made["data"]["max_length"] = ROW
    made["model"]["attention"] = attention
    made["training"] |= {"max_steps": STEPS, "rows_per_micro_batch": 2} | training
    made["optimizations"] = optimizations
    trainer, prepared, ending = build(made, with_ending=True)
    trainer.train()
    return trainer, {applied.flag: applied.state for applied in (*prepared.applied, *ending.applied)}


# Masks, which the metadata cache holds too, are the dense backend's.
PAIRS = [
    (flag, attention)
    for flag in OptimizationsSection.model_fields
    for attention in (("segments", "sdpa") if flag == "packed_metadata_cache" else ("segments",))
]


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(("flag", "attention"), PAIRS)
def test_off_equals_on(tmp_path: Path, flag: str, kind: str, attention: str) -> None:
    case = CASES[flag]
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind == "gpt_oss" else {}
    make_model_folder(tmp_path / "model", kind, num_hidden_layers=LAYERS, **changes)
    make_chat_file(tmp_path / "train.jsonl", rows=40)
    results = []
    for number, value in enumerate(case.values):
        trainer, states = run(tmp_path, f"{number}", attention, case.beside | {flag: value}, case.training)
        assert not case.states or states[flag] in case.states[number].split("|"), states
        weights = {name: p for name, p in trainer.trained.state_dict().items() if "lora" in name}
        results.append((losses(trainer), weights))
    for trace, weights in results[1:]:
        assert trace == results[0][0]
        assert_bitwise_equal(weights, results[0][1])


def test_builds_of_metadata_are_counted(tmp_path: Path) -> None:
    """One a batch when on; layers times forward and recompute when off."""
    make_model_folder(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS)
    make_chat_file(tmp_path / "train.jsonl", rows=40)
    builds = {}
    for value in (True, False):
        flags = {"packed_metadata_cache": value}
        trainer, _ = run(tmp_path, f"{value}", "segments", flags, {"gradient_checkpointing": True})
        assert trainer.metadata_feed is not None
        builds[value] = trainer.metadata_feed.num_builds
    assert builds == {True: STEPS * MICRO_BATCHES, False: STEPS * MICRO_BATCHES * LAYERS * 2}


def test_a_tight_budget_puts_all_inputs_but_the_last_on_the_host(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS)
    make_chat_file(tmp_path / "train.jsonl", rows=40)
    trainer, states = run(tmp_path, "run", "segments", TIGHT, {"max_steps": 2})
    assert trainer.activations is not None and trainer.activations.plan is not None
    places = [layer.places[Group.INPUT] for layer in trainer.activations.plan.layers]
    assert places == [Place.HOST] * (LAYERS - 1) + [Place.DEVICE]
    assert trainer.activations.reload is not None
    assert trainer.activations.reload.num_misses == trainer.activations.reload.num_refused == 0
    assert states["double_buffered_reload"] == "on"
