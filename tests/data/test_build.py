"""Files become stores with a ledger that adds up; nothing too long, held out or empty passes unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.build import Dataset, build_dataset, hold_out
from finetune.data.ledger import Ledger, LedgerBuilder, LeftAside
from finetune.data.store import SampleStore, StoreBuilder
from finetune.data.types import IGNORE_INDEX, Origin, Sample
from finetune.errors import DataError
from finetune.recipe.schema import DataSection


def build(
    tokenizer: Any, *paths: Path, seed: int = 7, max_references: int = 0, **settings: Any
) -> tuple[Dataset, list[str]]:
    data = DataSection.model_validate({"train": [{"path": str(path)} for path in paths], **settings})
    said: list[str] = []
    dataset = build_dataset(data, tokenizer=tokenizer, seed=seed, say=said.append, max_references=max_references)
    return dataset, said


def failure(tokenizer: Any, *paths: Path, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        build(tokenizer, *paths, **settings)
    assert caught.value.remedy
    return caught.value


def questions(count: int, answer: str = "A") -> list[dict[str, Any]]:
    return [{"instruction": f"q{index}", "output": f"{answer}{index}"} for index in range(count)]


def sample_of(ids: list[int], record: int = 1) -> Sample:
    labels = np.array([IGNORE_INDEX, *ids[1:]], dtype=np.int32)
    return Sample(np.array(ids, dtype=np.int32), labels, Origin("a.jsonl", record))


def store_of(rows: list[list[int]]) -> SampleStore:
    builder = StoreBuilder()
    for number, ids in enumerate(rows, start=1):
        builder.add(sample_of(ids, number))
    return builder.finish()


def test_two_files_of_two_formats(chatml: Any, write_jsonl: Callable) -> None:
    first = write_jsonl(questions(3))
    second = write_jsonl([{"prompt": "p", "completion": "c"}], "second.jsonl")
    dataset, said = build(chatml, first, second)
    assert len(dataset.train) == 4
    assert dataset.train[3].origin == Origin(str(second), 1)
    assert dataset.train[2].origin == Origin(str(first), 3)
    assert [(source.format, source.records) for source in dataset.ledger.sources] == [
        ("alpaca", 3),
        ("prompt_completion", 1),
    ]
    assert f"{first}: recognised as alpaca" in said
    assert dataset.eval is dataset.eval_ledger is None
    lines = dataset.ledger.summary_lines()
    assert lines[0].startswith("4 records -> 4 samples")
    assert str(second) in lines[2]


def test_malformed_record_stops_the_build(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([*questions(8), {"instruction": "q", "output": ""}, {"instruction": "q"}])
    error = failure(chatml, path)
    assert error.place == f"{path}:9"
    assert "output is empty" in error.message


def test_format_named_in_the_recipe(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"text": "t", "prompt": "p", "completion": "c"}])
    data = DataSection.model_validate({"train": [{"path": str(path), "format": "text"}]})
    dataset = build_dataset(data, tokenizer=chatml, seed=7, say=lambda line: None)
    assert chatml.decode(dataset.train[0].input_ids) == "t<|im_end|>"


LONG_ANSWER = {"instruction": "q", "output": "x" * 100}


def test_over_length_error_tells_what_would_be_lost(chatml: Any, write_jsonl: Callable) -> None:
    """P23: without a policy, over-long records stop the run with their count and the answer tokens that a cut loses."""
    path = write_jsonl([*questions(7), LONG_ANSWER, *questions(1), LONG_ANSWER, {**LONG_ANSWER, "output": "y" * 120}])
    error = failure(chatml, path, max_length=64)
    longest = len(build(chatml, path)[0].train[10])
    lost = sum(length - 64 - 1 for length in (longest - 20, longest - 20, longest))  # the last token, "\n", is no label
    assert error.place == f"{path}:8"
    assert f"3 samples are longer than `max_length` 64, the longest {longest} tokens" in error.message
    assert f"lose {lost} learned tokens" in error.message
    assert all(f"{path}:{record}" in error.message for record in (8, 10, 11))
    assert f"`data.max_length` to {longest}" in error.remedy
    assert "drop or truncate" in error.remedy


def test_over_length_drop(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([*questions(7), LONG_ANSWER])
    ledger = build(chatml, path, max_length=64, over_length="drop")[0].ledger
    (dropped,) = ledger.dropped
    assert (ledger.records, ledger.records_kept, dropped.reason, dropped.records) == (8, 7, "over_length", 1)
    assert dropped.first_origins == (Origin(str(path), 8),)
    assert any("dropped 1 (over_length)" in line and f"{path}:8" in line for line in ledger.summary_lines())


def test_over_length_truncate_drops_what_has_no_label_left(chatml: Any, write_jsonl: Callable) -> None:
    """P22: a row whose prompt fills `max_length` is dropped and counted; no row without a label is left."""
    path = write_jsonl([LONG_ANSWER, {"instruction": "q" * 100, "output": "x"}])
    dataset, _ = build(chatml, path, max_length=64, over_length="truncate")
    full = build(chatml, path)[0].train
    assert len(dataset.train) == 1
    assert np.array_equal(dataset.train[0].labels, full[0].labels[:64])
    assert (dataset.train.supervised > 0).all()
    ledger = dataset.ledger
    assert (ledger.records_truncated, ledger.tokens_truncated) == (1, len(full[0]) - 64)
    assert [(group.reason, group.tokens) for group in ledger.dropped] == [("no_label_after_truncation", len(full[1]))]
    assert ledger.tokens_in == full.num_tokens
    assert any("truncated 1 record, " in line for line in ledger.summary_lines())
    warned = [check for check in dataset.gate.checks if check.name == "cut answers"]
    assert [(check.status, check.detail[:14]) for check in warned] == [("warning", "1 sample was c")]


@pytest.mark.parametrize("num_tokens", [8, 9, 16, 17, 23])
def test_over_length_split_keeps_every_token(chatml: Any, tmp_path: Path, num_tokens: int) -> None:
    path = tmp_path / "doc.txt"
    path.write_text("bcdefghijklmnopqrstuvwxyz"[: num_tokens - 1], encoding="utf-8")
    dataset, _ = build(chatml, path, max_length=8, over_length="split")
    assert dataset.train.num_tokens == dataset.ledger.tokens_in == num_tokens
    assert chatml.decode(dataset.train.input_ids) == path.read_text(encoding="utf-8") + "<|im_end|>"
    for index in range(len(dataset.train)):
        sample = dataset.train[index]
        assert 2 <= len(sample) <= 8
        assert sample.labels[0] == IGNORE_INDEX
        assert np.array_equal(sample.labels[1:], sample.input_ids[1:])
        assert sample.origin == Origin(str(path), 1)
    assert len(dataset.train) == -(-num_tokens // 8)


def test_over_length_split_refuses_conversations(chatml: Any, write_jsonl: Callable) -> None:
    error = failure(chatml, write_jsonl([LONG_ANSWER]), max_length=64, over_length="split")
    assert "only plain text" in error.message
    assert "drop or truncate" in error.remedy
    assert "malformed" not in error.remedy


def test_conversation_that_cannot_be_split_is_over_length(chatml: Any, write_jsonl: Callable) -> None:
    """The ledger told of a malformed record of 0 tokens."""
    path = write_jsonl([*questions(2), LONG_ANSWER, {"instruction": "q", "output": ""}])
    settings = {"max_length": 64, "over_length": "split"}
    ledger = build(chatml, path, malformed="drop", **settings)[0].ledger
    too_long, malformed = ledger.dropped
    assert (too_long.reason, too_long.records, too_long.first_origins) == ("over_length", 1, (Origin(str(path), 3),))
    assert too_long.tokens == len(build(chatml, write_jsonl([LONG_ANSWER], "long.jsonl"))[0].train[0])
    assert (malformed.reason.partition(":")[0], malformed.tokens) == ("malformed", 0)
    error = failure(chatml, path, **settings)
    assert "2 records cannot be used" in error.message
    assert "`data.malformed`" in error.remedy, "of the other record"


def test_nothing_left_is_an_error(chatml: Any, write_jsonl: Callable) -> None:
    error = failure(chatml, write_jsonl([LONG_ANSWER]), max_length=64, over_length="drop")
    assert "no sample is left" in error.message
    assert "dropped 1 (over_length)" in error.message
    assert error.remedy == "Raise `data.max_length`: the records are longer."


def test_nothing_left_of_malformed_records_has_a_remedy_for_them(chatml: Any, write_jsonl: Callable) -> None:
    """The remedy was to raise `data.max_length`, whatever had been dropped."""
    error = failure(chatml, write_jsonl([{"instruction": "q", "output": ""}]), malformed="drop")
    assert "no sample is left" in error.message
    assert "max_length" not in error.remedy and "`data.malformed`" in error.remedy


@pytest.mark.parametrize("cache", [True, False])
def test_missing_file(chatml: Any, tmp_path: Path, cache: bool) -> None:
    error = failure(chatml, tmp_path / "none.jsonl", cache=cache)
    assert "does not exist" in error.message
    assert "relative to the recipe that names it" in error.remedy
    assert "on the command line to the current folder" in error.remedy


def test_eval_files_and_references(chatml: Any, write_jsonl: Callable) -> None:
    train, held_out = write_jsonl(questions(4)), write_jsonl(questions(5, answer="B"), "eval.jsonl")
    for expected in ("miss", "hit"):
        dataset, said = build(chatml, train, eval=[{"path": str(held_out)}], max_references=3)
        assert dataset.eval is not None
        assert dataset.eval_ledger is not None
        assert (len(dataset.train), len(dataset.eval), dataset.eval_ledger.records) == (4, 5, 5)
        assert [reference.reference for reference in dataset.references] == ["B0", "B1", "B2"]
        for index, reference in enumerate(dataset.references):
            ids = dataset.eval[index].input_ids[: len(reference.prompt_ids)]
            assert np.array_equal(ids, reference.prompt_ids)
            assert reference.origin == dataset.eval[index].origin
        assert sum(expected in line for line in said) == 2


def test_eval_fraction(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl(questions(20))
    dataset, _ = build(chatml, path, eval={"fraction": 0.25}, max_references=10)
    assert dataset.eval is not None
    assert (len(dataset.train), len(dataset.eval)) == (15, 5)
    records = [[store.origin(index).record for index in range(len(store))] for store in (dataset.train, dataset.eval)]
    assert sorted(records[0] + records[1]) == list(range(1, 21))
    assert [reference.origin.record for reference in dataset.references] == records[1]
    assert dataset.ledger.samples_held_out == 5
    assert dataset.ledger.tokens_held_out == dataset.eval.num_tokens
    assert any("held out 5 samples" in line for line in dataset.ledger.summary_lines())
    again, _ = build(chatml, path, eval={"fraction": 0.25}, cache=False)
    assert np.array_equal(again.train.origins, dataset.train.origins)
    other, _ = build(chatml, path, eval={"fraction": 0.25}, seed=8)
    assert not np.array_equal(other.train.origins, dataset.train.origins)


def test_eval_fraction_of_equal_samples_is_an_error(chatml: Any, write_jsonl: Callable) -> None:
    error = failure(chatml, write_jsonl(questions(1) * 3), eval={"fraction": 0.5})
    assert "1 distinct sample" in error.message


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.sampled_from([[1, 2], [1, 3], [2, 3], [4, 5, 6], [7, 8], [9, 1]]), min_size=2, max_size=30),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
def test_equal_samples_never_cross(rows: list[list[int]], fraction: float, seed: int) -> None:
    distinct = set(map(tuple, rows))
    store = store_of(rows)
    if len(distinct) < 2:
        with pytest.raises(DataError):
            hold_out(store, fraction=fraction, seed=seed)
        return
    is_held_out = hold_out(store, fraction=fraction, seed=seed)
    sides = [
        {tuple(row) for row, held in zip(rows, is_held_out, strict=True) if held is np.bool_(side)} for side in (0, 1)
    ]
    assert sides[0] and sides[1]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    reversed_choice = hold_out(store_of(rows[::-1]), fraction=fraction, seed=seed)
    assert np.array_equal(reversed_choice[::-1], is_held_out)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=12), data=st.data())
def test_store_selects_what_it_holds(rows: list[list[int]], data: st.DataObject) -> None:
    store = store_of(rows)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20))
    chosen = store.select(indices)
    assert [chosen[at].input_ids.tolist() for at in range(len(chosen))] == [rows[index] for index in indices]
    assert [chosen.origin(at).record for at in range(len(chosen))] == [index + 1 for index in indices]
    assert chosen.lengths.tolist() == [len(rows[index]) for index in indices]
    assert store.num_supervised_tokens == sum(len(row) - 1 for row in rows)


def test_store_round_trip_is_mapped(tmp_path: Path) -> None:
    store = store_of([[1, 2, 3], [4], [5, 6]])
    store.save(tmp_path)
    loaded = SampleStore.load(tmp_path)
    assert isinstance(loaded.input_ids, np.memmap)
    for index in range(3):
        assert np.array_equal(loaded[index].input_ids, store[index].input_ids)
        assert np.array_equal(loaded[index].labels, store[index].labels)
        assert loaded[index].origin == store[index].origin
    assert loaded.num_supervised_tokens == store.num_supervised_tokens == 3
    assert loaded[-1].input_ids.tolist() == [5, 6]
    with pytest.raises(IndexError):
        loaded[3]


def test_ledger_counts_add_up_and_survive_json() -> None:
    builder = LedgerBuilder()
    builder.open_source("a.jsonl")
    builder.set_format("text")
    builder.keep(6, pieces=[6], supervised=5)
    builder.keep(6, pieces=[4], supervised=3)
    builder.keep(6, pieces=[3, 3], supervised=4)
    for record in range(7):
        builder.drop(Origin("a.jsonl", record), num_tokens=2, reason="over_length")
    builder.note(LeftAside("keys not used: x"), Origin("a.jsonl", 1))
    for record in (1, 2):
        builder.note(LeftAside("left out", turns=2), Origin("a.jsonl", record))
    ledger = builder.finish()
    assert (ledger.records, ledger.records_kept, ledger.records_split, ledger.records_dropped) == (10, 2, 1, 7)
    assert ledger.samples == 4
    assert (ledger.tokens_in, ledger.tokens_kept, ledger.tokens_dropped, ledger.tokens_truncated) == (32, 16, 14, 2)
    assert ledger.tokens_supervised == 5 + 3 + 4
    assert len(ledger.dropped[0].first_origins) == 5
    assert any("split 1 record into 2 samples" in line for line in ledger.summary_lines())
    assert "  note: keys not used: x: 1 record: a.jsonl:1" in ledger.summary_lines()
    assert "  note: left out: 4 turns in 2 records: a.jsonl:1, 2" in ledger.summary_lines()
    assert Ledger.from_dict(ledger.as_dict()) == ledger
    values = ledger.as_dict()
    for key in ("records_kept", "tokens_kept", "tokens_truncated", "samples"):
        with pytest.raises(AssertionError):
            Ledger.from_dict({**values, key: values[key] + 1})


def test_real_files_of_three_kinds_give_the_same_tokens(chatml: Any, assets: Path) -> None:
    """The same Alpaca rows as CSV, Parquet and messages; none is lost."""
    names = ["alpaca_en.csv", "alpaca_en.parquet", "messages_alpaca_en.jsonl"]
    stores = [build(chatml, assets / "data" / name, max_length=65536)[0].train for name in names]
    assert len(stores[0]) == 999
    for store in stores[1:]:
        assert np.array_equal(store.input_ids, stores[0].input_ids)
        assert np.array_equal(store.labels, stores[0].labels)
