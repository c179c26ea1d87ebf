"""Each format is recognised and converted; each malformed record is an error that names it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.data.formats import Format, convert, describe, recognise, require_same_format, unused_line
from finetune.data.types import Conversation, Message, Origin
from finetune.errors import DataError

ORIGIN = Origin("data.jsonl", 7)
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def convert_auto(record: Any) -> Conversation:
    return convert(record, format=recognise(record, ORIGIN), origin=ORIGIN)


def failure(record: Any, format: Format | None = None) -> DataError:
    with pytest.raises(DataError) as caught:
        convert(record, format=format or recognise(record, ORIGIN), origin=ORIGIN)
    assert caught.value.place == "data.jsonl:7"
    assert caught.value.remedy
    return caught.value


def test_alpaca_with_everything() -> None:
    record = {
        "instruction": "Add",
        "input": "1 2",
        "output": "3",
        "system": "Be brief",
        "history": [["Q", "A"]],
        "id": 5,
    }
    assert convert_auto(record).messages == (
        Message("system", "Be brief"),
        Message("user", "Q"),
        Message("assistant", "A"),
        Message("user", "Add\n\n1 2"),
        Message("assistant", "3"),
    )


@pytest.mark.parametrize("empty", [{}, {"input": ""}, {"input": None, "system": None, "history": []}])
def test_alpaca_without_input(empty: dict[str, Any]) -> None:
    record = {"instruction": "Add", "output": "3", **empty}
    assert convert_auto(record).messages == (Message("user", "Add"), Message("assistant", "3"))


def test_sharegpt() -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    expected = (Message("user", "Hi"), Message("assistant", "Hello"))
    assert convert_auto({"conversations": turns}).messages == expected
    assert convert_auto({"messages": turns}).messages == expected
    with_system = convert_auto({"conversations": turns, "system": "S"})
    assert with_system.messages == (Message("system", "S"), *expected)


def test_messages_with_parts_tools_and_extra() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "1", "tool_call_id": "x"},
            {"role": "assistant", "content": "done", "reasoning_content": "hm", "name": None},
        ],
        "tools": tools,
    }
    conversation = convert_auto(record)
    assert conversation.tools == tuple(tools)
    assert conversation.messages == (
        Message("user", "ab"),
        Message("assistant", "", {"tool_calls": calls}),
        Message("tool", "1", {"tool_call_id": "x"}),
        Message("assistant", "done", {"reasoning_content": "hm", "thinking": "hm"}),
    )


def test_messages_under_the_key_conversations() -> None:
    assert recognise({"conversations": [USER, ANSWER]}, ORIGIN) == "messages"
    assert len(convert_auto({"conversations": [USER, ANSWER]}).messages) == 2


def test_prompt_completion_of_strings_and_of_messages() -> None:
    plain = convert_auto({"prompt": "2+2=", "completion": "4"})
    assert (plain.kind, plain.text, plain.completion) == ("completion", "2+2=", "4")
    chat = convert_auto({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert (chat.kind, len(chat.messages), chat.num_prompt_messages) == ("chat", 4, 3)


def test_text() -> None:
    assert convert_auto("a document") == Conversation("text", ORIGIN, text="a document")
    assert convert_auto({"text": "a document", "label": 1}).text == "a document"


def test_unknown_shape_lists_keys_and_shapes() -> None:
    error = failure({"question": "a", "answer": "b"})
    assert "question, answer" in error.message
    for name in ("alpaca", "sharegpt", "messages", "prompt_completion", "text"):
        assert name in error.remedy


def test_ambiguous_shape_asks_for_the_format() -> None:
    record = {"text": "a", "prompt": "b", "completion": "c"}
    error = failure(record)
    assert "prompt_completion, text" in error.message
    assert "`format`" in error.remedy
    assert convert(record, format="text", origin=ORIGIN).text == "a"


TURNS = [USER, ANSWER]
SHAREGPT_TURN = {"from": "human", "value": "x"}
UNLEARNABLE: list[tuple[str, dict[str, Any], Format, str]] = [
    ("strings", {"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", "(strings: prompt"),
    ("conversational", {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "preference", "(conversational"),
    ("implicit", {"chosen": TURNS, "rejected": TURNS}, "preference", "(implicit"),
    (
        "sharegpt-pair",
        {"conversations": [SHAREGPT_TURN], "chosen": {}, "rejected": {}},
        "preference",
        "(conversational",
    ),
    ("alpaca-pair", {"instruction": "a", "chosen": "b", "rejected": "c"}, "preference", "(strings: instruction"),
    ("half-a-pair", {"prompt": "a", "completion": "b", "rejected": "c"}, "preference", "(strings"),
    ("kto-prompt", {"prompt": "a", "completion": "b", "label": False}, "kto", "verdict in label"),
    ("kto-messages", {"messages": TURNS, "label": True}, "kto", "verdict in label"),
    ("kto-csv", {"prompt": "a", "completion": "b", "label": "False"}, "kto", "verdict in label"),
    ("kto-number", {"prompt": "a", "completion": "b", "label": 0}, "kto", "verdict in label"),
    ("kto-tag", {"instruction": "a", "output": "b", "kto_tag": True}, "kto", "verdict in kto_tag"),
    ("answer", {"prompt": "a", "answer": "b"}, "prompt_answer", "(prompt, answer)"),
    ("solution", {"prompt": [USER], "solution": "b"}, "prompt_answer", "(prompt, solution)"),
]


@pytest.mark.parametrize(
    ("record", "format", "shape"), [case[1:] for case in UNLEARNABLE], ids=[c[0] for c in UNLEARNABLE]
)
def test_data_of_other_methods_is_recognised_and_refused(record: dict[str, Any], format: Format, shape: str) -> None:
    """Its rejected or unproven answers would be learned as right ones."""
    assert recognise(record, ORIGIN) == format
    assert shape in describe(record, format)
    error = failure(record)
    assert format in error.message
    assert shape in error.message


@pytest.mark.parametrize("format", ["messages", "prompt_completion", "alpaca"])
def test_naming_a_format_does_not_make_a_pair_learnable(format: Format) -> None:
    record = {"messages": TURNS, "prompt": "a", "completion": "b", "instruction": "a", "output": "b", "rejected": "c"}
    assert "rejected" in failure(record, format).message


def test_a_label_of_a_document_is_no_verdict() -> None:
    conversation = convert_auto({"text": "a document", "label": True})
    assert conversation.unused_keys == ("label",)


def test_record_of_another_shape_names_both_formats() -> None:
    record = {"messages": TURNS}
    with pytest.raises(DataError) as caught:
        require_same_format(record, format="alpaca", origin=ORIGIN, first=Origin("data.jsonl", 1))
    assert caught.value.place == "data.jsonl:7"
    assert "has the format messages" in caught.value.message
    assert "first record (data.jsonl:1) has the format alpaca" in caught.value.message
    assert "source" in caught.value.remedy
    require_same_format(record, format="messages", origin=ORIGIN, first=ORIGIN)
    require_same_format(
        {"instruction": "what it lacks is told by convert"}, format="alpaca", origin=ORIGIN, first=ORIGIN
    )


def test_record_that_fits_several_shapes_later_in_the_file() -> None:
    record = {"instruction": "a", "output": "b", "text": "c"}
    with pytest.raises(DataError, match="fits several formats"):
        require_same_format(record, format="alpaca", origin=ORIGIN, first=Origin("data.jsonl", 1))


@pytest.mark.parametrize(
    ("record", "unused"),
    [
        ({"instruction": "a", "output": "b", "id": 1, "source": "x"}, ("id", "source")),
        ({"messages": [USER, {**ANSWER, "name": "bot", "ts": 5}], "category": "c"}, ("category", "messages[].ts")),
        ({"conversations": [SHAREGPT_TURN, {"from": "gpt", "value": "y", "id": 3}]}, ("conversations[].id",)),
        ({"messages": TURNS, "conversations": []}, ("conversations",)),
        ({"prompt": "a", "completion": "b", "meta": {}}, ("meta",)),
    ],
)
def test_keys_without_a_part_are_listed(record: dict[str, Any], unused: tuple[str, ...]) -> None:
    conversation = convert_auto(record)
    assert conversation.unused_keys == unused
    assert all(key in unused_line(conversation.unused_keys) for key in unused)


def test_keys_of_a_message_are_told_apart_from_those_that_go_nowhere() -> None:
    line = unused_line(("id", "messages[].foo"))
    assert line == "not used: id; no meaning here, handed to the chat template: messages[].foo"


def test_nothing_is_said_when_every_key_has_a_part() -> None:
    assert unused_line(convert_auto({"messages": TURNS, "tools": []}).unused_keys) == ""


@pytest.mark.parametrize("record", [{"messages": TURNS}, {"prompt": [USER], "completion": [ANSWER]}])
def test_system_beside_messages_comes_first(record: dict[str, Any]) -> None:
    conversation = convert_auto({**record, "system": "S"})
    assert conversation.messages[0] == Message("system", "S")
    assert len(conversation.messages) == 3
    assert conversation.num_prompt_messages in (None, 2)


@pytest.mark.parametrize(
    "key",
    ["images", "image", "audio", "audios", "video", "videos", "weight", "loss_weight", "mask", "functions"],
)
@pytest.mark.parametrize(
    "record",
    [{"messages": TURNS}, {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}, {"text": "a"}],
    ids=["messages", "alpaca", "prompt_completion", "text"],
)
def test_key_that_would_change_the_meaning_is_refused(record: dict[str, Any], key: str) -> None:
    assert f"the key {key!r} is not supported" in failure({**record, key: [1]}).message
    for nothing in (None, [], ""):
        assert convert_auto({**record, key: nothing}).unused_keys == (key,)


MALFORMED: list[tuple[str, Format, dict[str, Any], str]] = [
    ("alpaca-no-output", "alpaca", {"instruction": "a"}, "no key 'output'"),
    ("alpaca-empty-output", "alpaca", {"instruction": "a", "output": " \n"}, "output is empty"),
    ("alpaca-number", "alpaca", {"instruction": "a", "output": 3}, "output must be a string, found int: 3"),
    ("alpaca-history", "alpaca", {"instruction": "a", "output": "b", "history": [["q"]]}, "history[0]"),
    ("sharegpt-role", "sharegpt", {"conversations": [{"from": "bot", "value": "x"}]}, "unknown role 'bot'"),
    ("sharegpt-no-value", "sharegpt", {"conversations": [{"from": "gpt"}]}, "conversations[0] has no key 'value'"),
    ("sharegpt-turn", "sharegpt", {"conversations": ["x"]}, "conversations[0] must be an object"),
    (
        "sharegpt-empty",
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": ""}]},
        "conversations[0].value is empty",
    ),
    ("messages-empty-list", "messages", {"messages": []}, "messages is an empty list"),
    ("messages-no-list", "messages", {"messages": 5}, "messages must be a list, found int"),
    ("messages-role", "messages", {"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'"),
    ("messages-null", "messages", {"messages": [{"role": "user", "content": None}]}, "found NoneType"),
    (
        "messages-empty-answer",
        "messages",
        {"messages": [USER, {**ANSWER, "content": ""}]},
        "messages[1].content is empty",
    ),
    ("messages-no-answer", "messages", {"messages": [USER]}, "no assistant turn"),
    (
        "messages-two-systems",
        "messages",
        {"messages": [{"role": "system", "content": "s"}, *[USER, ANSWER]], "system": "t"},
        "first message has the role system too",
    ),
    ("sharegpt-no-answer", "sharegpt", {"conversations": [{"from": "human", "value": "x"}]}, "no assistant turn"),
    ("sharegpt-media", "sharegpt", {"conversations": [{"from": "human", "value": "x", "images": ["a"]}]}, "images"),
    ("completion-system", "prompt_completion", {"prompt": "a", "completion": "b", "system": "s"}, "`system`"),
    ("completion-tools", "prompt_completion", {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "`tools`"),
    ("alpaca-no-question", "alpaca", {"instruction": "", "input": " ", "output": "b"}, "instruction is empty"),
    ("messages-no-json", "messages", {"messages": "x"}, "messages is not valid JSON: broken JSON at column 1"),
    ("messages-key-twice", "messages", {"messages": '[{"role": "a", "role": "b"}]'}, "'role' stands twice"),
    ("messages-number", "messages", {"messages": [USER, {**ANSWER, "content": 4}]}, "must be a string, found int: 4"),
    ("messages-object", "messages", {"messages": [USER, {**ANSWER, "content": {"a": 1}}]}, "found dict"),
    (
        "messages-function-call",
        "messages",
        {"messages": [USER, {**ANSWER, "function_call": {"a": 1}}]},
        "function_call",
    ),
    ("messages-name", "messages", {"messages": [{**USER, "name": 5}, ANSWER]}, "messages[0].name must be a string"),
    (
        "messages-image",
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "part of type text",
    ),
    ("messages-tools", "messages", {"messages": [USER, ANSWER], "tools": ["f"]}, "tools[0] must be an object"),
    ("completion-mixed", "prompt_completion", {"prompt": "a", "completion": [ANSWER]}, "found str and list"),
    ("completion-empty", "prompt_completion", {"prompt": "a", "completion": ""}, "completion is empty"),
    ("completion-no-answer", "prompt_completion", {"prompt": [USER], "completion": [USER]}, "no assistant turn"),
    ("text-empty", "text", {"text": "  "}, "text is empty"),
    ("text-surrogate", "text", {"text": "a\ud83d"}, "half of a surrogate pair at character 1"),
]


@pytest.mark.parametrize(("format", "record", "words"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED])
def test_malformed_record(format: Format, record: dict[str, Any], words: str) -> None:
    """Its place and a remedy too: `failure` looks at both."""
    error = failure(record, format)
    assert words in error.message
    assert error.place == str(ORIGIN)
    assert len(error.remedy.split()) >= 3


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, "sharegpt"),
        ({"instruction": "Hi", "output": "Hello!", "history": [["a", "b"]]}, "alpaca"),
    ],
    ids=["messages", "sharegpt", "history"],
)
def test_lists_may_be_json_text(record: dict[str, Any], format: Format) -> None:
    """A cell of a CSV file is text, whatever it holds."""
    as_text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()}
    assert recognise(as_text, ORIGIN) == format
    assert convert(as_text, format=format, origin=ORIGIN) == convert(record, format=format, origin=ORIGIN)


def test_completion_beside_messages_may_be_the_answer_as_text() -> None:
    conversation = convert_auto({"prompt": [USER], "completion": "4"})
    assert conversation.messages[-1] == Message("assistant", "4")
    assert conversation.num_prompt_messages == 1
    assert "completion is empty" in failure({"prompt": [USER], "completion": " "}, "prompt_completion").message


def test_naming_a_format_that_the_record_does_not_have_names_its_keys() -> None:
    for format in ("preference", "kto", "prompt_answer"):
        error = failure({"instruction": "a", "output": "b"}, format)
        assert error.message.endswith("its keys are 'instruction, output'")
        assert "chosen" not in error.message
    only_chosen = failure({"instruction": "a", "chosen": "b"}, "preference").message
    assert "(strings: instruction, chosen)" in only_chosen


def test_unknown_role_lists_the_known() -> None:
    assert "system, developer, user, assistant, tool" in failure({"messages": [{"role": "x", "content": ""}]}).remedy
