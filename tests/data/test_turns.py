"""What a message says of itself - learned or not, its parts, its reasoning - is carried over or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.chat import Renderer
from finetune.data.formats import convert
from finetune.data.record_fields import LEARNED_KEYS, WEIGHT_KEYS
from finetune.data.turns import with_reasoning_apart
from finetune.data.types import IGNORE_INDEX, ContentPart, Conversation, Message, Origin
from finetune.errors import DataError

ORIGIN = Origin("data.jsonl", 7)
USER = {"role": "user", "content": "Hi"}


def answer_of(**keys: Any) -> Message:
    turn = {"role": "assistant", "content": "Hello", **keys}
    return convert({"messages": [USER, turn]}, format="messages", origin=ORIGIN).messages[1]


def failure(**keys: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        answer_of(**keys)
    assert caught.value.place == "data.jsonl:7"
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("key", LEARNED_KEYS)
@pytest.mark.parametrize(
    ("value", "expected"), [(0, False), (1, True), (0.0, False), (1.0, True), (True, True), (None, None)]
)
def test_message_says_whether_it_is_learned(key: str, value: Any, expected: bool | None) -> None:
    message = answer_of(**{key: value})
    assert message.is_learned is expected
    assert message.extra == {}
    turn = {"from": "gpt", "value": "Hello", key: value}
    record = {"conversations": [{"from": "human", "value": "Hi"}, turn]}
    assert convert(record, format="sharegpt", origin=ORIGIN).messages[1].is_learned is expected


@pytest.mark.parametrize("key", WEIGHT_KEYS)
@pytest.mark.parametrize("value", [0.5, 2, 100, 1e-6, 1.0, 1, True])
def test_weight_says_how_much(key: str, value: float) -> None:
    message = answer_of(**{key: value}, train=True)
    assert (message.is_learned, message.weight) == (True, float(value))
    turn = {"from": "gpt", "value": "Hello", key: value}
    record = {"conversations": [{"from": "human", "value": "Hi"}, turn]}
    assert convert(record, format="sharegpt", origin=ORIGIN).messages[1].weight == value
    assert answer_of(content=[text("a", **{key: value}), text("b")], weight=3).parts == (
        ContentPart("a", True, float(value)),
        ContentPart("b", None),
    )


@pytest.mark.parametrize("key", WEIGHT_KEYS)
@pytest.mark.parametrize(
    "value",
    [
        -1,
        -0.5,
        100.5,
        1e-7,
        10**400,
        -(10**400),
        "1",
        "0.5",
        "true",
        [1],
        {},
        float("inf"),
        float("nan"),
        -float("inf"),
    ],
    ids=lambda value: str(value)[:9],
)
def test_what_is_no_weight_is_refused_by_name(key: str, value: Any) -> None:
    error = failure(**{key: value})
    assert f"messages[1].{key} must be 0, or a number from 0.000001 to 100, found" in error.message
    assert "source's `weight`" in error.remedy
    assert f"content[0].{key} must be 0, or" in failure(content=[text("x", **{key: value})]).message


@pytest.mark.parametrize("key", [key for key in LEARNED_KEYS if key not in WEIGHT_KEYS])
@pytest.mark.parametrize("value", [0.5, 2, -1, "1", "true", [1], float("nan")])
def test_other_keys_take_no_other_number(key: str, value: Any) -> None:
    error = failure(**{key: value})
    assert f"messages[1].{key} must be 0 or 1" in error.message
    assert "weight or loss_weight" in error.remedy


def test_weights_that_contradict_each_other() -> None:
    assert "weight is 0, train is 1" in failure(weight=0, train=True).message
    assert "weight is 0.5, train is 0" in failure(weight=0.5, train=False).message
    assert "weight is 1, loss_weight is 0.5" in failure(weight=1, loss_weight=0.5).message
    assert answer_of(weight=1, train=True).is_learned is True
    assert answer_of(weight=0.5, loss_weight=0.5).weight == 0.5


def test_weight_of_a_user_message_is_carried() -> None:
    messages = convert(
        {"messages": [{**USER, "train": True}, {**USER, "role": "assistant"}]}, format="messages", origin=ORIGIN
    )
    assert messages.messages[0].is_learned is True


def text(value: str, **keys: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **keys}


def test_parts_are_joined() -> None:
    message = answer_of(content=[text("a"), {"type": "text", "value": "b"}])
    assert (message.content, message.parts) == ("ab", ())


@pytest.mark.parametrize("key", LEARNED_KEYS)
def test_parts_say_whether_they_are_learned(key: str) -> None:
    message = answer_of(content=[text("a", **{key: 0}), text("b"), text("c", **{key: 1})], weight=1)
    assert message.content == "abc"
    assert message.parts == (ContentPart("a", False), ContentPart("b", None), ContentPart("c", True))
    assert message.is_learned is True


def test_parts_of_other_types() -> None:
    call = {"type": "tool_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    message = answer_of(content=[{"type": "reasoning", "value": "hm"}, text("x"), call])
    assert message.content == "x"
    assert message.extra["reasoning_content"] == message.extra["thinking"] == "hm"
    assert message.extra["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image", "image": "x.png"}, "content[0] must be a part of type text"),
        ({"type": "input_audio"}, "content[0] must be a part of type text"),
        ("x", "content[0] must be a part of type text"),
        ({"type": "text"}, "content[0] has no key 'text'"),
        ({"type": "text", "text": 3}, "content[0].text must be a string"),
        (text("x", train=0.3), "content[0].train must be 0 or 1"),
        (text("x", cache_control={"type": "ephemeral"}), "unknown key 'cache_control'"),
        ({"type": "reasoning", "value": "hm", "weight": 0}, "only text can have one"),
    ],
)
def test_wrong_parts(part: Any, words: str) -> None:
    assert words in failure(content=[part]).message


def test_parts_without_text_are_an_empty_answer() -> None:
    assert "messages[1].content is empty" in failure(content=[{"type": "reasoning", "value": "hm"}]).message
    assert "messages[1].content is empty" in failure(content=[]).message


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_each_name_that_templates_read(key: str) -> None:
    """Qwen3's template reads `reasoning_content`, that of gpt-oss `thinking`; the data may have either."""
    assert answer_of(**{key: "hm"}).extra == {"reasoning_content": "hm", "thinking": "hm"}
    assert answer_of(**{key: ""}).extra == {}


