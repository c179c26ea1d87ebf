"""Real files are recognised, and each of their records converts, or is refused with the reason that its format has."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.data.formats import convert, recognise, require_same_format
from finetune.data.load import read_records
from finetune.errors import DataError

LEARNED = {
    "alpaca_en.csv": ("alpaca", 999),
    "alpaca_en.parquet": ("alpaca", 999),
    "alpaca_en.tsv": ("alpaca", 999),
    "alpaca_en_demo.json": ("alpaca", 999),
    "c4_demo.jsonl": ("text", 300),
    "conversations.jsonl": ("messages", 128),
    "dummy_conversation.json": ("sharegpt", 500),
    "glaive_toolcall_en_demo.json": ("sharegpt", 300),
    "messages_alpaca_en.jsonl": ("messages", 999),
    "messages_alpaca_en.jsonl.gz": ("messages", 999),
    "messages_reasoning_tools.jsonl": ("messages", 50),
    "messages_thinking_harmony.jsonl": ("messages", 19),
    "messages_tools_en_dictargs.jsonl": ("messages", 300),
    "messages_tools_en_openai.jsonl": ("messages", 300),
    "multilingual.txt": ("text", 1),
    "prompt_completion_alpaca_en.jsonl": ("prompt_completion", 999),
    "reason_tool_use_demo_50.jsonl": ("messages", 50),
    "wiki_demo.txt": ("text", 1),
}
REFUSED = {
    "dpo_en_demo.json": "preference",
    "preference_en.parquet": "preference",
    "preference_en_conversational.jsonl": "preference",
    "preference_en_implicit.jsonl": "preference",
    "preference_en_text.jsonl": "preference",
    "kto_en.jsonl": "kto",
    "kto_en_demo.json": "kto",
    "gsm8k_grpo.jsonl": "prompt_answer",
}


def test_every_real_file_is_known(assets: Path) -> None:
    assert {path.name for path in (assets / "data").iterdir()} == LEARNED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", LEARNED)
def test_file_that_is_learned(assets: Path, name: str) -> None:
    format, count = LEARNED[name]
    records = list(read_records(assets / "data" / name, max_rows=None))
    assert len(records) == count
    first, _ = records[0]
    for origin, record in records:
        assert recognise(record, origin) == format
        require_same_format(record, format=format, origin=origin, first=first)
        conversation = convert(record, format=format, origin=origin)
        assert conversation.unused_keys in ((), ("id",))
        assert not conversation.calls_undefined_tools


@pytest.mark.parametrize("name", REFUSED)
def test_file_that_is_refused(assets: Path, name: str) -> None:
    for origin, record in read_records(assets / "data" / name, max_rows=None):
        format = recognise(record, origin)
        assert format == REFUSED[name]
        with pytest.raises(DataError, match=format):
            convert(record, format=format, origin=origin)


def test_calls_written_in_two_ways_are_the_same(assets: Path) -> None:
    """One file has arguments as strings, the other as objects."""
    pairs = [
        [
            convert(record, format="messages", origin=origin)
            for origin, record in read_records(assets / "data" / f"messages_tools_en_{name}.jsonl", max_rows=None)
        ]
        for name in ("openai", "dictargs")
    ]
    assert [conversation.messages for conversation in pairs[0]] == [conversation.messages for conversation in pairs[1]]
