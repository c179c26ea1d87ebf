"""Recognise the shape of a record and convert it to a Conversation.

| format | keys of a record |
|---|---|
| `alpaca` | `instruction`, `output`; optional `input`, `system`, `history` (list of [question, answer]), `tools` |
| `sharegpt` | `conversations`: list of `from` (human, gpt, system, ...) and `value`; optional `system`, `tools` |
| `messages` | `messages`: list of `role` and `content`; optional `system`, `tools` |
| `prompt_completion` | `prompt` and `completion`: two strings, or messages and messages or a string; `tools` |
| `text` | `text`, or a plain text file |
| `preference` | `chosen` and `rejected`, with or without `prompt`; recognised, but not learned by `sft` |
| `kto` | an answer with `label` or `kto_tag`; recognised, but not learned by `sft` |
| `prompt_answer` | `prompt` and `answer` (GRPO); recognised, but not learned by `sft` |

A converter either returns a Conversation or raises a DataError that names the record; it never returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from finetune.data.load import Record
from finetune.data.record_fields import empty, is_given, list_of, optional_text_of, parsed, text_of, value_of, wrong
from finetune.data.shorten import shorten
from finetune.data.strict_json import JsonFault, decode
from finetune.data.tool_calls import require_defined, tools_of
from finetune.data.turns import messages_of, sharegpt_messages_of, unknown_turn_keys
from finetune.data.types import Conversation, Message, Origin
from finetune.data.unlearnable import Unlearnable, describe_unlearnable, refuse_unlearnable, unlearnable_format
from finetune.errors import DataError

Format = Literal["alpaca", "sharegpt", "messages", "prompt_completion", "text"] | Unlearnable

_SHAPES = {
    "alpaca": "alpaca (instruction, output)",
    "sharegpt": "sharegpt (conversations with from, value)",
    "messages": "messages (messages with role, content)",
    "prompt_completion": "prompt_completion (prompt, completion)",
    "text": "text (text)",
}
_USED_KEYS = {
    "alpaca": {"instruction", "input", "output", "system", "history", "tools"},
    "sharegpt": {"conversations", "messages", "system", "tools"},
    "messages": {"conversations", "messages", "system", "tools"},
    "prompt_completion": {"prompt", "completion", "system", "tools"},
    "text": {"text"},
}
_REFUSED_KEYS = {
    **dict.fromkeys(
        ("images", "image", "audio", "audios", "video", "videos"), "Remove the key; only text can be trained on."
    ),
    **dict.fromkeys(
        ("weight", "loss_weight", "sample_weight", "train", "mask"),
        "Remove the key; give single messages a `weight`, or set the source's `weight` to take all its records more "
        "or less often.",
    ),
    "functions": "Write the definitions as `tools`.",
    "chat_template_kwargs": "Remove the key; the chat template is given the same variables for every record.",
}


def recognise(record: Record, origin: Origin) -> Format:
    """Returns the format of a record by its keys; also those that `convert` refuses to learn.

    Raises:
        DataError: the keys fit no format or several.
    """
    fitting = _fitting(record)
    if len(fitting) == 1:
        return fitting[0]
    assert not isinstance(record, str)
    keys = shorten(", ".join(map(str, record)))
    if fitting:
        raise DataError(
            f"the record fits several formats ({', '.join(fitting)}); its keys are {keys}",
            place=str(origin),
            remedy=f"Set the source's `format` to one of {', '.join(fitting)}.",
            kind=f"the record fits several formats ({', '.join(fitting)})",
        )
    raise DataError(
        f"the record fits no known format; its keys are {keys}",
        place=str(origin),
        remedy="Name the columns by their role in the source's `columns`, such as {instruction: question, output: "
        f"answer}}, or rename its keys to one of these: {'; '.join(_SHAPES.values())}.",
        kind="the record fits no known format",
    )


def describe(record: Record, format: Format) -> str:
    """Returns the format's name and, where it has several shapes, the one that this record has."""
    if format in ("preference", "kto", "prompt_answer"):
        return describe_unlearnable(record, format) if isinstance(record, dict) else format
    if format == "prompt_completion" and isinstance(record, dict):
        return f"{format} ({'messages' if isinstance(record.get('prompt'), list) else 'strings'})"
    return format


