"""One assistant turn with its marks, and what of its words a chat template must write."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.data.load import shorten
from finetune.data.marks import Found, Mark, Marker, writings
from finetune.data.template import Turn
from finetune.data.types import Conversation
from finetune.errors import DataError


class MarkedTurn:
    """One assistant turn, its marks, and those of them that are in the text."""

    def __init__(self, conversation: Conversation, turns: Sequence[Turn], index: int, marker: Marker | None) -> None:
        """`marker` is None where the template did not take the marks."""
        self.conversation = conversation
        self.turns = turns
        self.index = index
        self.number = index + 1
        self.place = str(conversation.origin)
        if marker is None or index in marker.broken:
            raise self.changed()
        self.alphabet = marker.alphabet
        self.marks_names = marker.marks_names
        self.marks = [mark for mark in marker.marks if mark.message == index]
        self.found = [item for item in marker.found if item.mark.message == index]
        self.has_think_text = "</think>" in str(turns[index].get("content") or "")

    def has(self, kind: str) -> bool:
        return any(mark.kind == kind for mark in self.marks)

    def first(self, kind: str) -> Found | None:
        return next((item for item in self.found if item.mark.kind == kind), None)

    def blank_before_content(self) -> str:
        content = str(self.turns[self.index].get("content") or "")
        return "" if "</think>" in content else content[: len(content) - len(content.lstrip())]

    def is_trimmed(self, text: str, start: int, content: Found | None) -> bool:
        """Tells whether white space at the ends of the content is not in what is learned from `start` on."""
        said = str(self.turns[self.index].get("content") or "")
        before, after = self.blank_before_content(), said[len(said.rstrip()) :]
        if content is None or not (before or after):
            return False
        has_before = start <= content.start - len(before) and text.endswith(before, 0, content.start)
        return not (has_before and text.startswith(after, content.end))

    def changed(self) -> DataError:
        """The error of a turn whose words do not come out as they went in."""
        message = self.conversation.messages[self.index]
        said = message.content or message.extra.get("tool_calls") or ""
        return DataError(
            f"the chat template changes or leaves out message {self.number}: {shorten(said)}",
            place=self.place,
            kind="the chat template changes or leaves out an answer",
            remedy="Change the message to what the template keeps, or set `model.chat_template`.",
        )

    def require_words(self, text: str, *, takes_calls: bool) -> None:
        """Raises unless the turn's words stand in the text as they are, tool calls without exception.

        Left out may be reasoning, and content beside tool calls; both are counted.
        """
        if not self.marks:
            raise DataError(
                f"message {self.number} has no words: no content, reasoning or tool call",
                place=self.place,
                kind="a message has no words",
                remedy="Fill it, or remove it from the record.",
            )
        if self.has("call") and not takes_calls:
            raise DataError(
                f"this chat template has no place for tool calls, and message {self.number} calls tools",
                place=self.place,
                kind="this chat template has no place for tool calls",
                remedy="Set `model.chat_template` to a template that writes tool calls, or write the call as content.",
            )
        shown = [item.mark for item in self.found]
        for mark in self.marks:
            if mark.kind == "call" and mark not in shown:
                raise DataError(
                    f"the chat template leaves out tool call {mark.part + 1} of message {self.number}",
                    place=self.place,
                    kind="the chat template leaves out one of several tool calls",
                    remedy="Split the calls into several turns, each with its answer, or set `model.chat_template`.",
                )
        is_content_needed = not self.has("call")
        if (is_content_needed and self.has("content") and self.first("content") is None) or not self.found:
            raise self.changed()
        if self.has("opening") and self.first("opening") is None:
            raise self.changed()
        if any(text[item.start : item.end] not in _writings(item.mark) for item in self.found):
            raise self.changed()


def _writings(mark: Mark) -> tuple[str, ...]:
    """Returns how a marked stretch may stand in the text: as it is, or inside JSON where it is an argument."""
    return writings(mark.body) if mark.kind == "call" else (mark.body,)
