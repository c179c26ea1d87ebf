"""The gate looks at every record by its tokens alone, and tells all that is wrong at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import learned_texts

from finetune.data.build import Dataset, build_dataset
from finetune.data.faults import DataFaults
from finetune.data.gate import Gate
from finetune.data.types import IGNORE_INDEX, ContentPart, Conversation, Message, Origin, Sample
from finetune.errors import DataError
from finetune.recipe.schema import DataSection

TOOL_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = Conversation("chat", Origin("a.jsonl", 1), (Message("user", "q"), Message("assistant", "a")))


def build(tokenizer: Any, *paths: Path, **settings: Any) -> Dataset:
    data = DataSection.model_validate({"train": [{"path": str(path)} for path in paths], "cache": False, **settings})
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=lambda line: None)


def failure(tokenizer: Any, *paths: Path, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        build(tokenizer, *paths, **settings)
    return caught.value


def questions(count: int) -> list[dict[str, Any]]:
    return [{"instruction": f"q{index}", "output": f"a{index}"} for index in range(count)]


def look(tokenizer: Any, ids: list[int], learned: list[int], *, loss_on: str = "assistant") -> list[str]:
    input_ids = np.array(ids, dtype=np.int32)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    labels[learned] = input_ids[learned]
    sample = Sample(input_ids, labels, Origin("a.jsonl", 1))
    return list(Gate(tokenizer, loss_on=loss_on).look([sample], conversation=CHAT)[0])


class TestLook:
    """One sample at a time, made by hand, so that the code that makes labels has no part in it."""

    def test_end_of_turn_not_learned(self, chatml: Any) -> None:
        """P17: the end token is in the row, but its label is not."""
        end = chatml.convert_tokens_to_ids("<|im_end|>")
        assert look(chatml, [1, 2, 3, end], [1, 2]) == ["end_not_learned"]
        assert look(chatml, [1, 2, 3, end], [1, 2, 3]) == []

    def test_each_turn_must_end(self, chatml: Any) -> None:
        end = chatml.convert_tokens_to_ids("<|im_end|>")
        row = [1, 2, end, 4, 5, end]
        assert look(chatml, row, [1, 2, 4]) == ["end_not_learned"]
        assert look(chatml, row, [1, 4, 5]) == ["end_not_learned"]
        assert look(chatml, row, [1, 2, 4, 5]) == []

    def test_nothing_learned(self, chatml: Any) -> None:
        """P20: all labels ignored."""
        assert look(chatml, [1, 2, 3], []) == ["nothing_learned"]

    def test_bos_twice_at_the_start(self, make_tokenizer: Callable) -> None:
        """P26: the template and the tokenizer each wrote one."""
        tokenizer = make_tokenizer(adds_bos=True)
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        assert look(tokenizer, [bos, bos, 1, end], [2, 3]) == ["bos_doubled"]
        assert look(tokenizer, [bos, 1, bos, 2, end], [3, 4]) == ["bos_repeated"]
        assert look(tokenizer, [1, 2, end], [1, 2]) == ["bos_missing"]
        assert look(tokenizer, [bos, 1, end], [1, 2]) == []

    def test_end_tokens_are_told(self, chatml: Any) -> None:
        end = chatml.convert_tokens_to_ids("<|im_end|>")
        ids = np.array([1, 2, end], dtype=np.int32)
        sample = Sample(ids, np.array([IGNORE_INDEX, 2, end], dtype=np.int32), Origin("a", 1))
        assert Gate(chatml, loss_on="assistant").look([sample], conversation=CHAT)[1] == {end}


def test_pad_equal_to_eos_still_learns_the_end(make_tokenizer: Callable, write_jsonl: Callable) -> None:
    """P17: 4 of 4 ends are learned where pad is EOS."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    dataset = build(tokenizer, write_jsonl(questions(4)))
    check = next(check for check in dataset.gate.checks if check.name == "end of turn")
    assert check.detail == "learned in 4 of 4 records"
    for index in range(4):
        sample = dataset.train[index]
        assert tokenizer.eos_token_id in sample.labels.tolist()


def end_of_turn(dataset: Dataset) -> str:
    return next(check for check in dataset.gate.checks if check.name == "end of turn").detail


def test_ends_are_counted_after_the_cut(chatml: Any, write_jsonl: Callable) -> None:
    """The count told of ends that `over_length: truncate` had cut off, and of records that `drop` had left out."""
    long = [{"instruction": f"r{number}", "output": "x" * 99} for number in range(3)]
    path = write_jsonl([*questions(4), *long])
    truncated = build(chatml, path, max_length=64, over_length="truncate")
    assert end_of_turn(truncated) == "learned in 4 of 7 records; cut off in 3"
    assert chatml.eos_token_id in truncated.end_ids
    assert end_of_turn(build(chatml, path, max_length=64, over_length="drop")) == "learned in 4 of 4 records"


