"""Mark the words of a conversation, so that they can be found again in the text that a template makes of them.

Each stretch that the model generates (content, reasoning, one argument of each tool call), each content that it reads,
and the name of each tool that is defined is put between two characters
that no text uses, the conversation is rendered again, and the marks are read back and taken out. Two proofs come with
it: without its marks the text must be the plain text, and what stands between two marks must be what was marked.

    content     "Hello!"            marked   "<O1>Hello!<C1>"
    rendered    <|im_start|>assistant\\n<O1>Hello!<C1><|im_end|>\\n
    read        message 1, content: characters [22, 28) of the plain text

White space at the ends stays outside the marks, since many templates strip it. A number among the arguments is marked
as a text, `"<O>5<C>"` (its quotes are taken out with the marks), and a think block inside the content by itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from finetune.data.template import REASONING_KEYS, Turn

Kind = Literal["reasoning", "opening", "content", "call", "context", "tool"]

NO_MESSAGE = -1
MAX_MARKS = 0x1000
"""Stretches that one conversation can have."""


class Alphabet:
    """The characters of the marks: one of several ranges of Unicode's private planes, of which a text uses none.

    A range has four parts, for the marks that open and close a text, and for those that open and close what stands
    there as a text only for being marked.
    """

    def __init__(self, first: int) -> None:
        self.open, self.close, self.quoted_open, self.quoted_close = (first + part * MAX_MARKS for part in range(4))
        parts = [f"[{chr(at)}-{chr(at + MAX_MARKS - 1)}]" for at in range(first, first + 4 * MAX_MARKS, MAX_MARKS)]
        self.any = re.compile("|".join(parts))
        self.in_text = re.compile(
            f'(?P<open>{parts[0]})|(?P<close>{parts[1]})|"?(?P<quoted_open>{parts[2]})|(?P<quoted_close>{parts[3]})"?'
        )


# The last two characters of a plane are no characters, so the last range of each is left out.
_ALPHABETS = tuple(Alphabet(plane + at) for plane in (0xF0000, 0x100000) for at in (0, 0x4000, 0x8000))


def alphabet_for(text: str) -> Alphabet | None:
    """Returns an alphabet that a text has no character of, None where it has some of each."""
    return next((alphabet for alphabet in _ALPHABETS if alphabet.any.search(text) is None), None)


@dataclass(frozen=True)
class Mark:
    """A marked stretch of one message."""

    message: int
    """Its index; `NO_MESSAGE` for the definition of a tool."""
    kind: Kind
    """`opening` is content before a think block inside the content, `context` the content of another role than the
    assistant, `tool` the name in a tool's definition."""
    body: str
    part: int = 0
    """Of a call: its position among the message's calls."""


@dataclass(frozen=True)
class Found:
    """A mark in the plain text: characters [start, end); a mark that is not there has no Found."""

    mark: Mark
    start: int
    end: int


class TooManyMarks(Exception):
    """A conversation has more stretches than there are marks."""