def test_reasoning_given_twice() -> None:
    assert answer_of(reasoning_content="hm", thinking="hm").extra["thinking"] == "hm"
    assert "several different reasonings" in failure(reasoning_content="a", thinking="b").message
    assert "<think>" in failure(reasoning_content="a", content="<think>b</think>c").message
    parts = [{"type": "reasoning", "value": "a"}, {"type": "text", "text": "<think>b</think>c"}]
    assert "<think>" in failure(content=parts).message


def test_reasoning_of_a_user() -> None:
    record = {"messages": [{**USER, "thinking": "hm"}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(DataError, match="only the assistant can have one"):
        convert(record, format="messages", origin=ORIGIN)


def apart(role: Any, content: str) -> Message:
    conversation = Conversation("chat", ORIGIN, (Message(role, content),))
    return with_reasoning_apart(conversation).messages[0]


def test_think_text_stays_in_the_content_until_a_template_wants_it_apart() -> None:
    content = "<think>\nhm\n</think>\n\nHello"
    assert answer_of(content=content) == Message("assistant", content)
    assert apart("assistant", content) == Message("assistant", "Hello", {"reasoning_content": "hm", "thinking": "hm"})
    assert apart("assistant", "<think>\n\n</think>\n\nHello") == Message("assistant", "Hello")


@pytest.mark.parametrize("content", ["Hello", "I wrote <think>x</think>", "<think> never closed"])
def test_text_that_is_no_think_block_is_left_alone(content: str) -> None:
    assert apart("assistant", content) == Message("assistant", content)
    assert apart("user", "<think>x</think>y") == Message("user", "<think>x</think>y")


def test_think_text_reaches_each_real_template_as_it_wants_it(real_tokenizer: Any) -> None:
    """gpt-oss has a channel of its own for reasoning; think text in its final channel would be learned as an answer."""
    turns = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}]
    conversation = convert({"messages": turns}, format="messages", origin=ORIGIN)
    renderer = Renderer(real_tokenizer)
    sample = renderer.render(conversation, loss_on="assistant")
    learned = real_tokenizer.decode(sample.labels[sample.labels != IGNORE_INDEX])
    if "<|channel|>" in real_tokenizer.chat_template:
        assert "<think>" not in learned
        assert learned.startswith("<|channel|>analysis<|message|>hm<|end|>")
    else:
        assert learned.startswith("<think>\nhm\n</think>\n\nHello")
    reference = renderer.prompt_reference(conversation)
    assert reference is not None
    assert reference.prompt_ids.tolist() == sample.input_ids[: len(reference.prompt_ids)].tolist()


@pytest.mark.parametrize(
    "key", ["images", "image", "audio", "video", "function_call", "training_detail", "train_detail"]
)
def test_message_keys_that_would_change_the_meaning(key: str) -> None:
    assert f"messages[1].{key} is not supported" in failure(**{key: [{"x": 1}]}).message
    assert key in answer_of(**{key: []}).extra
