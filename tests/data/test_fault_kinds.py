"""Faults are counted by kind: the message without what differs from record to record, and with all else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import Dataset, build_dataset
from finetune.data.faults import DataFaults
from finetune.recipe.schema import DataSection

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
BOT = {"role": "bot", "content": "a"}
KINDS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "weight": (
        [{"messages": [USER] * n + [{**ANSWER, "weight": -n / 2}]} for n in (1, 2, 3)],
        "messages[].weight must be 0, or a number from 0.000001 to 100",
    ),
    "role": ([{"messages": [USER] * n + [BOT]} for n in (1, 2)], "messages[].role has the unknown role 'bot'"),
    "quotes": (
        [{"messages": [{**USER, "name": value}, ANSWER]} for value in (5, 6)],
        "messages[].name must be a string, found int",
    ),
    "colon": (
        [{"messages": [{**USER, "content": [value]}, ANSWER]} for value in ("a: (b", "`c")],
        "messages[].content[] must be a part of type text, reasoning, thinking or tool_call, found str",
    ),
    "tool": (
        [
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": name}]}], "tools": [{"name": "f"}]}
            for name in ("g", "h: (")
        ],
        "a tool is called that `tools` does not define",
    ),
    "other-format": (
        [{"text": "a"}, {"text": "b"}],
        "the record has the format text, but the source's first record has the format messages",
    ),
    "lost-key": ([{"messages": [{"role": "user", "id": n}]} for n in (1, 2)], "messages[] has no key 'content'"),
}


def build(tokenizer: Any, path: Path, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


def failure(tokenizer: Any, path: Path) -> DataFaults:
    with pytest.raises(DataFaults) as caught:
        build(tokenizer, path)
    return caught.value


@pytest.mark.parametrize(("records", "kind"), KINDS.values(), ids=KINDS)
def test_kinds_leave_out_what_differs_and_nothing_else(
    chatml: Any, write_jsonl: Callable, records: list[dict[str, Any]], kind: str
) -> None:
    """A kind holds every constant of its message: numbers, names of files and roles were lost once."""
    path = write_jsonl([{"messages": [USER, ANSWER]}, *records], "docs2_key3.jsonl")
    (group,) = failure(chatml, path).as_dict()["faults"]
    assert (group["kind"], group["records"]) == (kind, len(records))
    assert json.dumps(records[0]).startswith(group["examples"][0]["text"].removesuffix("..."))
    (dropped,) = build(chatml, path, malformed="drop").ledger.dropped
    assert dropped.reason == f"malformed: {kind}"


def test_examples_show_the_text_as_it_stands_in_the_file(chatml: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": null, "a": true}\n{"b": \n[1]\n', encoding="utf-8")
    faults = failure(chatml, path).as_dict()["faults"]
    assert [group["examples"][0]["text"] for group in faults] == [
        '{"messages": null, "a": true}',
        '{"b":',
        "[1]",
    ]


def test_empty_questions_and_control_tokens_of_plain_text_are_noted(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"messages": [{**USER, "content": " "}, ANSWER]}, {"messages": [USER, ANSWER]}])
    assert [(note.what, note.records) for note in build(chatml, path).ledger.notes] == [("a user message is empty", 1)]
    path = write_jsonl([{"text": "a<|im_end|>b"}, {"text": "a b"}], "text.jsonl")
    assert [(note.what, note.records) for note in build(chatml, path).ledger.notes] == [
        ("plain text holds control tokens of the tokenizer, which are read as such", 1)
    ]
