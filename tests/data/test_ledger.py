"""Every record and token is accounted for, for each source and for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.build import Dataset, build_dataset
from finetune.data.ledger import Ledger, LedgerBuilder, SourceCount
from finetune.data.types import Origin
from finetune.recipe.schema import DataSection


def build(tokenizer: Any, *paths: Path, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)} for path in paths], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


def assert_adds_up(ledger: Ledger) -> None:
    """Spelled out here again, so that the test does not rest on the ledger's own assertions."""
    for part in (ledger, *ledger.sources):
        assert part.records == part.records_kept + part.records_split + part.records_dropped
        assert part.tokens_in == part.tokens_kept + part.tokens_dropped + part.tokens_truncated
    assert sum(group.records for group in ledger.dropped) == ledger.records_dropped
    assert sum(group.tokens for group in ledger.dropped) == ledger.tokens_dropped


@pytest.mark.parametrize("over_length", ["drop", "truncate", "split"])
def test_a_hundred_documents_three_rows_long(chatml: Any, write_jsonl: Callable, over_length: str) -> None:
    """P28: tokens_in == tokens_kept + tokens_dropped by reason + tokens_truncated."""
    short = [{"text": f"short {index}"} for index in range(10)]
    path = write_jsonl([*short, *({"text": f"{index:03}" + "x" * (3 * 64 - 4)} for index in range(100))])
    dataset = build(chatml, path, max_length=64, over_length=over_length)
    ledger = dataset.ledger
    assert_adds_up(ledger)
    assert ledger.records == 110
    long_tokens = 100 * 192
    expected = {
        "drop": (0, long_tokens, 0),
        "truncate": (100 * 64, 0, 100 * 128),
        "split": (long_tokens, 0, 0),
    }[over_length]
    kept_short = sum(len(f"short {index}") + 1 for index in range(10))
    assert (ledger.tokens_kept - kept_short, ledger.tokens_dropped, ledger.tokens_truncated) == expected
    assert ledger.tokens_kept == dataset.train.num_tokens
    assert ledger.tokens_supervised == dataset.train.num_supervised_tokens


def test_each_source_has_its_own_sums(chatml: Any, write_jsonl: Callable) -> None:
    good, bad = write_jsonl([{"text": "a"}, {"text": "b"}]), write_jsonl([{"text": "c" * 99}, {"text": "d"}], "b.jsonl")
    ledger = build(chatml, good, bad, max_length=64, over_length="drop").ledger
    assert_adds_up(ledger)
    assert [(source.records, source.records_kept, source.records_dropped) for source in ledger.sources] == [
        (2, 2, 0),
        (2, 1, 1),
    ]
    lines = ledger.summary_lines()
    assert any(str(bad) in line and "1 dropped" in line for line in lines)
    assert any("over_length" in line and f"{bad}:1" in line for line in lines)


def test_unused_keys_are_noted_with_places(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"instruction": "q", "output": "a"}, {"instruction": "r", "output": "b", "topic": "t"}])
    (note,) = build(chatml, path).ledger.notes
    assert "topic" in note.what
    assert (note.records, note.first_origins) == (1, (Origin(str(path), 2),))


@pytest.mark.parametrize(
    ("name", "expected"), [("a.jsonl", {"record": None, "line": 3}), ("a.parquet", {"record": 3, "line": None})]
)
def test_places_tell_lines_from_records(name: str, expected: dict[str, int | None]) -> None:
    """Of JSONL and CSV the line stood under `record`, and `line` was null."""
    builder = LedgerBuilder()
    builder.open_source(name)
    builder.drop(Origin(name, 3), num_tokens=0, reason="malformed: x")
    builder.drop(Origin("b.json", 3, 17), num_tokens=0, reason="malformed: y")
    ledger = builder.finish()
    first, second = (group["first_origins"][0] for group in ledger.as_dict()["dropped"])
    assert first == {"path": name, **expected}
    assert second == {"path": "b.json", "record": 3, "line": 17}
    again = Ledger.from_dict(ledger.as_dict()).with_paths({name: name, "b.json": "c.json"}, sources=["a"])
    assert [str(group.first_origins[0]) for group in again.dropped] == [str(Origin(name, 3)), "c.json:17 (record 3)"]


records = st.tuples(st.integers(1, 50), st.sampled_from(["keep", "cut", "split", "over_length", "malformed: x"]))


@settings(max_examples=100, deadline=None)
@given(sources=st.lists(st.lists(records, max_size=12), min_size=1, max_size=4))
def test_any_course_adds_up_and_survives_json(sources: list[list[tuple[int, str]]]) -> None:
    builder = LedgerBuilder()
    for number, source in enumerate(sources):
        builder.open_source(f"{number}.jsonl", weight=1.0)
        for record, (tokens, fate) in enumerate(source, start=1):
            origin = Origin(f"{number}.jsonl", record)
            if fate == "keep":
                builder.keep(tokens, pieces=[tokens], supervised=tokens - 1)
            elif fate == "cut":
                builder.keep(tokens + 5, pieces=[tokens], supervised=1)
            elif fate == "split":
                builder.keep(2 * tokens, pieces=[tokens, tokens], supervised=tokens)
            else:
                builder.drop(origin, num_tokens=tokens if fate == "over_length" else 0, reason=fate)
    ledger = builder.finish()
    assert_adds_up(ledger)
    assert ledger.records == sum(map(len, sources))
    assert Ledger.from_dict(json.loads(json.dumps(ledger.as_dict()))) == ledger


def test_numbers_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(AssertionError):
        SourceCount("a", records=2, records_kept=1, samples=1)
    with pytest.raises(AssertionError):
        SourceCount("a", tokens_in=5, tokens_kept=4)