def test_only_the_last_end_of_a_sample_stops_generation(make_tokenizer: Callable, write_jsonl: Callable) -> None:
    """With `loss_on: all` the end of each turn is learned, and what opens one too."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|im_end|>' if loop.last else '[/INST]' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(chat_template=template)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_jsonl([{"messages": turns * 2}])
    for loss_on in ("assistant", "all"):
        assert build(tokenizer, path, loss_on=loss_on).end_ids == (tokenizer.eos_token_id,)


def parts_record(weights: list[int], key: str = "weight") -> dict[str, Any]:
    parts = [{"type": "text", "text": f"part {index}.", key: weight} for index, weight in enumerate(weights)]
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]}


@pytest.mark.parametrize("turns", ["together", "separate"])
@pytest.mark.parametrize("key", ["weight", "train"])
@pytest.mark.parametrize(
    ("weights", "learned", "ends"),
    [
        ([1, 0], ["part 0."], 0),
        ([1, 0, 1], ["part 0.", "part 2.<|im_end|>"], 1),
        ([0, 1], ["part 1.<|im_end|>"], 1),
    ],
    ids=str,
)
def test_parts_that_choose(
    chatml: Any, write_jsonl: Callable, weights: list[int], learned: list[str], ends: int, key: str, turns: str
) -> None:
    """An end token is asked for where the learned stretch reaches the turn's end only."""
    dataset = build(chatml, write_jsonl([parts_record(weights, key)]), turns=turns)
    assert learned_texts(dataset.train[0], chatml) == learned
    check = next(check for check in dataset.gate.checks if check.name == "end of turn")
    assert check.detail.startswith(f"learned in {ends} of 1 record")
    assert (check.status, "do not teach to stop" in check.detail) == (("ok", False) if ends else ("warning", True))


def test_parts_that_choose_excuse_no_other_turn(chatml: Any) -> None:
    """Of the record's two learned stretches only the one that a part ends may lack its end token."""
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    answer = Message("assistant", "ab", parts=(ContentPart("a", True), ContentPart("b", False)))
    conversation = Conversation("chat", CHAT.origin, (*CHAT.messages, Message("user", "q"), answer))
    ids = np.array([1, 2, end, 3, 4, 5, end], dtype=np.int32)
    whole, without = np.full_like(ids, IGNORE_INDEX), np.full_like(ids, IGNORE_INDEX)
    whole[[1, 2, 4]], without[[1, 4]] = ids[[1, 2, 4]], ids[[1, 4]]
    gate = Gate(chatml, loss_on="assistant")
    assert gate.look([Sample(ids, whole, CHAT.origin)], conversation=conversation)[0] == []
    assert gate.look([Sample(ids, without, CHAT.origin)], conversation=conversation)[0] == ["end_not_learned"]
    # The same turns as samples of their own.
    first, second = (Sample(ids[part], without[part], CHAT.origin) for part in (slice(0, 3), slice(3, 7)))
    assert gate.look([first, second], conversation=conversation)[0] == ["end_not_learned"]