def require_same_format(record: Record, *, format: Format, origin: Origin, first: Origin) -> None:
    """Raises where a record has the shape of another format than the source's first record.

    A record that fits no format is left to `convert`, which names what it lacks.

    Args:
        first: where the first record stands, which decided the format.

    Raises:
        DataError: the record has another shape.
    """
    fitting = _fitting(record)
    if not fitting or fitting == [format]:
        return
    if format in fitting:
        recognise(record, origin)
    raise DataError(
        f"the record has the format {describe(record, fitting[0])}, but the source's first record ({first}) has the "
        f"format {format}",
        place=str(origin),
        remedy="Put the records of each format into a file of their own, and name each file as a source.",
        kind=f"the record has the format {fitting[0]}, but the source's first record has the format {format}",
    )


def convert(record: Record, *, format: Format, origin: Origin) -> Conversation:
    """Returns the record as a Conversation; the keys that had no part in it are in its `unused_keys`.

    Raises:
        DataError: a key is missing, a value has the wrong type, an answer is empty, a role is unknown, no turn is the
            assistant's, a key would change the meaning and is not supported, or the format is one that supervised
            training would learn wrongly.
    """
    record = {"text": record} if isinstance(record, str) else _with_lists(record, origin)
    unlearnable = format if format in ("preference", "kto", "prompt_answer") else unlearnable_format(record)
    # With a format named by the recipe, prompts with answers are what the recipe says, the other two never are.
    if unlearnable is not None and (unlearnable == format or unlearnable != "prompt_answer"):
        refuse_unlearnable(record, unlearnable, origin)
    for key, remedy in _REFUSED_KEYS.items():
        if is_given(record.get(key)):
            raise DataError(
                f"the key {key!r} is not supported, and ignoring it would change what is learned",
                place=str(origin),
                remedy=remedy,
            )
    conversation = _CONVERTERS[format](record, origin)
    if conversation.kind == "chat":
        _require_answer(conversation)
        require_defined(conversation.messages, conversation.tools, origin)
    return conversation


def unused_line(keys: Iterable[str]) -> str:
    """Returns the line that is said once of a source whose records had keys without a part; empty for none."""
    listed = sorted(keys)
    if not listed:
        return ""
    own = [key for key in listed if "[]" not in key]
    handed = [key for key in listed if "[]" in key]
    told = [f"not used: {', '.join(own)}"] if own else []
    told += [f"no meaning here, handed to the chat template: {', '.join(handed)}"] if handed else []
    return "; ".join(told)


def _fitting(record: Record) -> list[Format]:
    if isinstance(record, str):
        return ["text"]
    unlearnable = unlearnable_format(record)
    if unlearnable in ("preference", "kto"):
        return [unlearnable]
    fitting: list[Format] = []
    if "instruction" in record and "output" in record:
        fitting.append("alpaca")
    turns_key = next((key for key in ("messages", "conversations") if key in record), None)
    if turns_key is not None:
        fitting.append("sharegpt" if _has_sharegpt_turns(record[turns_key]) else "messages")
    if "prompt" in record and "completion" in record:
        fitting.append("prompt_completion")
    if unlearnable is not None:
        fitting.append(unlearnable)
    if "text" in record:
        fitting.append("text")
    return fitting


