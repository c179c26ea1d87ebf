"""The order of the roles in a conversation: what is usual, and what chat templates drop, join or misread.

Usual is an optional system message, then questions and answers in turn; between a question and its answer may stand
calls of tools and their results, any number of each. A template takes most other orders without a word, and what the
model then learns (an answer to an answer, an instruction that is not there) is seldom what was meant. That each message
stands in the rendered text is proved for any order (`marked_rendering.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finetune.console import ordinal
from finetune.data.types import Conversation, Message
from finetune.errors import DataError

_SYSTEM = ("system", "developer")


def require_order(conversation: Conversation) -> None:
    """Raises where the roles stand in an unusual order.

    Raises:
        DataError: a message stands where it should not; the first such one is named.
    """
    for index, what, remedy in _out_of_order(conversation.messages):
        raise DataError(
            f"roles out of order: the {ordinal(index + 1)} message ({conversation.messages[index].role}) {what}",
            place=str(conversation.origin),
            kind=f"roles out of order: a message ({conversation.messages[index].role}) {what}",
            remedy=f"{remedy}, or set `data.role_order` to any to take each order that the chat template takes.",
        )


def _out_of_order(messages: Sequence[Message]) -> Iterator[tuple[int, str, str]]:
    """Yields the messages that stand where they should not: index, what is wrong, remedy."""
    previous: Message | None = None
    for index, message in enumerate(messages):
        role = message.role
        before = None if previous is None else previous.role
        if role in _SYSTEM and index > 0:
            yield (
                index,
                "must come first, as many chat templates leave it out elsewhere",
                "Move the late system message to the start, or join it with the first one",
            )
        elif role == "tool" and not (before == "tool" or (previous is not None and _calls_tools(previous))):
            yield (
                index,
                "follows no tool call",
                "Put the tool result right after the assistant message with the `tool_calls` that it answers",
            )
        elif role == "user" and before == "user":
            yield index, "follows another question", "Join the two questions, or add the answer between them"
        elif role == "assistant" and (before is None or before in _SYSTEM):
            yield index, "answers no question", "Add the question before the answer, or remove the answer"
        elif role == before == "assistant" and not (_calls_tools(message) or (previous and _calls_tools(previous))):
            yield index, "follows another answer", "Join the two answers, or add the question between them"
        previous = message


def _calls_tools(message: Message) -> bool:
    return bool(message.extra.get("tool_calls"))