def test_reasoning_that_the_template_leaves_out_is_counted_by_turn(chatml: Any, write_jsonl: Callable) -> None:
    """P24: the ledger tells of how many learned turns, in how many records."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "why"}]
    path = write_jsonl([{"messages": turns * 2}, {"messages": turns}])
    (note,) = build(chatml, path).ledger.notes
    assert "leaves reasoning out of learned turns" in note.what
    assert (note.turns, note.records) == (3, 2)
    assert any("3 turns in 2 records" in line for line in build(chatml, path).ledger.summary_lines())


def test_all_malformed_records_are_told_by_kind(chatml: Any, write_jsonl: Callable) -> None:
    """P42: 10 rows, 2 malformed, 1 empty answer; each kind is counted, with its places and its text."""
    rows = [*questions(7), {"instruction": "q"}, {"instruction": "q", "output": ""}, {"instruction": 5, "output": "a"}]
    path = write_jsonl(rows)
    error = failure(chatml, path)
    assert isinstance(error, DataFaults)
    assert error.place == f"{path}:8"
    assert "3 records cannot be used" in error.message
    for record in (8, 9, 10):
        assert f"{path}:{record}" in error.message
    assert "`data.malformed`" in error.remedy
    faults = error.as_dict()["faults"]
    assert [group["records"] for group in faults] == [1, 1, 1]
    assert json.dumps(faults)


def test_only_three_examples_of_many(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([{"instruction": "q", "output": ""}] * 500 + questions(1))
    error = failure(chatml, path)
    assert "500 records cannot be used" in error.message
    assert "500 x output is empty" in error.message
    assert f"{path}:3" in error.message
    assert f"{path}:4:" not in error.message


def test_broken_lines_do_not_hide_what_follows(chatml: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps(questions(1)[0])
    path.write_text(f'{good}\n{{"instruction": \n{good}\n["no", "object"]\n{{"instruction": "q"}}\n', encoding="utf-8")
    error = failure(chatml, path)
    assert "3 records cannot be used" in error.message
    for line in (2, 4, 5):
        assert f"{path}:{line}" in error.message


def test_malformed_records_dropped_are_in_the_ledger(chatml: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row) for row in [*questions(3), {"instruction": "q", "output": ""}]]
    path.write_text("\n".join([*lines, "{broken", lines[0].replace("q0", "q9")]) + "\n", encoding="utf-8")
    dataset = build(chatml, path, malformed="drop")
    ledger = dataset.ledger
    assert (ledger.records, ledger.records_kept, ledger.records_dropped, len(dataset.train)) == (6, 4, 2, 4)
    assert {group.reason.partition(":")[0] for group in ledger.dropped} == {"malformed"}
    assert [origin.record for group in ledger.dropped for origin in group.first_origins] == [4, 5]
    assert dataset.train.origin(3) == Origin(str(path), 6)


def test_malformed_and_over_long_are_told_together(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([*questions(2), {"instruction": "q", "output": ""}, {"instruction": "q", "output": "x" * 99}])
    error = failure(chatml, path, max_length=64)
    assert "output is empty" in error.message
    assert "1 x a sample is longer than `data.max_length`" in error.message


def test_over_long_records_are_counted_beside_other_kinds(chatml: Any, write_jsonl: Callable) -> None:
    long = [{"instruction": f"q{number}", "output": "x" * (99 + number)} for number in range(5)]
    path = write_jsonl([{"instruction": "q", "output": ""}, *long])
    error = failure(chatml, path, max_length=64)
    assert error.message.startswith("6 records cannot be used:")
    assert isinstance(error, DataFaults)
    malformed, too_long = error.as_dict()["faults"]
    assert malformed["records"] == 1
    assert (too_long["kind"], too_long["records"]) == ("a sample is longer than `data.max_length`", 5)
    assert [example["place"] for example in too_long["examples"]] == [f"{path}:{line}" for line in (2, 3, 4)]
    assert "`data.over_length`" in error.remedy
    dropped = failure(chatml, path, max_length=64, malformed="drop")
    assert dropped.message.startswith("5 samples are longer")


@pytest.mark.parametrize("token", ["<|start_header_id|>", "<start_of_turn>"])
def test_control_token_of_another_model(chatml: Any, write_jsonl: Callable, token: str) -> None:
    path = write_jsonl([*questions(2), {"instruction": f"{token}user hi", "output": "a"}])
    error = failure(chatml, path)
    assert error.place == f"{path}:3"
    assert token in error.message
    assert "data.unknown_control_tokens" in error.remedy
    assert len(build(chatml, path, unknown_control_tokens="keep").train) == 3


def tool_record(**changed: Any) -> dict[str, Any]:
    """Returns a record with reasoning, a tool call and the tool's definition, some of it with another text."""
    texts = {"reasoning": "why", "argument": "x", "key": "a", "name": "f", "description": "d", **changed}
    function = {"name": texts["name"], "arguments": {texts["key"]: texts["argument"]}}
    if texts.get("as_text"):
        function["arguments"] = json.dumps(function["arguments"])
    definition = {"name": "f", "description": texts["description"], "parameters": {"type": "object"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            calling,
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "a", "reasoning_content": texts["reasoning"]},
        ],
        # A name that no tool has would be refused for that, so that a changed one stands in a record without tools.
        "tools": [] if "name" in changed else [{"type": "function", "function": definition}],
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"reasoning": "<|eot_id|>"},
        {"argument": {"deep": ["<|eot_id|>"]}},
        {"argument": "<|eot_id|>", "as_text": True},
        {"key": "<|eot_id|>"},
        {"name": "<|eot_id|>"},
        {"description": "<|eot_id|>"},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_control_token_of_another_model_beside_the_content(
    make_tokenizer: Callable, write_jsonl: Callable, changed: dict[str, Any]
) -> None:
    tokenizer = make_tokenizer(chat_template=TOOL_TEMPLATE)
    path = write_jsonl([tool_record(), tool_record(**changed)])
    error = failure(tokenizer, path)
    assert error.place == f"{path}:2"
    assert "control token that this tokenizer does not have: <|eot_id|>" in error.message
    assert "data.unknown_control_tokens" in error.remedy


def test_own_control_token_is_no_unknown_one(chatml: Any) -> None:
    gate = Gate(chatml, loss_on="assistant")
    assert gate.unknown_control_token(Conversation("text", Origin("a", 1), text="a <|im_end|> b [INST]")) is None
    assert gate.unknown_control_token(Conversation("text", Origin("a", 1), text="if a <| b |> c: x[1]")) is None


def test_missing_bos_is_a_warning(make_tokenizer: Callable, write_jsonl: Callable) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    path = write_jsonl(questions(3))
    dataset = build(tokenizer, path)
    (warning,) = dataset.gate.warnings
    assert warning.name == "BOS"
    assert "3 of 3 records" in warning.detail
    assert f"{path}:1" in warning.line()


def test_tiny_share_is_a_warning(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([*questions(3), {"instruction": "q" * 900, "output": "a"}])
    (warning,) = build(chatml, path).gate.warnings
    assert warning.name == "learned share"
    assert warning.examples == (f"{path}:4",)
