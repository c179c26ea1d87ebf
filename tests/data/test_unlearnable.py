"""Data of other training methods is told under mapped columns too, and what the refusal advises works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from finetune.data.build import Dataset, build_dataset
from finetune.errors import DataError
from finetune.recipe.schema import DataSection

USER, ANSWER, OTHER = (
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
REFUSED = [
    ("strings", {"q": "2 + 2?", "good": "4", "bad": "5"}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
    ("conversational", {"q": [USER], "good": [ANSWER], "bad": [OTHER]}, {"prompt": "q", "chosen": "good"}),
    ("implicit", {"good": [USER, ANSWER], "bad": [USER, OTHER]}, {"chosen": "good", "rejected": "bad"}),
    ("kto", {"prompt": "2 + 2?", "completion": "5", "verdict": False}, {"label": "verdict"}),
    ("kto-messages", {"turns": [USER, ANSWER], "verdict": 1}, {"label": "verdict", "messages": "turns"}),
    ("grpo", {"problem": "2 + 2?", "target": "4"}, {"prompt": "problem", "answer": "target"}),
]
FORMATS = {"kto": "kto", "kto-messages": "kto", "grpo": "prompt_answer"}


def build(tokenizer: Any, path: Any, **source: Any) -> tuple[Dataset, list[str]]:
    said: list[str] = []
    data = DataSection.model_validate({"train": [{"path": str(path), **source}], "cache": False})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=said.append), said


def failure(tokenizer: Any, path: Any, **source: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        build(tokenizer, path, **source)
    return caught.value


def learned(tokenizer: Any, dataset: Dataset) -> str:
    sample = dataset.train[0]
    return tokenizer.decode(sample.input_ids[sample.labels != -100])


@pytest.mark.parametrize(("name", "record", "columns"), REFUSED, ids=[case[0] for case in REFUSED])
def test_mapped_columns_are_recognised_and_refused(
    chatml: Any, write_jsonl: Callable, name: str, record: dict[str, Any], columns: dict[str, str]
) -> None:
    path, format = write_jsonl([record]), FORMATS.get(name, "preference")
    for named in ("auto", format):
        error = failure(chatml, path, columns=columns, format=named)
        assert format in str(error)
        assert f"{path}:1" in str(error)
    if format == "preference":
        assert name in str(failure(chatml, path, columns=columns)), "the shape is told"


@pytest.mark.parametrize(
    ("record", "columns", "text", "answer"),
    [
        ({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}, {"completion": "chosen"}, "2 + 2 = 4", "4"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, {"completion": "chosen"}, "2 + 2?", "4"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, {"messages": "chosen"}, "2 + 2?", "4"),
        (
            {"prompt": "2 + 2?", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            {"messages": "chosen"},
            "2 + 2?",
            "4",
        ),
        ({"instruction": "2 + 2?", "chosen": "4", "rejected": "5"}, {"output": "chosen"}, "2 + 2?", "4"),
    ],
    ids=["strings", "conversational", "implicit", "text-beside-messages", "alpaca"],
)
def test_preferred_answers_can_be_learned_as_advised(
    chatml: Any, write_jsonl: Callable, record: dict[str, Any], columns: dict[str, str], text: str, answer: str
) -> None:
    path = write_jsonl([record])
    (role, column) = next(iter(columns.items()))
    assert f"{{{role}: {column}}}" in str(failure(chatml, path))
    dataset, _ = build(chatml, path, columns=columns)
    assert text in chatml.decode(dataset.train[0].input_ids)
    assert learned(chatml, dataset).startswith(answer)
    assert "5" not in chatml.decode(dataset.train[0].input_ids)
    assert "own rejected" in "\n".join(dataset.ledger.summary_lines())


def test_own_name_of_the_answer_column(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"prompt": "2 + 2 = ", "good": "4", "rejected": "5"}])
    assert "preference" in str(failure(chatml, path, columns={"chosen": "good"}))
    assert learned(chatml, build(chatml, path, columns={"completion": "good"})[0]).startswith("4")


def test_pair_named_by_the_recipe_stays_a_pair(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"prompt": "2 + 2 = ", "good": "4", "bad": "5"}])
    error = failure(chatml, path, columns={"completion": "good", "rejected": "bad"})
    assert "preference" in str(error)


def test_verdict_stays_one_though_the_answer_is_named(chatml: Any, write_jsonl: Callable) -> None:
    """A bad answer is bad under any name of its column."""
    path = write_jsonl([{"prompt": "2 + 2 = ", "response": "5", "label": False}])
    assert "kto" in str(failure(chatml, path, columns={"completion": "response"}))


def test_answers_for_a_reward_can_be_learned_as_advised(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"prompt": "2 + 2 = ", "answer": "4"}])
    assert "{completion: answer}" in str(failure(chatml, path))
    assert learned(chatml, build(chatml, path, columns={"completion": "answer"})[0]).startswith("4")


def test_answers_beside_a_list_of_messages_can_be_learned_as_advised(chatml: Any, write_jsonl: Callable) -> None:
    """The first example of docs/data_formats.md: its advice led to an error."""
    path = write_jsonl([{"prompt": [USER], "answer": "4"}])
    assert "{completion: answer}" in failure(chatml, path).remedy
    dataset, said = build(chatml, path, columns={"completion": "answer"})
    assert learned(chatml, dataset) == "4<|im_end|>"
    assert any("prompt_completion (messages)" in line for line in said)
