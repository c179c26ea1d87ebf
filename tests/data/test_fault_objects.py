"""Over-long samples, duplicates and leaks are told to programs like every other fault of the gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import build_dataset
from finetune.data.faults import DataFaults
from finetune.recipe.schema import DataSection


def faults(tokenizer: Any, path: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Builds what must be refused; returns the error as plain values, and its only kind of fault."""
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, **settings})
    with pytest.raises(DataFaults) as caught:
        build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)
    shown = json.loads(json.dumps(caught.value.as_dict()))
    (group,) = shown["faults"]
    assert (shown["error"], shown["exit_code"]) == ("DataError", 3)
    assert shown["place"] == group["examples"][0]["place"]
    assert shown["remedy"] == group["remedy"]
    return shown, group


def places(group: dict[str, Any]) -> list[str]:
    return [example["place"] for example in group["examples"]]


def questions(*numbers: int) -> list[dict[str, Any]]:
    return [{"instruction": f"q{number}", "output": f"a{number}"} for number in numbers]


def test_over_long(chatml: Any, write_jsonl: Callable) -> None:
    long = [{"instruction": f"q{number}", "output": "word " * (30 + number)} for number in range(5)]
    path = write_jsonl([*questions(1), *long])
    shown, group = faults(chatml, path, max_length=64)
    assert shown["message"].startswith("5 samples are longer than `max_length` 64")
    assert (group["kind"], group["records"]) == ("a sample is longer than `data.max_length`", 5)
    assert places(group) == [f"{path}:{line}" for line in (2, 3, 4)]
    lengths = [int(example["message"].rpartition(": ")[2].split()[0]) for example in group["examples"]]
    assert lengths == [lengths[0], lengths[0] + 5, lengths[0] + 10]  # five letters, a token each, for each word more
    assert f"`data.max_length` to {lengths[0] + 20}" in group["remedy"]
    assert "`data.over_length`" in group["remedy"]


def test_over_long_turns_of_one_record_are_one_record(chatml: Any, write_jsonl: Callable) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "word " * 30}] * 3
    path = write_jsonl([{"conversations": turns}])
    shown, group = faults(chatml, path, max_length=64, turns="separate")
    assert shown["message"].startswith("3 samples are longer")
    assert (group["records"], places(group)) == (1, [f"{path}:1"])


def test_over_long_records_of_several_batches_are_added_up(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"instruction": f"q{number}", "output": "word " * 2000} for number in range(600)])
    _, group = faults(chatml, path, max_length=64)
    assert group["records"] == 600
    assert places(group) == [f"{path}:{line}" for line in (1, 2, 3)]


def test_duplicates(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl(questions(0, 1, 0, 1, 0, 0, 2))
    shown, group = faults(chatml, path, duplicates="error")
    assert shown["message"].startswith("4 of 7 records equal an earlier one: ")
    assert (group["kind"], group["records"]) == ("the record equals an earlier one", 4)
    assert [(example["place"], example["message"].partition(": ")[2]) for example in group["examples"]] == [
        (f"{path}:3", f"{path}:1"),
        (f"{path}:4", f"{path}:2"),
        (f"{path}:5", f"{path}:1"),
    ]
    assert "`data.duplicates`" in group["remedy"]


def test_pieces_of_a_repeated_record_are_one_example(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"text": "word " * 30}, {"text": "word " * 30}])
    _, group = faults(chatml, path, duplicates="error", over_length="split", max_length=16)
    assert (group["records"], places(group)) == (1, [f"{path}:2"])


def test_leakage(chatml: Any, write_jsonl: Callable, tmp_path: Path) -> None:
    path = write_jsonl(questions(*range(6)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(each) + "\n" for each in questions(9, 5, 3, 2, 1)), encoding="utf-8")
    shown, group = faults(chatml, path, eval=[{"path": str(held_out)}])
    assert shown["message"].startswith("4 training records equal a record of `data.eval`")
    assert (group["kind"], group["records"]) == ("the record equals one of `data.eval`", 4)
    assert [(example["place"], example["message"].partition(": ")[2]) for example in group["examples"]] == [
        (f"{path}:2", f"{held_out}:5"),
        (f"{path}:3", f"{held_out}:4"),
        (f"{path}:4", f"{held_out}:3"),
    ]
    assert "`data.leakage`" in group["remedy"]
