"""Roles out of order are refused with file, line and remedy, dropped, or taken, as the recipe says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from label_cases import learned_texts

from finetune.data.build import Dataset, build_dataset
from finetune.data.faults import DataFaults
from finetune.errors import DataError
from finetune.recipe.schema import DataSection

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": "c", "tool_calls": [{"name": "f", "arguments": {"x": "y"}}]}
RESULT = {"role": "tool", "content": "r"}
TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_SYSTEM_ONLY = TOOL_TEMPLATE.replace("messages %}", "messages if m.role != 'system' %}", 1)
OUT_OF_ORDER: dict[str, tuple[list[Any], str]] = {
    "two-questions": ([USER, USER, ANSWER], "the 2nd message (user) follows another question"),
    "two-answers": ([USER, ANSWER, ANSWER], "the 3rd message (assistant) follows another answer"),
    "answer-first": ([ANSWER, USER, ANSWER], "the 1st message (assistant) answers no question"),
    "answer-after-system": ([SYSTEM, ANSWER], "the 2nd message (assistant) answers no question"),
    "late-system": ([USER, ANSWER, SYSTEM, USER, ANSWER], "the 3rd message (system) must come first"),
    "system-and-developer": (
        [SYSTEM, {**SYSTEM, "role": "developer"}, USER, ANSWER],
        "the 2nd message (developer)",
    ),
    "result-without-call": ([USER, ANSWER, RESULT, ANSWER], "the 3rd message (tool) follows no tool call"),
    "result-after-question": ([USER, CALL, USER, RESULT, ANSWER], "the 4th message (tool) follows no tool call"),
}
IN_ORDER: dict[str, list[Any]] = {
    "plain": [USER, ANSWER, USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "question-last": [USER, ANSWER, USER],
    "tools": [SYSTEM, USER, CALL, RESULT, CALL, RESULT, ANSWER],
    "several-calls-and-results": [USER, CALL, CALL, RESULT, RESULT, ANSWER],
    "text-then-call": [USER, ANSWER, CALL, RESULT, ANSWER],
    "call-then-question": [USER, CALL, RESULT, USER, ANSWER],
}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable) -> Any:
    return make_tokenizer(chat_template=TOOL_TEMPLATE)


def build(tokenizer: Any, path: Any, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)}], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


@pytest.mark.parametrize(("messages", "words"), OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_out_of_order_is_refused(tokenizer: Any, write_jsonl: Callable, messages: list[Any], words: str) -> None:
    path = write_jsonl([{"messages": IN_ORDER["plain"]}, {"messages": messages}])
    with pytest.raises(DataError) as caught:
        build(tokenizer, path)
    assert caught.value.place == f"{path}:2"
    assert caught.value.message.startswith("roles out of order: ")
    assert words in caught.value.message
    assert "`data.role_order` to any" in caught.value.remedy
    assert "`data.malformed` to drop" in caught.value.remedy
    assert isinstance(caught.value, DataFaults)
    (fault,) = caught.value.as_dict()["faults"]
    assert fault["kind"].startswith(f"roles out of order: a {words.split(maxsplit=2)[2]}")
    assert fault["records"] == 1


def test_each_fault_of_the_order_has_its_own_remedy(tokenizer: Any, write_jsonl: Callable) -> None:
    names = ("two-questions", "two-answers", "answer-first", "late-system")
    path = write_jsonl([{"messages": OUT_OF_ORDER[name][0]} for name in names])
    with pytest.raises(DataFaults) as caught:
        build(tokenizer, path)
    groups = caught.value.as_dict()["faults"]
    assert [group["records"] for group in groups] == [1, 1, 1, 1]
    words = ("Join the two questions", "Join the two answers", "Add the question before the answer", "late system")
    assert all(word in group["remedy"] for word, group in zip(words, groups, strict=True))


@pytest.mark.parametrize("messages", [case[0] for case in OUT_OF_ORDER.values()], ids=OUT_OF_ORDER)
def test_out_of_order_is_left_out_or_taken(tokenizer: Any, write_jsonl: Callable, messages: list[Any]) -> None:
    path = write_jsonl([{"messages": IN_ORDER["plain"]}, {"messages": messages}])
    (dropped,) = build(tokenizer, path, malformed="drop").ledger.dropped
    assert dropped.reason.startswith("malformed: roles out of order: a message (")
    assert dropped.records == 1
    taken = build(tokenizer, path, role_order="any").train
    assert len(taken) == 2
    num_answers = sum(message["role"] == "assistant" for message in messages)
    assert len(learned_texts(taken[1], tokenizer)) == num_answers


@pytest.mark.parametrize("messages", IN_ORDER.values(), ids=IN_ORDER)
def test_usual_orders_are_taken(tokenizer: Any, write_jsonl: Callable, messages: list[Any]) -> None:
    assert len(build(tokenizer, write_jsonl([{"messages": messages}])).train) == 1


def test_sharegpt_is_looked_at_too(tokenizer: Any, write_jsonl: Callable) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "human", "value": "r"}, {"from": "gpt", "value": "a"}]
    with pytest.raises(DataError, match="roles out of order: the 2nd message"):
        build(tokenizer, write_jsonl([{"conversations": turns}]))


def test_any_order_is_not_taken_where_the_template_leaves_a_message_out(
    make_tokenizer: Callable, write_jsonl: Callable
) -> None:
    """Also where a question holds the same words."""
    late = {"role": "system", "content": "Be brief."}
    path = write_jsonl([{"messages": [USER, ANSWER, late, {**USER, "content": "Now: Be brief. Why?"}, ANSWER]}])
    with pytest.raises(DataError, match=r"left out by the chat template: message 3 \(system\), 'Be brief.'"):
        build(make_tokenizer(chat_template=FIRST_SYSTEM_ONLY), path, role_order="any")
    assert len(build(make_tokenizer(chat_template=TOOL_TEMPLATE), path, role_order="any").train) == 1


def test_held_out_record_in_any_order_is_read_again(tokenizer: Any, write_jsonl: Callable) -> None:
    """The prompts for generation come from a second reading of the records."""
    path = write_jsonl([{"messages": [USER, USER, {**ANSWER, "content": f"a{number}"}]} for number in range(4)])
    data = DataSection.model_validate(
        {"train": [{"path": str(path)}], "eval": {"fraction": 0.5}, "cache": False, "role_order": "any"}
    )
    dataset = build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None, max_references=1)
    assert dataset.references[0].reference.startswith("a")