def _has_sharegpt_turns(turns: Any) -> bool:
    if isinstance(turns, str):
        try:
            turns = decode(turns)
        except JsonFault:  # told by `convert`, with its place
            return False
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def _with_lists(record: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Returns the record with the lists of turns that are JSON text, as in a CSV file, decoded."""
    texts = {
        key: parsed(record[key], key, origin)
        for key in ("messages", "conversations", "history")
        if isinstance(record.get(key), str) and record[key].strip()
    }
    return {**record, **texts} if texts else record


def _unused(record: dict[str, Any], format: str, *, turns_key: str | None = None) -> tuple[str, ...]:
    unused = set(record) - _USED_KEYS[format]
    if turns_key is not None:
        unused |= unknown_turn_keys(record, turns_key, is_sharegpt=format == "sharegpt")
        unused |= {"conversations"} & set(record) - {turns_key}
    return tuple(sorted(unused))


def _from_alpaca(record: dict[str, Any], origin: Origin) -> Conversation:
    """The question is the instruction, followed after a blank line by the input where there is one."""
    instruction = text_of(record, "instruction", origin)
    extra_input = optional_text_of(record, "input", origin)
    messages: list[Message] = []
    for index, pair in enumerate(list_of(record, "history", origin) if is_given(record.get("history")) else []):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise wrong(f"history[{index}]", "a list of question and answer", pair, origin)
        messages += [Message("user", pair[0]), _answer(pair[1], f"history[{index}][1]", origin)]
    question = f"{instruction}\n\n{extra_input}" if extra_input.strip() else instruction
    if not question.strip():
        raise empty("instruction", origin)
    messages += [Message("user", question), _answer(text_of(record, "output", origin), "output", origin)]
    tools = tools_of(record, origin)
    with_system = _with_system(record, tuple(messages), origin)
    return Conversation("chat", origin, with_system, tools=tools, unused_keys=_unused(record, "alpaca"))


def _from_sharegpt(record: dict[str, Any], origin: Origin) -> Conversation:
    key = "messages" if _has_sharegpt_turns(record.get("messages")) else "conversations"
    messages = _with_system(record, sharegpt_messages_of(record, key, origin), origin)
    unused = _unused(record, "sharegpt", turns_key=key)
    return Conversation("chat", origin, messages, tools=tools_of(record, origin), unused_keys=unused)


def _from_messages(record: dict[str, Any], origin: Origin) -> Conversation:
    key = "conversations" if "conversations" in record and "messages" not in record else "messages"
    messages = _with_system(record, messages_of(record, key, origin), origin)
    unused = _unused(record, "messages", turns_key=key)
    return Conversation("chat", origin, messages, tools=tools_of(record, origin), unused_keys=unused)


def _with_system(record: dict[str, Any], messages: tuple[Message, ...], origin: Origin) -> tuple[Message, ...]:
    """Returns the messages after the record's own system message, where it has one."""
    system = optional_text_of(record, "system", origin)
    if not system.strip():
        return messages
    if messages[0].role in ("system", "developer"):
        raise DataError(
            f"the record has a `system` and its first message has the role {messages[0].role} too",
            place=str(origin),
            remedy="Keep one of them.",
        )
    return (Message("system", system), *messages)


def _from_prompt_completion(record: dict[str, Any], origin: Origin) -> Conversation:
    prompt, completion = value_of(record, "prompt", origin), value_of(record, "completion", origin)
    unused = _unused(record, "prompt_completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt, completion = text_of(record, "prompt", origin), text_of(record, "completion", origin)
        for name, text in (("prompt", prompt), ("completion", completion)):
            if not text.strip():
                raise empty(name, origin)
        for name in ("system", "tools"):
            if is_given(record.get(name)):
                raise DataError(
                    f"the record has `{name}`, which has no place beside a prompt and a completion that are strings",
                    place=str(origin),
                    remedy=f"Write prompt and completion as lists of messages, or remove `{name}`.",
                )
        return Conversation("completion", origin, text=prompt, completion=completion, unused_keys=unused)
    if isinstance(prompt, list) and isinstance(completion, list | str):
        before = _with_system(record, messages_of(record, "prompt", origin), origin)
        if isinstance(completion, str):
            after = (_answer(text_of(record, "completion", origin), "completion", origin),)
        else:
            after = messages_of(record, "completion", origin)
        if not any(message.role == "assistant" for message in after):
            raise DataError("completion has no assistant turn", place=str(origin), remedy="Add the answer.")
        return Conversation(
            "chat",
            origin,
            before + after,
            tools=tools_of(record, origin),
            num_prompt_messages=len(before),
            unused_keys=unused,
        )
    found = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise DataError(
        f"prompt and completion must be two strings, two lists of messages, or a list and a string, found {found}",
        place=str(origin),
        remedy="Give both in the same form; beside a list of messages the completion may be the answer as a string.",
    )


def _from_text(record: dict[str, Any], origin: Origin) -> Conversation:
    text = text_of(record, "text", origin)
    if not text.strip():
        raise empty("text", origin)
    return Conversation("text", origin, text=text, unused_keys=_unused(record, "text"))


_CONVERTERS: dict[str, Callable[[dict[str, Any], Origin], Conversation]] = {
    "alpaca": _from_alpaca,
    "sharegpt": _from_sharegpt,
    "messages": _from_messages,
    "prompt_completion": _from_prompt_completion,
    "text": _from_text,
}


def _require_answer(conversation: Conversation) -> None:
    if not any(message.role == "assistant" for message in conversation.messages):
        raise DataError(
            "the conversation has no assistant turn, so there is nothing to learn",
            place=str(conversation.origin),
            remedy="Add the answer, or remove the record.",
        )


def _answer(content: str, where: str, origin: Origin) -> Message:
    if not content.strip():
        raise empty(where, origin)
    return Message("assistant", content)
