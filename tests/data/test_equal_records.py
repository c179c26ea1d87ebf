"""Equal records are told, dropped or refused; pieces of a record stay together; weights take whole records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.build import Dataset, build_dataset
from finetune.data.types import Origin
from finetune.errors import DataError
from finetune.recipe.schema import DataSection


def build(tokenizer: Any, *paths: Path, **settings: Any) -> Dataset:
    train = settings.pop("train", None) or [{"path": str(path)} for path in paths]
    data = DataSection.model_validate({"train": train, "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


def failure(tokenizer: Any, *paths: Path, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        build(tokenizer, *paths, **settings)
    return caught.value


def questions(count: int) -> list[dict[str, Any]]:
    return [{"instruction": f"q{index}", "output": f"a{index}"} for index in range(count)]


def weighted_answers(*weights: float) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for weight in weights:
        messages += [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": weight}]
    return {"messages": messages}


class TestEqualRecords:
    def test_duplicates_are_told_and_kept(self, chatml: Any, write_jsonl: Callable) -> None:
        path = write_jsonl([*questions(3), *questions(2)])
        dataset = build(chatml, path)
        assert len(dataset.train) == 5
        (warning,) = dataset.gate.warnings
        assert "2 of 5 records" in warning.detail
        assert warning.examples == (f"{path}:4 = {path}:1", f"{path}:5 = {path}:2")
        assert "data.duplicates" in warning.detail

    def test_duplicates_dropped(self, chatml: Any, write_jsonl: Callable) -> None:
        dataset = build(chatml, write_jsonl([*questions(3), *questions(2)]), duplicates="drop")
        assert [dataset.train.origin(index).record for index in range(3)] == [1, 2, 3]
        ledger = dataset.ledger
        assert (ledger.records, ledger.records_kept, ledger.samples) == (5, 3, 3)
        assert [(group.reason, group.records) for group in ledger.dropped] == [("duplicate", 2)]
        assert ledger.tokens_in == ledger.tokens_kept + ledger.tokens_dropped
        assert ledger.tokens_kept == dataset.train.num_tokens

    def test_duplicates_refused(self, chatml: Any, write_jsonl: Callable) -> None:
        path = write_jsonl([*questions(3), *questions(1)])
        error = failure(chatml, path, duplicates="error")
        assert error.place == f"{path}:4"
        assert f"{path}:4 = {path}:1" in error.message

    def test_leakage_is_refused(self, chatml: Any, write_jsonl: Callable) -> None:
        train, held_out = write_jsonl(questions(5)), write_jsonl(questions(2), "eval.jsonl")
        error = failure(chatml, train, eval=[{"path": str(held_out)}])
        assert error.place == f"{train}:1"
        assert "2 training records equal" in error.message
        assert f"{train}:2 = {held_out}:2" in error.message
        assert "data.leakage" in error.remedy

    def test_leakage_dropped_from_training(self, chatml: Any, write_jsonl: Callable) -> None:
        train, held_out = write_jsonl(questions(5)), write_jsonl(questions(2), "eval.jsonl")
        dataset = build(chatml, train, eval=[{"path": str(held_out)}], leakage="drop")
        assert dataset.eval is not None
        assert (len(dataset.train), len(dataset.eval)) == (3, 2)
        assert not np.isin(dataset.train.digests, dataset.eval.digests).any()
        assert [(group.reason, group.records) for group in dataset.ledger.dropped] == [("also_in_eval", 2)]

    def test_leakage_kept_with_a_warning(self, chatml: Any, write_jsonl: Callable) -> None:
        train, held_out = write_jsonl(questions(5)), write_jsonl(questions(2), "eval.jsonl")
        dataset = build(chatml, train, eval=[{"path": str(held_out)}], leakage="keep")
        assert len(dataset.train) == 5
        assert [warning.name for warning in dataset.gate.warnings] == ["rows equal in train and eval"]

    def test_all_leaked_leaves_nothing(self, chatml: Any, write_jsonl: Callable) -> None:
        train, held_out = write_jsonl(questions(2)), write_jsonl(questions(2), "eval.jsonl")
        assert "none is left" in failure(chatml, train, eval=[{"path": str(held_out)}], leakage="drop").message


def test_pieces_of_a_document_stay_on_one_side(chatml: Any, write_jsonl: Callable) -> None:
    """A long text split over rows, its copy included, is held out whole or not at all."""
    texts = ["".join(chr(97 + (index * step) % 26) for index in range(100)) for step in (1, 3, 5, 7, 9, 11)]
    path = write_jsonl([{"text": text} for text in [*texts, texts[0]]])
    for fraction in (0.2, 0.5, 0.8):
        dataset = build(chatml, path, eval={"fraction": fraction}, over_length="split", max_length=16)
        assert dataset.eval is not None
        sides = [{store.origin(index).record for index in range(len(store))} for store in (dataset.train, dataset.eval)]
        assert sides[0] | sides[1] == set(range(1, 8))
        assert not sides[0] & sides[1]
        assert (1 in sides[0]) == (7 in sides[0])
        assert dataset.ledger.records_split == 7


def test_weights_take_whole_records(chatml: Any, write_jsonl: Callable) -> None:
    first, second = write_jsonl(questions(4)), write_jsonl([{"text": "t" * 40}] * 1, "text.jsonl")
    sources = [{"path": str(first), "weight": 2.5}, {"path": str(second), "weight": 3}]
    dataset = build(chatml, train=sources, max_length=64)
    records = [dataset.train.origin(index) for index in range(len(dataset.train))]
    taken = [records.count(Origin(str(first), number)) for number in range(1, 5)]
    assert sorted(taken) == [2, 2, 3, 3]
    assert records.count(Origin(str(second), 1)) == 3
    assert dataset.ledger.samples == 5
    assert (dataset.ledger.samples_taken, dataset.ledger.tokens_taken) == (13, dataset.train.num_tokens)


def test_a_source_of_which_nothing_is_taken_is_named(chatml: Any, write_jsonl: Callable) -> None:
    """A weight that rounds to no record left a source out without a word."""
    first, second = write_jsonl(questions(40)), write_jsonl([{"text": "a"}, {"text": "b"}], "text.jsonl")
    sources = [{"path": str(first), "weight": 0.0001}, {"path": str(second)}]
    dataset = build(chatml, train=sources)
    assert len(dataset.train) == 2
    (warning,) = dataset.gate.warnings
    assert warning.name == "weights of sources"
    assert warning.examples == (f"{first} (weight 0.0001, 40 samples)",)
    assert [source.samples_taken for source in dataset.ledger.sources] == [0, 2]
    assert any(str(first) in line and "0 taken by one pass" in line for line in dataset.ledger.summary_lines())
    sources[0]["weight"] = 0.1
    dataset = build(chatml, train=sources)
    assert not dataset.gate.warnings
    assert [source.samples_taken for source in dataset.ledger.sources] == [4, 2]


class TestOneFileTwice:
    """Places do not tell records apart where a file is named twice: neighbours were taken for pieces of one record."""

    def test_one_record_is_a_duplicate_of_itself(self, chatml: Any, write_jsonl: Callable) -> None:
        one = write_jsonl(questions(1))
        assert "1 of 2 records equals an earlier one" in failure(chatml, one, one, duplicates="error").message
        dataset = build(chatml, one, one, duplicates="drop")
        assert len(dataset.train) == 1
        assert [source.samples for source in dataset.ledger.sources] == [1, 0]

    def test_neighbours_count_as_records(self, chatml: Any, write_jsonl: Callable) -> None:
        one, two = write_jsonl(questions(1)), write_jsonl(questions(2)[1:], "two.jsonl")
        ledger = build(chatml, one, one, two, two, duplicates="drop").ledger
        assert (ledger.records_kept, ledger.records_split, ledger.records_dropped) == (2, 0, 2)

    def test_leaks_are_no_split_records(self, chatml: Any, write_jsonl: Callable) -> None:
        one, two = write_jsonl(questions(1)), write_jsonl(questions(2)[1:], "two.jsonl")
        ledger = build(chatml, one, one, two, eval=[{"path": str(one)}], leakage="drop").ledger
        assert (ledger.records_kept, ledger.records_split, ledger.records_dropped) == (1, 0, 2)

    def test_pieces_stay_pieces(self, chatml: Any, write_jsonl: Callable) -> None:
        """The pieces of one record still are no repeats, though each source has them."""
        long = write_jsonl([{"text": "abcdefgh" * 6}])
        dataset = build(chatml, long, long, duplicates="drop", over_length="split", max_length=16)
        ledger = dataset.ledger
        assert (ledger.records_split, ledger.records_dropped) == (1, 1)
        assert len(dataset.train) == ledger.sources[0].samples == 4

    def test_weights_of_both(self, chatml: Any, write_jsonl: Callable) -> None:
        one = write_jsonl(questions(1))
        sources = [{"path": str(one), "weight": 2}, {"path": str(one), "weight": 3}]
        assert [source.samples_taken for source in build(chatml, train=sources).ledger.sources] == [2, 3]


class TestLabels:
    def test_other_learned_answers_are_no_duplicates(self, chatml: Any, write_jsonl: Callable) -> None:
        """Weights of 0 and 1 are labels, and dropping one of the two lost its learned answer."""
        path = write_jsonl([weighted_answers(1, 0), weighted_answers(0, 1), weighted_answers(1, 0)])
        dataset = build(chatml, path, duplicates="drop")
        assert [dataset.train.origin(index).record for index in range(len(dataset.train))] == [1, 2]
        assert dataset.ledger.tokens_supervised == dataset.train.num_supervised_tokens

    def test_they_are_leaks_nevertheless(self, chatml: Any, write_jsonl: Callable) -> None:
        train, held_out = write_jsonl([weighted_answers(1, 0)]), write_jsonl([weighted_answers(0, 1)], "eval.jsonl")
        assert "learned by heart" in failure(chatml, train, eval=[{"path": str(held_out)}]).message

    def test_they_are_held_out_together(self, chatml: Any, write_jsonl: Callable) -> None:
        others = [weighted_answers(*[1] * count) for count in range(1, 7) if count != 2]
        path = write_jsonl([weighted_answers(1, 0), weighted_answers(0, 1), *others])
        for fraction in (0.2, 0.5, 0.8):
            dataset = build(chatml, path, eval={"fraction": fraction})
            assert dataset.eval is not None
            assert not np.isin(dataset.train.digests, dataset.eval.digests).any()
