"""The first values of a recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.start.card import parse_card
from finetune.start.look import Look
from finetune.start.suggest import ModelFacts, Suggestion, model_facts, suggest

LOOK = Look("alpaca", {}, 10_000, True, longest_tokens=700, total_tokens=5_000_000)


def suggested(card: str = "cpu", look: Look | None = LOOK, adapter: str = "lora", **facts: float) -> Suggestion:
    return suggest(look, card=parse_card(card), model=ModelFacts(**facts), adapter=adapter)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gib"),
    [("Qwen/Qwen3-14B", 26.1), ("Qwen/Qwen3-0.6B", 1.1), ("Qwen/Qwen3-30B-A3B", 55.9), ("org/model", None)],
)
def test_weights_by_the_name_of_a_hub_id(name: str, gib: float | None) -> None:
    found = model_facts(None, name).weight_gib
    assert found == (None if gib is None else pytest.approx(gib, abs=0.06))


def test_a_folder_tells_its_weights_and_positions(tmp_path: Path) -> None:
    assert model_facts(tmp_path, "x") == ModelFacts(None, None)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 512}}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1024)
    assert model_facts(tmp_path, "x") == ModelFacts(1024 / 2**30, 512)


@pytest.mark.parametrize(
    ("card", "gib", "quantization"),
    [
        ("cpu", 26, "none"),
        ("rtx3090", 26, "nf4"),
        ("rtx3090", 1.1, "none"),
        ("h200", 26, "none"),
        ("24GiB", None, "nf4"),
    ],
)
def test_quantization_is_taken_where_the_weights_do_not_fit(card: str, gib: float, quantization: str) -> None:
    assert suggested(card, weight_gib=gib).quantization == quantization


def test_what_will_not_fit_is_said() -> None:
    assert "hardly fit" in suggested("8GiB", weight_gib=60).warnings[0]
    full = suggested("rtx3090", adapter="none", weight_gib=26)
    assert full.quantization == "none"
    assert "training all weights needs about 156 GiB" in full.warnings[0]


def test_full_fine_tuning_is_never_in_fp16() -> None:
    assert suggested("t4").dtype == "fp16"
    assert suggested("t4", adapter="none").dtype == "auto"


@pytest.mark.parametrize(
    ("longest", "positions", "length"), [(700, None, 1024), (700, 512, 512), (0, None, 2048), (10**6, None, 32768)]
)
def test_length(longest: int, positions: int | None, length: int) -> None:
    look = replace(LOOK, longest_tokens=longest)
    found = suggest(look, card=parse_card("cpu"), model=ModelFacts(None, positions), adapter="lora")
    assert found.max_length == length
    assert bool(found.warnings) == (longest > length)


def test_the_users_own_length_is_taken_as_it_is() -> None:
    found = suggest(LOOK, card=parse_card("cpu"), model=ModelFacts(), adapter="lora", max_length=100)
    assert found.max_length == 100


@pytest.mark.parametrize(("rows", "fraction", "epochs"), [(9, None, 3), (100, 0.1, 3), (5_000, 0.02, 1)])
def test_held_out_share_and_epochs_by_rows(rows: int, fraction: float | None, epochs: int) -> None:
    found = suggested(look=replace(LOOK, num_rows=rows))
    assert (found.eval_fraction, found.epochs) == (fraction, epochs)


@pytest.mark.parametrize("card", ["cpu", "rtx3090", "h200"])
@pytest.mark.parametrize("total", [10, 20_000, 10**7])
def test_a_micro_batch_divides_a_step(card: str, total: int) -> None:
    found = suggested(card, look=replace(LOOK, total_tokens=total))
    assert found.rows_per_step % found.rows_per_micro_batch == 0


def test_few_rows_make_small_steps() -> None:
    assert suggested(look=replace(LOOK, total_tokens=1000)).rows_per_step == 1
    assert suggested().rows_per_step == 8
