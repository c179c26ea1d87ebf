"""Convert the turns of a record, written as messages or in the ShareGPT way, to Messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from finetune.data.record_fields import (
    LEARNED_KEYS,
    choice_of,
    empty,
    is_given,
    list_of,
    text_of,
    unknown_role,
    value_of,
    wrong,
    wrong_record,
)
from finetune.data.tool_calls import calls_of
from finetune.data.types import ContentPart, Conversation, Message, Origin, Role

ROLES: tuple[str, ...] = get_args(Role)
SHAREGPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Where data keeps an answer's reasoning."""
_TEMPLATE_REASONING_KEYS = ("reasoning_content", "thinking")
"""Where chat templates look for it; both get it, as each template reads one of them."""
_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS, *LEARNED_KEYS}
_SHAREGPT_KEYS = {"from", "value", *LEARNED_KEYS}
_PART_KEYS = {"type", "text", "value", "content", "thinking", *LEARNED_KEYS}
_REFUSED_TURN_KEYS = {
    **dict.fromkeys(("images", "image", "audio", "video"), "Remove it; only text can be trained on."),
    "function_call": "Write the call as `tool_calls`, a list with one call.",
    "training_detail": "Write the content as typed parts, each with its own `weight`.",
    "train_detail": "Write the content as typed parts, each with its own `weight`.",
}


@dataclass
class _Content:
    """What the typed parts of a message hold."""

    texts: list[ContentPart] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


def messages_of(record: dict[str, Any], key: str, origin: Origin) -> tuple[Message, ...]:
    """Returns the messages under a key.

    Raises:
        DataError: a message has an unknown role, a content that is no text, an empty answer, or a key that would change
            its meaning and is not known.
    """
    turns = list_of(record, key, origin)
    return tuple(_message_of(turn, f"{key}[{index}]", origin) for index, turn in enumerate(turns))


def sharegpt_messages_of(record: dict[str, Any], key: str, origin: Origin) -> tuple[Message, ...]:
    """Returns the ShareGPT turns under a key as messages.

    Raises:
        DataError: as `messages_of` does.
    """
    turns = list_of(record, key, origin)
    return tuple(_sharegpt_message_of(turn, f"{key}[{index}]", origin) for index, turn in enumerate(turns))


def unknown_turn_keys(record: dict[str, Any], key: str, *, is_sharegpt: bool) -> set[str]:
    """Returns the keys of the turns that have no meaning here, as `messages[].key`."""
    known = _SHAREGPT_KEYS if is_sharegpt else _MESSAGE_KEYS
    return {
        f"{key}[].{name}"
        for turn in record[key]
        for name, value in turn.items()
        if name not in known and is_given(value)
    }


def _sharegpt_message_of(turn: Any, where: str, origin: Origin) -> Message:
    if not isinstance(turn, dict):
        raise wrong(where, "an object with from and value", turn, origin)
    _refuse_keys(turn, where, origin)
    speaker = text_of(turn, "from", origin, where=where)
    role = SHAREGPT_ROLES.get(speaker)
    if role is None:
        raise unknown_role(f"{where}.from", speaker, known=tuple(SHAREGPT_ROLES), origin=origin)
    is_learned, weight = choice_of(turn, where, origin)
    if speaker == "function_call":
        calls = calls_of(value_of(turn, "value", origin, where=where), f"{where}.value", origin)
        if not calls:
            raise empty(f"{where}.value", origin)
        return Message(role, "", {"tool_calls": calls}, is_learned, weight=weight)
    value = text_of(turn, "value", origin, where=where)
    if role == "assistant" and not value.strip():
        raise empty(f"{where}.value", origin)
    return Message(role, value, is_learned=is_learned, weight=weight)


def _message_of(turn: Any, where: str, origin: Origin) -> Message:
    """Converts one message; keys that are not known go to `extra`, where a chat template may read them."""
    if not isinstance(turn, dict):
        raise wrong(where, "an object with role and content", turn, origin)
    _refuse_keys(turn, where, origin)
    role = text_of(turn, "role", origin, where=where)
    if role not in ROLES:
        raise unknown_role(f"{where}.role", role, known=ROLES, origin=origin)
    content = _content_of(turn, where, origin)
    calls = content.calls
    if is_given(turn.get("tool_calls")):
        calls = calls_of(turn["tool_calls"], f"{where}.tool_calls", origin) + calls
    if calls and role != "assistant":
        raise wrong_record(
            where,
            f"has the role {role} and calls tools; only the assistant can",
            origin,
            remedy="Give the calls to an assistant message.",
        )
    text = "".join(part.text for part in content.texts)
    if role == "assistant" and not text.strip() and not calls:
        raise empty(f"{where}.content", origin)
    parts = tuple(content.texts) if any(part.is_learned is not None for part in content.texts) else ()
    extra = _extra_of(turn, where, origin, reasoning="".join(content.reasoning), text=text)
    if calls:
        extra["tool_calls"] = calls
    is_learned, weight = choice_of(turn, where, origin)
    return Message(cast("Role", role), text, extra, is_learned, parts, weight)


