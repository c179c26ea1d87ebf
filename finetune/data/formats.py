"""Recognise the shape of a record and convert it to a Conversation.

| format | keys of a record |
|---|---|
| `alpaca` | `instruction`, `output`; optional `input`, `system`, `history` (list of [question, answer]) |
| `sharegpt` | `conversations`: list of `from` (human, gpt, system) and `value`; optional `system` |
| `messages` | `messages`: list of `role` and `content`; optional `tools` |
| `prompt_completion` | `prompt` and `completion`, both strings or both lists of messages |
| `text` | `text`, or a plain text file |

A converter either returns a Conversation or raises a DataError that names the record; it never returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from finetune.data.load import Record, shorten
from finetune.data.types import Conversation, Message, Origin, Role
from finetune.errors import DataError

Format = Literal["alpaca", "sharegpt", "messages", "prompt_completion", "text"]

_SHAPES: dict[Format, str] = {
    "alpaca": "alpaca (instruction, output)",
    "sharegpt": "sharegpt (conversations with from, value)",
    "messages": "messages (messages with role, content)",
    "prompt_completion": "prompt_completion (prompt, completion)",
    "text": "text (text)",
}
_ROLES: tuple[str, ...] = get_args(Role)
_SHAREGPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_WEIGHT_KEYS = ("weight", "train")


def recognise(record: Record, origin: Origin) -> Format:
    """Returns the format of a record by its keys.

    Raises:
        DataError: the keys fit no format or several, or the record is preference data, whose rejected answers must
            not be learned as if they were right.
    """
    if isinstance(record, str):
        return "text"
    _refuse_preference_data(record, origin)
    fitting: list[Format] = []
    if "instruction" in record and "output" in record:
        fitting.append("alpaca")
    turns_key = next((key for key in ("messages", "conversations") if key in record), None)
    if turns_key is not None:
        fitting.append("sharegpt" if _has_sharegpt_turns(record[turns_key]) else "messages")
    if "prompt" in record and "completion" in record:
        fitting.append("prompt_completion")
    if "text" in record:
        fitting.append("text")
    if len(fitting) == 1:
        return fitting[0]
    keys = shorten(", ".join(map(str, record)))
    if fitting:
        raise DataError(
            f"the record fits several formats ({', '.join(fitting)}); its keys are {keys}",
            place=str(origin),
            remedy=f"Set the source's `format` to one of {', '.join(fitting)}.",
        )
    raise DataError(
        f"the record fits no known format; its keys are {keys}",
        place=str(origin),
        remedy=f"Rename its keys to one of these: {'; '.join(_SHAPES.values())}.",
    )


def convert(record: Record, *, format: Format, origin: Origin) -> Conversation:
    """Returns the record as a Conversation.

    Raises:
        DataError: a key is missing, a value has the wrong type, an answer is empty, a role is unknown, no turn is the
            assistant's, or the roles stand in an order that templates drop or misread.
    """
    if isinstance(record, str):
        record = {"text": record}
    _refuse_preference_data(record, origin)
    conversation = _CONVERTERS[format](record, origin)
    if conversation.kind == "chat":
        _require_order(conversation)
    return conversation


def _refuse_preference_data(record: dict[str, Any], origin: Origin) -> None:
    marks = [key for key in ("chosen", "rejected", "kto_tag") if key in record]
    if isinstance(record.get("label"), bool):
        marks.append("label")
    if marks:
        raise DataError(
            f"this is preference data (keys {', '.join(marks)}), which supervised training would learn wrongly",
            place=str(origin),
            remedy="Keep only the wanted answers and store them as messages or as prompt and completion.",
        )


def _has_sharegpt_turns(turns: Any) -> bool:
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def _from_alpaca(record: dict[str, Any], origin: Origin) -> Conversation:
    """The question is the instruction, followed after a blank line by the input where there is one."""
    instruction = _text_of(record, "instruction", origin)
    extra_input = _optional_text_of(record, "input", origin)
    system = _optional_text_of(record, "system", origin)
    messages = [Message("system", system)] if system.strip() else []
    for index, pair in enumerate(_list_of(record, "history", origin) if record.get("history") else []):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise _wrong(f"history[{index}]", "a list of question and answer", pair, origin)
        messages += [Message("user", pair[0]), _answer(pair[1], f"history[{index}][1]", origin)]
    question = f"{instruction}\n\n{extra_input}" if extra_input.strip() else instruction
    messages += [Message("user", question), _answer(_text_of(record, "output", origin), "output", origin)]
    return Conversation("chat", origin, tuple(messages))


def _from_sharegpt(record: dict[str, Any], origin: Origin) -> Conversation:
    key = "conversations" if "conversations" in record else "messages"
    system = _optional_text_of(record, "system", origin)
    messages = [Message("system", system)] if system.strip() else []
    for index, turn in enumerate(_list_of(record, key, origin)):
        where = f"{key}[{index}]"
        if not isinstance(turn, dict):
            raise _wrong(where, "an object with from and value", turn, origin)
        speaker = _text_of(turn, "from", origin, where=where)
        role = _SHAREGPT_ROLES.get(speaker)
        if role is None:
            raise _unknown_role(f"{where}.from", speaker, known=tuple(_SHAREGPT_ROLES), origin=origin)
        value = _text_of(turn, "value", origin, where=where)
        _refuse_weights(turn, where, origin)
        messages.append(_answer(value, f"{where}.value", origin) if role == "assistant" else Message(role, value))
    return Conversation("chat", origin, tuple(messages))


def _from_messages(record: dict[str, Any], origin: Origin) -> Conversation:
    key = "conversations" if "conversations" in record and "messages" not in record else "messages"
    return Conversation("chat", origin, _messages_of(record, key, origin), tools=_tools_of(record, origin))


def _from_prompt_completion(record: dict[str, Any], origin: Origin) -> Conversation:
    prompt, completion = _value_of(record, "prompt", origin), _value_of(record, "completion", origin)
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt, completion = _text_of(record, "prompt", origin), _text_of(record, "completion", origin)
        for name, text in (("prompt", prompt), ("completion", completion)):
            if not text.strip():
                raise _empty(name, origin)
        return Conversation("completion", origin, text=prompt, completion=completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages_of(record, "prompt", origin), _messages_of(record, "completion", origin)
        if not any(message.role == "assistant" for message in after):
            raise DataError("completion has no assistant turn", place=str(origin), remedy="Add the answer.")
        tools = _tools_of(record, origin)
        return Conversation("chat", origin, before + after, tools=tools, num_prompt_messages=len(before))
    found = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise DataError(
        f"prompt and completion must be two strings or two lists of messages, found {found}",
        place=str(origin),
        remedy="Give both in the same form.",
    )


def _from_text(record: dict[str, Any], origin: Origin) -> Conversation:
    text = _text_of(record, "text", origin)
    if not text.strip():
        raise _empty("text", origin)
    return Conversation("text", origin, text=text)


_CONVERTERS: dict[Format, Callable[[dict[str, Any], Origin], Conversation]] = {
    "alpaca": _from_alpaca,
    "sharegpt": _from_sharegpt,
    "messages": _from_messages,
    "prompt_completion": _from_prompt_completion,
    "text": _from_text,
}


def _messages_of(record: dict[str, Any], key: str, origin: Origin) -> tuple[Message, ...]:
    return tuple(
        _message_of(turn, f"{key}[{index}]", origin) for index, turn in enumerate(_list_of(record, key, origin))
    )


def _message_of(turn: Any, where: str, origin: Origin) -> Message:
    """Converts one message; keys beside role and content go to `extra` unless they are null."""
    if not isinstance(turn, dict):
        raise _wrong(where, "an object with role and content", turn, origin)
    role = _text_of(turn, "role", origin, where=where)
    if role not in _ROLES:
        raise _unknown_role(f"{where}.role", role, known=_ROLES, origin=origin)
    _refuse_weights(turn, where, origin)
    extra = {name: value for name, value in turn.items() if name not in ("role", "content") and value is not None}
    if extra.get("tool_calls") and turn.get("content") is None:
        return Message(cast("Role", role), "", extra)
    content = _content_of(turn, where, origin)
    if role == "assistant" and not content.strip() and not extra.get("tool_calls"):
        raise _empty(f"{where}.content", origin)
    return Message(cast("Role", role), content, extra)


def _content_of(turn: dict[str, Any], where: str, origin: Origin) -> str:
    content = _value_of(turn, "content", origin, where=where)
    if not isinstance(content, list):
        return _text_of(turn, "content", origin, where=where)
    parts = []
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _wrong(f"{where}.content[{index}]", "a part of type text", part, origin)
        parts.append(_text_of(part, "text", origin, where=f"{where}.content[{index}]"))
    return "".join(parts)


def _tools_of(record: dict[str, Any], origin: Origin) -> tuple[dict[str, Any], ...]:
    if not record.get("tools"):
        return ()
    tools = _list_of(record, "tools", origin)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _wrong(f"tools[{index}]", "an object", tool, origin)
    return tuple(tools)


def _refuse_weights(turn: dict[str, Any], where: str, origin: Origin) -> None:
    for key in _WEIGHT_KEYS:
        if turn.get(key) is not None:
            raise DataError(
                f"{where}.{key}: weights of single messages are not supported, and ignoring them would change what "
                "is learned",
                place=str(origin),
                remedy="Remove the key, and choose the turns that are learned with `data.loss_on`.",
            )


def _require_order(conversation: Conversation) -> None:
    """Raises where the roles stand in an order that chat templates drop or misread."""
    previous: Message | None = None
    for index, message in enumerate(conversation.messages):
        if message.role in ("system", "developer") and index > 0:
            raise DataError(
                f"message {index + 1} has the role {message.role}, which must come first: many chat templates leave "
                "it out elsewhere",
                place=str(conversation.origin),
                remedy="Move it to the start, or join it with the first system message.",
            )
        if message.role == "tool" and not (
            previous is not None and (previous.role == "tool" or previous.extra.get("tool_calls"))
        ):
            raise DataError(
                f"message {index + 1} has the role tool but follows no tool call",
                place=str(conversation.origin),
                remedy="Put it right after the assistant message with the `tool_calls` that it answers.",
            )
        previous = message
    if not any(message.role == "assistant" for message in conversation.messages):
        raise DataError(
            "the conversation has no assistant turn, so there is nothing to learn",
            place=str(conversation.origin),
            remedy="Add the answer, or remove the record.",
        )


def _answer(content: str, where: str, origin: Origin) -> Message:
    if not content.strip():
        raise _empty(where, origin)
    return Message("assistant", content)


def _value_of(record: dict[str, Any], key: str, origin: Origin, *, where: str = "") -> Any:
    if key not in record:
        found = shorten(", ".join(map(str, record)))
        raise DataError(
            f"{where or 'the record'} has no key {key!r}; its keys are {found}",
            place=str(origin),
            remedy=f"Add {key!r}, or set the source's `format` to what the file holds.",
        )
    return record[key]


def _text_of(record: dict[str, Any], key: str, origin: Origin, *, where: str = "") -> str:
    value = _value_of(record, key, origin, where=where)
    name = f"{where}.{key}" if where else key
    if not isinstance(value, str):
        raise _wrong(name, "a string", value, origin)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} holds half of a surrogate pair at character {error.start}: {shorten(value[error.start :])}",
            place=str(origin),
            remedy="Write the file again with whole characters; the text was cut inside an escaped one.",
        ) from error
    return value


def _optional_text_of(record: dict[str, Any], key: str, origin: Origin) -> str:
    return "" if record.get(key) is None else _text_of(record, key, origin)


def _list_of(record: dict[str, Any], key: str, origin: Origin) -> list[Any]:
    value = _value_of(record, key, origin)
    if not isinstance(value, list):
        raise _wrong(key, "a list", value, origin)
    if not value:
        raise DataError(f"{key} is an empty list", place=str(origin), remedy="Fill it, or remove the record.")
    return value


def _wrong(name: str, expected: str, value: Any, origin: Origin) -> DataError:
    return DataError(
        f"{name} must be {expected}, found {type(value).__name__}: {shorten(value)}",
        place=str(origin),
        remedy=f"Correct {name} in this record.",
    )


def _empty(name: str, origin: Origin) -> DataError:
    return DataError(f"{name} is empty", place=str(origin), remedy="Fill it, or remove the record.")


def _unknown_role(name: str, role: str, *, known: tuple[str, ...], origin: Origin) -> DataError:
    return DataError(
        f"{name}: unknown role {shorten(role)}", place=str(origin), remedy=f"Use one of: {', '.join(known)}."
    )
