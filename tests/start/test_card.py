"""Cards by name, by size and by asking the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.start.card import CARDS_GIB, WITHOUT_BF16, parse_card


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("rtx3090", 24),
        ("RTX 3090", 24),
        ("NVIDIA GeForce RTX 3090", 24),
        ("dgx-spark", 128),
        ("24GiB", 24),
        ("11.5", 11.5),
    ],
)
def test_names_and_sizes(text: str, memory: float) -> None:
    assert parse_card(text).memory_gib == memory


def test_the_cpu_and_old_cards() -> None:
    assert parse_card("cpu").is_cpu
    assert not parse_card("t4").has_bf16
    assert set(CARDS_GIB) >= WITHOUT_BF16


@pytest.mark.parametrize("text", ["", "rtx9999", "0GiB", "-3", "lots"])
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="is no card"):
        parse_card(text)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def test_auto_without_a_driver_is_the_cpu(nvidia_smi: Path) -> None:
    card = parse_card("auto")
    assert card.is_cpu
    assert str(card) == "the CPU, as found on this machine"


def test_auto_takes_the_first_card_of_the_driver(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'Tesla T4, 15360, 7.5'\necho 'H200, 143771, 9.0'\n")
    nvidia_smi.chmod(0o755)
    card = parse_card("auto")
    assert (card.name, card.memory_gib, card.has_bf16) == ("Tesla T4", 15.0, False)


@pytest.mark.parametrize("script", ["exit 9", "echo nothing", "true"])
def test_a_driver_that_does_not_answer_is_told(nvidia_smi: Path, script: str) -> None:
    nvidia_smi.write_text(f"#!/bin/sh\n{script}\n")
    nvidia_smi.chmod(0o755)
    with pytest.raises(EnvironmentProblem, match="nvidia-smi") as caught:
        parse_card("auto")
    assert "--card cpu" in caught.value.remedy
