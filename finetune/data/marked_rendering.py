"""Render one conversation again with marks, and prove with them that what surrounds the answers is in the text.

One rendering marks everything: the answers, the other messages, the names of the tools that are defined. Where the
template does not take that (it looks at how a content begins, say), answers and context are marked apart, then each
message alone. What takes no mark at all is searched in the text between its marked neighbours, in order, so that the
words of one message inside another do not count for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.data.marks import MAX_MARKS, Alphabet, Found, Marker, TooManyMarks, writings
from finetune.data.shorten import shorten
from finetune.data.template import ChatTemplate, Turn
from finetune.data.types import Conversation, Message
from finetune.errors import DataError

LEFT_OUT = "left out by the chat template"
"""Kind of the fault."""


@dataclass(frozen=True)
class Context:
    """What the template did to the messages that are not the assistant's, and to the definitions of tools."""

    fault: DataError | None = None
    """The first message, or the tool of a conversation that calls tools, that is not in the text as it is."""
    hides_tools: bool = False
    """Tools are defined, none is called, and the text does not name each of them."""


class MarkedRendering:
    """The marked renderings of one conversation, of which `text` is the plain one; each is made when it is needed.

    Args:
        alphabet: None where the text leaves no characters for marks.
    """

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        turns: Sequence[Turn],
        text: str,
        alphabet: Alphabet | None,
    ) -> None:
        self._template = template
        self._conversation = conversation
        self._turns = turns
        self._text = text
        self._alphabet = alphabet
        self._too_many: TooManyMarks | None = None
        self._is_answer = [turn["role"] == "assistant" for turn in turns]

    def marks_of_answer(self, index: int) -> Marker | None:
        """Returns the marks of a rendering that one answer is marked in; None where the template takes none.

        Raises:
            TooManyMarks: the conversation has more stretches than there are marks.
        """
        together = self._together or self._answers
        if together is not None:
            return together
        if self._too_many is not None:
            raise self._too_many
        alone = self._mark([index])
        return alone if alone is not None else self._mark([index], marks_names=True)

    def context(self) -> Context:
        """Looks for each message that is not the assistant's, and for the names of the tools."""
        faults: dict[int, DataError | None] = {}
        unmarked: list[int] = []
        for index, message in enumerate(self._conversation.messages):
            if self._is_answer[index] or not message.content.strip():
                continue
            marker = self._marks_of_context(index)
            if marker is None:
                unmarked.append(index)
            else:
                faults[index] = self._fault_by_marks(index, message, marker)
        faults |= self._faults_by_search(unmarked)
        fault = next((faults[index] for index in sorted(faults) if faults[index] is not None), None)
        hidden = self._hidden_tools()
        if hidden and any(turn.get("tool_calls") for turn in self._turns):
            fault = fault or self._tool_left_out(hidden[0])
            hidden = []
        return Context(fault, bool(hidden))

    # Renderings

    @cached_property
    def _together(self) -> Marker | None:
        """The marks of everything; None where the template does not take them, or there are too many."""
        return self._try_mark(range(len(self._turns)))

    @cached_property
    def _answers(self) -> Marker | None:
        try:
            return self._mark([index for index, is_answer in enumerate(self._is_answer) if is_answer])
        except TooManyMarks as error:
            self._too_many = error
            return None

    @cached_property
    def _others(self) -> Marker | None:
        """The marks of all but the answers."""
        if self._together is not None:
            return self._together
        return self._try_mark([index for index, is_answer in enumerate(self._is_answer) if not is_answer])

    @cached_property
    def _tools(self) -> Marker | None:
        return self._others if self._others is not None else self._try_mark([])

    def _marks_of_context(self, index: int) -> Marker | None:
        if self._others is not None or self._is_answer.count(False) > MAX_MARKS:
            return self._others  # of so many messages none is marked alone, which would take a rendering each
        return self._mark([index])

    def _try_mark(self, messages: Collection[int], *, marks_tools: bool = True) -> Marker | None:
        try:
            return self._mark(messages, marks_tools=marks_tools)
        except TooManyMarks:
            return None  # what is not marked is proved one by one, or searched

    def _mark(
        self, messages: Collection[int], *, marks_names: bool = False, marks_tools: bool = False
    ) -> Marker | None:
        """Renders with some messages marked; None where the template fails on the marks or writes another text."""
        if self._alphabet is None:
            return None
        marker = Marker(self._alphabet, marks_names=marks_names)
        turns = [marker.mark(turn, index) if index in messages else turn for index, turn in enumerate(self._turns)]
        tools: Sequence[Any] = self._conversation.tools
        if marks_tools and tools:
            tools = [marker.mark_tool(tool) for tool in tools]
        try:
            rendered = self._template.render(turns, tools=tools, place=str(self._conversation.origin))
        except DataError:
            return None  # it took the plain text, so it fails on the marks
        return marker if marker.read(rendered) == self._text else None

    # Messages

    def _fault_by_marks(self, index: int, message: Message, marker: Marker) -> DataError | None:
        found = [item for item in marker.found if item.mark.message == index]
        if index not in marker.broken and not found:
            return self._left_out(index, message, "")
        is_changed = any(self._text[item.start : item.end] not in writings(item.mark.body) for item in found)
        return self._left_out(index, message, "the exact words of ") if is_changed or index in marker.broken else None

    def _faults_by_search(self, unmarked: Sequence[int]) -> dict[int, DataError | None]:
        """Searches messages between those before and after them that are known; an empty list costs nothing."""
        faults: dict[int, DataError | None] = {}
        known = self._known() if unmarked else {}
        for index in unmarked:
            message = self._conversation.messages[index]
            lower = max((item[1] for other, item in known.items() if other < index), default=0)
            upper = min((item[0] for other, item in known.items() if other > index), default=len(self._text))
            for words in writings(message.content.strip()):
                at = self._text.find(words, lower, upper)
                if at >= 0:
                    known[index] = (at, at + len(words))
                    break
            else:
                faults[index] = self._left_out(index, message, "the exact words of ")
        return faults

    def _known(self) -> dict[int, tuple[int, int]]:
        """Returns the characters [start, end) that the marks found of each message reach over."""
        known: dict[int, tuple[int, int]] = {}
        for item in self._all_found():
            start, end = known.get(item.mark.message, (item.start, item.end))
            known[item.mark.message] = (min(start, item.start), max(end, item.end))
        return known

    def _all_found(self) -> list[Found]:
        found: list[Found] = []
        for index in range(len(self._turns)):
            try:
                marker = self.marks_of_answer(index) if self._is_answer[index] else self._marks_of_context(index)
            except TooManyMarks:
                continue
            found += [item for item in marker.found if item.mark.message == index] if marker is not None else []
        return found

    def _left_out(self, index: int, message: Message, what: str) -> DataError:
        remedy = "Set `model.chat_template` to a template that writes it as it is, or remove the message."
        if message.role == "developer":
            remedy = f"Give it the role system, if the template writes that one. {remedy}"
        elif message.role == "system":
            remedy = f"Move its text into the first question. {remedy}"
        return DataError(
            f"{LEFT_OUT}: {what}message {index + 1} ({message.role}), {shorten(message.content)}",
            place=str(self._conversation.origin),
            kind=LEFT_OUT,
            remedy=remedy,
        )

    # Tools

    def _hidden_tools(self) -> list[str]:
        """Returns the names of the tools that the text does not show outside the messages."""
        names = [str(tool["function"]["name"]) for tool in self._conversation.tools]
        if not names:
            return []
        if self._tools is not None:
            shown = {item.mark.body for item in self._tools.found if item.mark.kind == "tool"}
            return [name for name in names if name not in shown]
        between: list[str] = []
        position = 0
        for start, end in sorted(self._known().values()):
            between.append(self._text[position:start])
            position = max(position, end)
        around = "\n".join([*between, self._text[position:]])
        return [name for name in names if name not in around]

    def _tool_left_out(self, name: str) -> DataError:
        return DataError(
            f"{LEFT_OUT}: the definition of the tool {shorten(name)}, in a record that calls tools",
            place=str(self._conversation.origin),
            kind=f"{LEFT_OUT}: the definition of a tool, in a record that calls tools",
            remedy="Set `model.chat_template` to a template that writes the definitions of tools, or remove `tools` "
            "from the record.",
        )