class Marker:
    """Marks the messages of one conversation and reads the marks back.

    Args:
        marks_names: mark the names of tool calls instead of their arguments, for a template whose text depends on the
            arguments' types. A name may stand in the text several times; the first counts.
    """

    def __init__(self, alphabet: Alphabet = _ALPHABETS[0], *, marks_names: bool = False) -> None:
        self.alphabet = alphabet
        self.marks_names = marks_names
        self.marks: list[Mark] = []
        """The marks made, in order."""
        self.found: list[Found] = []
        """Those that were read, by their place in the text."""
        self.broken: set[int] = set()
        """Messages of which a mark was read twice or in part."""

    def mark(self, turn: Turn, index: int) -> Turn:
        """Returns a message with its generated stretches marked; one of another role with its content marked."""
        marked = dict(turn)
        if turn["role"] != "assistant":
            content = turn["content"]
            return {**marked, "content": self._wrapped(content, Mark(index, "context", content.strip()))}
        reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
        if isinstance(reasoning, str):
            text = self._wrapped(reasoning, Mark(index, "reasoning", reasoning.strip()))
            marked |= {key: text for key in REASONING_KEYS if turn.get(key) == reasoning}
        if isinstance(turn.get("content"), str):
            marked["content"] = self._mark_content(turn["content"], index)
        if turn.get("tool_calls"):
            marked["tool_calls"] = [
                self._mark_call(call, Mark(index, "call", "", part)) for part, call in enumerate(turn["tool_calls"])
            ]
        return marked

    def mark_tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Returns the definition of a tool with its name marked; it may stand in the text several times."""
        function = tool["function"]
        name = self.enclosed(function["name"], Mark(NO_MESSAGE, "tool", function["name"]))
        return {**tool, "function": {**function, "name": name}}

    def _mark_content(self, content: str, index: int) -> str:
        before, close, answer = content.rpartition("</think>")
        if not close:
            return self._wrapped(content, Mark(index, "content", content.strip()))
        opening, think, reasoning = before.rpartition("<think>")
        return (
            self._wrapped(opening, Mark(index, "opening", opening.strip()))
            + think
            + self._wrapped(reasoning, Mark(index, "reasoning", reasoning.strip()))
            + close
            + self._wrapped(answer, Mark(index, "content", answer.strip()))
        )

    def _mark_call(self, call: Any, mark: Mark) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._mark_call(call["function"], mark)}
        key = "name" if self.marks_names else "arguments"
        return {**call, key: self._mark_value(call[key], mark)} if key in call else call

    def _mark_value(self, value: Any, mark: Mark) -> Any:
        """Marks one leaf of a value: the last text that is not blank, else the last leaf of any kind."""
        if isinstance(value, dict | list) and value:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = next((key for key in reversed(keys) if _has_text(value[key])), keys[-1])
            copy: Any = value.copy()
            copy[key] = self._mark_value(value[key], mark)
            return copy
        is_text = isinstance(value, str)
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        return self.enclosed(shown, replace(mark, body=shown), is_text=is_text)

    def _wrapped(self, text: str, mark: Mark) -> str:
        """Returns a text with its words enclosed; one of white space alone as it is."""
        body = mark.body
        if not body:
            return text
        start = text.index(body)
        return text[:start] + self.enclosed(body, mark) + text[start + len(body) :]

    def enclosed(self, body: str, mark: Mark, *, is_text: bool = True) -> str:
        """Returns a text between marks of its own, and remembers them."""
        number = len(self.marks)
        if number >= MAX_MARKS:
            raise TooManyMarks(f"the conversation has more than {MAX_MARKS} answers and tool calls")
        self.marks.append(mark)
        alphabet = self.alphabet
        first, last = (alphabet.open, alphabet.close) if is_text else (alphabet.quoted_open, alphabet.quoted_close)
        return chr(first + number) + body + chr(last + number)

    def read(self, marked: str) -> str:
        """Takes the marks out of a rendered text; returns it without them and sets `found` and `broken`."""
        pieces: list[str] = []
        opened: dict[int, int] = {}
        found: dict[int, Found] = {}
        position = length = 0
        for match in self.alphabet.in_text.finditer(marked):
            pieces.append(marked[position : match.start()])
            length += match.start() - position
            position = match.end()
            number = ord(match.group(match.lastgroup or "")) % MAX_MARKS
            mark = self.marks[number]
            is_opening = match.lastgroup in ("open", "quoted_open")
            if (number in opened) == is_opening:
                self.broken.add(mark.message)
            elif is_opening:
                opened[number] = length
            elif number not in found:
                found[number] = Found(mark, opened.pop(number), length)
            elif mark.kind == "tool" or (self.marks_names and mark.kind == "call"):
                opened.pop(number)
            else:
                self.broken.add(mark.message)
        pieces.append(marked[position:])
        self.broken |= {self.marks[number].message for number in opened}
        self.found = sorted(found.values(), key=lambda item: item.start)
        return "".join(pieces)


def writings(body: str) -> tuple[str, ...]:
    """Returns how marked words may stand in the text: as they are, or inside JSON as calls and results do."""
    return (body, json.dumps(body, ensure_ascii=False)[1:-1], json.dumps(body)[1:-1])


def _has_text(value: Any) -> bool:
    """Tells whether a text that is not blank is somewhere in a value."""
    if isinstance(value, str):
        return bool(value.strip())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_text, items))
