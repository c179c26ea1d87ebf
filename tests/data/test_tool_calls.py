"""Tool definitions and calls come out in one form whatever form they were written in; wrong ones are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.data.formats import convert
from finetune.data.types import Conversation, Origin
from finetune.errors import DataError

ORIGIN = Origin("data.jsonl", 7)
DEFINITION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": None, "b": [1]}}}


def conversation_of(calls: Any, tools: Any = None, **keys: Any) -> Conversation:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls, **keys},
        {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "y"},
    ]
    return convert({"messages": messages, "tools": tools}, format="messages", origin=ORIGIN)


def failure(calls: Any, tools: Any = None, **keys: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        conversation_of(calls, tools, **keys)
    assert caught.value.place == "data.jsonl:7"
    assert caught.value.remedy
    return caught.value


def with_arguments(arguments: Any) -> list[Any]:
    return [{**CALL, "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        with_arguments('{"a": null, "b": [1]}'),
        json.dumps([CALL]),
        [{"id": "c1", "name": "f", "arguments": {"a": None, "b": [1]}}],
    ],
    ids=["object", "string", "all-a-string", "flat"],
)
def test_calls_in_one_form(calls: Any) -> None:
    """A string would be encoded a second time by the templates of gpt-oss and Llama 3.1."""
    messages = conversation_of(calls).messages
    assert messages[1].extra == {"tool_calls": [CALL]}
    assert messages[2].extra == {"tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_call_without_arguments(arguments: Any) -> None:
    (call,) = conversation_of(with_arguments(arguments)).messages[1].extra["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "tools",
    [[DEFINITION], json.dumps([DEFINITION]), [DEFINITION["function"]], json.dumps([DEFINITION["function"]])],
    ids=["list", "string", "flat", "flat-string"],
)
def test_definitions_in_one_form(tools: Any) -> None:
    conversation = conversation_of([CALL], tools)
    assert conversation.tools == (DEFINITION,)
    assert not conversation.calls_undefined_tools


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_calls_without_any_definition_are_taken_and_told(tools: Any) -> None:
    conversation = conversation_of([CALL], tools)
    assert conversation.tools == ()
    assert conversation.calls_undefined_tools


def test_call_of_a_tool_that_is_not_defined() -> None:
    error = failure([CALL], [{**DEFINITION, "function": {"name": "g"}}])
    assert "the 2nd message calls the tool 'f', which `tools` does not define; it defines 'g'" in error.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"a": 1', "messages[1].tool_calls[0].function.arguments is not valid JSON: broken JSON at column"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ("[1]", "arguments must be an object, or a JSON string of one, found list"),
        (5, "found int: 5"),
    ],
)
def test_wrong_arguments(arguments: Any, words: str) -> None:
    assert words in failure(with_arguments(arguments)).message


@pytest.mark.parametrize(
    ("calls", "tools", "words"),
    [
        ([5], None, "messages[1].tool_calls[0] must be an object"),
        ([{"function": {"arguments": {}}}], None, "messages[1].tool_calls[0].function has no key 'name'"),
        ([{"function": "f"}], None, "messages[1].tool_calls[0].function must be an object"),
        ([CALL], [5], "tools[0] must be an object"),
        ([CALL], "[", "tools is not valid JSON"),
        ([CALL], {"name": "f"}, "tools must be a list of definitions"),
        ([CALL], [{"description": "x"}], "tools[0] has no key 'name'"),
        ([CALL], [DEFINITION, DEFINITION], "tools[1] defines 'f' a second time"),
    ],
)
def test_wrong_calls_and_definitions(calls: Any, tools: Any, words: str) -> None:
    assert words in failure(calls, tools).message


def test_only_the_assistant_calls() -> None:
    assert "has the role user and calls tools" in failure([CALL], role="user", content="x").message


def test_an_empty_list_of_calls_is_none() -> None:
    record = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": []}]}
    assert convert(record, format="messages", origin=ORIGIN).messages[1].extra == {}


def test_sharegpt_calls_and_results() -> None:
    turns = [
        {"from": "human", "value": "x"},
        {
            "from": "function_call",
            "value": '[{"name": "f", "arguments": "{\\"a\\": 1}"}, {"name": "f", "arguments": {}}]',
        },
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "y"},
    ]
    record = {"conversations": turns, "tools": json.dumps([DEFINITION])}
    conversation = convert(record, format="sharegpt", origin=ORIGIN)
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    calls = conversation.messages[1].extra["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {}]
    assert conversation.tools == (DEFINITION,)
    turns[1]["value"] = "not json"
    with pytest.raises(DataError, match=r"conversations\[1\]\.value is not valid JSON"):
        convert(record, format="sharegpt", origin=ORIGIN)


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ({"name": "f", "input": {"a": 1}}, "input"),
        ({"function": {"name": "f", "args": {"a": 1}}}, "args"),
        ({"type": "function", "function": {"name": "f"}, "arguments": {"a": 1}}, "arguments"),
        ({"name": "f", "arguments": {}, "parameters": {"a": 1}}, "parameters"),
    ],
    ids=["input", "args", "beside the function", "both"],
)
def test_arguments_under_another_name_are_not_lost(call: dict[str, Any], key: str) -> None:
    """They were left out in silence, and a call without arguments was learned."""
    error = failure([call])
    assert f"`{key}`" in error.message
    assert error.place == "data.jsonl:7"
    assert "arguments" in error.remedy


def test_llamas_spelling_of_arguments() -> None:
    for call in ({"name": "f", "parameters": {"a": 1}}, {"function": {"name": "f", "parameters": '{"a": 1}'}}):
        assert conversation_of([call]).messages[1].extra["tool_calls"][0]["function"] == {
            "name": "f",
            "arguments": {"a": 1},
        }