def _extra_of(turn: dict[str, Any], where: str, origin: Origin, *, reasoning: str, text: str) -> dict[str, Any]:
    """Returns the template variables of a message, its reasoning under each name that templates know."""
    handled = {"role", "content", "tool_calls", *REASONING_KEYS, *LEARNED_KEYS}
    extra = {name: value for name, value in turn.items() if name not in handled and value is not None}
    for name in ("name", "tool_call_id"):
        if name in extra:
            text_of(extra, name, origin, where=where)
    found = [text_of(turn, name, origin, where=where) for name in REASONING_KEYS if is_given(turn.get(name))]
    found += [reasoning] if reasoning else []
    if not found:
        return extra
    if len(set(found)) > 1:
        raise wrong_record(
            where,
            f"has several different reasonings (in {', '.join(REASONING_KEYS)} or typed parts)",
            origin,
            remedy="Keep one of them.",
        )
    if turn["role"] != "assistant":
        raise wrong_record(
            where,
            f"has the role {turn['role']} and a reasoning; only the assistant can have one",
            origin,
            remedy="Remove it, or correct the role.",
        )
    if text.lstrip().startswith("<think>") and "</think>" in text:
        raise wrong_record(
            where,
            "has a reasoning of its own and another as <think> text in its content",
            origin,
            remedy="Keep one of them.",
        )
    return {**extra, **dict.fromkeys(_TEMPLATE_REASONING_KEYS, found[0])}


def _content_of(turn: dict[str, Any], where: str, origin: Origin) -> _Content:
    content = turn.get("content")
    if content is None and is_given(turn.get("tool_calls")):
        return _Content()
    value_of(turn, "content", origin, where=where)
    if not isinstance(content, list):
        return _Content([ContentPart(text_of(turn, "content", origin, where=where))])
    result = _Content()
    for index, part in enumerate(content):
        _add_part(result, part, f"{where}.content[{index}]", origin)
    return result


def _add_part(content: _Content, part: Any, where: str, origin: Origin) -> None:
    """Adds a typed part: `text`, `reasoning` or `thinking`, or `tool_call`; its text is under `text` or `value`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "reasoning", "thinking", "tool_call"):
        raise wrong(where, "a part of type text, reasoning, thinking or tool_call", part, origin)
    unknown = [name for name, value in part.items() if name not in _PART_KEYS and is_given(value)]
    if unknown:
        raise wrong_record(
            where,
            f"has the unknown key {unknown[0]!r}, which may change what the part means",
            origin,
            remedy=f"Remove the key; a part has type, text and one of {', '.join(LEARNED_KEYS)}.",
        )
    key = next((name for name in ("text", "value", "content", "thinking") if part.get(name) is not None), "text")
    is_learned, weight = choice_of(part, where, origin)
    if kind == "text":
        content.texts.append(ContentPart(text_of(part, key, origin, where=where), is_learned, weight))
        return
    if is_learned is not None:
        raise wrong_record(
            where,
            f"is a part of type {kind} with a choice of its own whether it is learned; only text can have one",
            origin,
            remedy="Remove the key, or set it on the whole message.",
        )
    if kind == "tool_call":
        content.calls += calls_of(value_of(part, key, origin, where=where), f"{where}.{key}", origin)
    else:
        content.reasoning.append(text_of(part, key, origin, where=where))


def _refuse_keys(turn: dict[str, Any], where: str, origin: Origin) -> None:
    for key, remedy in _REFUSED_TURN_KEYS.items():
        if is_given(turn.get(key)):
            raise wrong_record(
                f"{where}.{key}",
                "is not supported, and ignoring it would change what the message means",
                origin,
                remedy=remedy,
            )


def with_reasoning_apart(conversation: Conversation) -> Conversation:
    """Returns the conversation with the `<think>` text that answers start with taken out of them, as their reasoning.

    Whether a model wants its reasoning so depends on its chat template. So converting a record leaves the text in the
    content, and who renders it decides.
    """
    messages = tuple(_with_reasoning_apart(message) for message in conversation.messages)
    return conversation if messages == conversation.messages else replace(conversation, messages=messages)


def _with_reasoning_apart(message: Message) -> Message:
    head, mark, answer = message.content.partition("</think>")
    has_block = mark and head.lstrip().startswith("<think>")
    if message.role != "assistant" or not has_block or message.parts:
        return message
    if not answer.strip() and not message.extra.get("tool_calls"):
        return message  # nothing would be left to answer
    reasoning = head.lstrip().removeprefix("<think>").strip("\n")
    extra = {**message.extra, **dict.fromkeys(_TEMPLATE_REASONING_KEYS, reasoning)}
    return replace(message, content=answer.lstrip("\n"), extra=extra if reasoning.strip() else message.extra)
