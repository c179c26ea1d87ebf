"""Whatever JSON stands in a file: a record becomes a conversation or an error with its place, never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.formats import convert, describe, recognise, require_same_format
from finetune.data.load import is_data_file, read_records
from finetune.data.types import Conversation, Origin
from finetune.errors import DataError

ORIGIN = Origin("data.jsonl", 7)
KEYS = [
    *("messages", "conversations", "prompt", "completion", "text", "instruction", "input", "output", "history"),
    *("system", "tools", "chosen", "rejected", "label", "answer", "role", "content", "from", "value", "type", "name"),
    *("tool_calls", "function", "arguments", "weight", "thinking", "images", "id"),
]
WORDS = [
    "",
    " ",
    "x",
    "user",
    "assistant",
    "system",
    "tool",
    "human",
    "gpt",
    "function_call",
    "text",
    "reasoning",
    "{}",
]
SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
RECORDS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)
TEXTS = st.sampled_from(WORDS)
CALLS = st.fixed_dictionaries({"name": TEXTS, "arguments": VALUES})
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": TEXTS | VALUES},
    optional={"tool_calls": st.lists(CALLS, max_size=2), "weight": SCALARS, "thinking": TEXTS},
)
NEARLY_RIGHT = st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=4)}, optional={"tools": VALUES})


@settings(max_examples=600, deadline=None)
@given(record=RECORDS | NEARLY_RIGHT)
def test_record_converts_or_names_its_place(record: dict[str, Any]) -> None:
    try:
        format = recognise(record, ORIGIN)
        assert describe(record, format).startswith(format)
        require_same_format(record, format=format, origin=ORIGIN, first=ORIGIN)
        conversation = convert(record, format=format, origin=ORIGIN)
    except DataError as error:
        assert error.place == str(ORIGIN)
        assert error.remedy
        assert len(error.message) < 500
        return
    assert isinstance(conversation, Conversation)
    if conversation.kind == "chat":
        assert any(message.role == "assistant" for message in conversation.messages)
    for message in conversation.messages:
        assert message.parts == () or "".join(part.text for part in message.parts) == message.content
        for call in message.extra.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)


@settings(max_examples=300, deadline=None)
@given(
    body=st.binary(max_size=200) | st.text(alphabet='{}[]",:\\u\n\r\t 01a\u00e9\ufeff', max_size=60).map(str.encode),
    name=st.sampled_from(
        ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.txt", "a.parquet", "a.arrow", "a.jsonl.gz", "a.csv.zst"]
    ),
)
def test_file_of_any_bytes_is_read_or_refused(body: bytes, name: str, tmp_path_factory: Any) -> None:
    assert is_data_file(name)
    path: Path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(body)
    try:
        records = list(read_records(path, max_rows=None))
    except DataError as error:
        assert error.place.startswith(str(path))
        assert error.remedy
        return
    assert records
    for origin, record in records:
        assert origin.path == str(path)
        json.dumps(record, allow_nan=False).encode("utf-8")
