"""Find the characters of a rendered conversation that the model generates, turn by turn.

A turn's span reaches from where generation begins to the end of the special token that ends the turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\nwhy\\n</think>\\n\\nHello!<|im_end|>\\n
                                                            ^------------------------------------^

The words of the turn are found by marks (`marks.py`). What generation is given is the template's generation prompt: the
text that `add_generation_prompt` adds, looked for before the turn's first words. `docs/labels.md` has the cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from finetune.data.load import shorten
from finetune.data.marks import Alphabet, Found, Mark, Marker, TooManyMarks, alphabet_for
from finetune.data.template import ChatTemplate, Turn, turns_of
from finetune.data.types import Conversation
from finetune.errors import DataError

_EMPTY_THINK = re.compile(r"\s*(?:<(\w+)>\s*</\1>|\[(\w+)\]\s*\[/\2\])\s*")
_THINK = r"[\w-]*(?:think|thought|reason)[\w-]*"
_THINK_PREFILL = re.compile(rf"[<\[]{_THINK}[>\]]\s*(?:[<\[]/{_THINK}[>\]]\s*)?$", re.IGNORECASE)

_TAIL_CHARACTERS = 24
"""How much of a prompt must be the same to tell its end, where it does not end with a special token."""


@dataclass
class AnswerSpan:
    """A stretch of a turn: characters [start, end) of the text, tokens [first_token, last_token)."""

    start: int
    end: int
    is_learned: bool = True
    first_token: int = -1
    last_token: int = -1
    weight: float = 1.0


@dataclass(frozen=True)
class TurnSpan:
    """One assistant turn in the text: characters [start, end), end token included.

    `content_start` is where the first character of its content that is not white space stands, None where no content is
    shown; `is_content_alone` tells that the turn has nothing but content. `prompt_end` is where generation's prompt
    ends, None where the text does not show it.
    """

    start: int
    end: int
    prompt_end: int | None
    content_start: int | None
    is_content_alone: bool
    is_reasoning_dropped: bool
    is_content_dropped: bool


class TurnFinder:
    """Finds the assistant's turns in what one template renders; holds what is the same for all conversations.

    Args:
        special: matches one special token of the tokenizer.
        eos_token: the tokenizer's end token, where it has one.
    """

    def __init__(self, template: ChatTemplate, *, special: re.Pattern[str], eos_token: str | None) -> None:
        self._template = template
        self._end = re.compile(rf"\s*({special.pattern})")
        self._run = re.compile(rf"(?:{special.pattern})(?:\s*(?:{special.pattern}))*")
        self._special = special
        self._eos_token = eos_token
        self._prompts: tuple[str, ...] | None = None
        self._turn_end: str | None = None

    def find(self, conversation: Conversation, text: str) -> dict[int, TurnSpan | DataError]:
        """Returns the span of each assistant turn of a rendered conversation, or why it has none, by message."""
        place = str(conversation.origin)
        answers = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        alphabet = alphabet_for(text)
        if alphabet is None:
            return dict.fromkeys(answers, _private_characters(place))
        turns = turns_of(conversation)
        self._learn_template(turns)
        try:
            together = self._mark(conversation, turns, text, Marker(alphabet), answers)
            spans: dict[int, TurnSpan | DataError] = {}
            lower = 0
            for index in answers:
                marker = together or self._mark_alone(conversation, turns, text, alphabet, index)
                try:
                    spans[index] = span = self._locate(_Turn(conversation, turns, index, marker), text, lower)
                except DataError as error:
                    spans[index] = error
                else:
                    lower = span.end
        except TooManyMarks as error:
            return dict.fromkeys(answers, _too_long(str(error), place))
        return spans

    def _mark(
        self, conversation: Conversation, turns: Sequence[Turn], text: str, marker: Marker, answers: Collection[int]
    ) -> Marker | None:
        """Renders with some messages marked; None where the template fails on the marks or writes another text."""
        marked = [marker.mark(turn, index) if index in answers else turn for index, turn in enumerate(turns)]
        try:
            rendered = self._template.render(marked, tools=conversation.tools, place=str(conversation.origin))
        except DataError:
            return None
        return marker if marker.read(rendered) == text else None

    def _mark_alone(
        self, conversation: Conversation, turns: Sequence[Turn], text: str, alphabet: Alphabet, index: int
    ) -> Marker | None:
        """Marks one message, for a template that does not take the marks of another; then only its calls' names."""
        for marker in (Marker(alphabet), Marker(alphabet, marks_names=True)):
            if self._mark(conversation, turns, text, marker, [index]) is not None:
                return marker
        return None

    def as_generated(self, conversation: Conversation, text: str, span: TurnSpan) -> tuple[str, TurnSpan]:
        """Returns the text and span of a conversation's last turn after exactly what generation would be given.

        That is mostly the text itself. It differs where a template writes earlier turns otherwise once the last one is
        there: gpt-oss drops the reasoning before tool calls then, which generation still sees.
        """
        index = len(conversation.messages) - 1
        if span.prompt_end is None or index == 0:
            return text, span
        turns, place = turns_of(conversation)[:index], str(conversation.origin)
        try:
            prompt = self._template.render(turns, tools=conversation.tools, place=place, add_generation_prompt=True)
        except DataError:
            return text, span
        shown = text[: span.prompt_end]
        # A prompt that opens a think block, which the turn does not show, is no prompt of this text.
        border = len(self._prompts[0]) if self._prompts else _TAIL_CHARACTERS
        if prompt == shown or not prompt.endswith(shown[-border:]):
            return text, span
        shift = len(prompt) - len(shown)
        content_start = None if span.content_start is None else span.content_start + shift
        moved = replace(
            span,
            start=span.start + shift,
            end=span.end + shift,
            prompt_end=len(prompt),
            content_start=content_start,
        )
        return prompt + text[len(shown) :], moved

    # One turn

    def _locate(self, turn: _Turn, text: str, lower: int) -> TurnSpan:
        turn.require_words(text)
        content = turn.first("content")
        is_shown = turn.first("reasoning") is not None
        has_calls = turn.first("call") is not None
        first = turn.found[0].start
        prompt_end = self._prompt_end(turn, text, lower, first)
        if is_shown or has_calls:
            start = self._structured_start(turn, text, prompt_end)
        else:
            start = self._plain_start(turn, text, first, lower, prompt_end)
        return TurnSpan(
            start,
            self._turn_end_after(turn, text),
            prompt_end,
            content.start if content is not None else None,
            is_content_alone=not (is_shown or has_calls),
            is_reasoning_dropped=not is_shown and turn.has("reasoning"),
            is_content_dropped=content is None and turn.has("content"),
        )

    def _plain_start(self, turn: _Turn, text: str, first: int, lower: int, prompt_end: int | None) -> int:
        """Returns where an answer of content alone begins: at its first character, or at white space before it that
        is its own, or that generation's prompt does not hold, so that the model must produce it."""
        if prompt_end is not None and not text[prompt_end:first].strip():
            return prompt_end
        blank = turn.blank_before_content()
        for size in range(min(len(blank), first - (prompt_end or lower)), 0, -1):
            if text.endswith(blank[-size:], 0, first) and self._keeps_blank(turn, text, size):
                return first - size
        return first

    def _structured_start(self, turn: _Turn, text: str, prompt_end: int | None) -> int:
        """Returns where a turn with reasoning or tool calls begins: after generation's prompt, and after an empty think
        block that stands there for reasoning that the turn has not."""
        if prompt_end is None:
            first = turn.found[0].start
            what = "calls tools" if turn.first("call") else "has reasoning"
            raise DataError(
                f"message {turn.number} {what}, and the chat template shows no generation prompt before it, so where "
                f"generation would begin is unknown; the text there is {shorten(text[max(0, first - 60) : first])}",
                place=turn.place,
                remedy="Set `model.chat_template` to a template whose generation prompt opens the assistant's turn.",
            )
        empty = None if turn.first("reasoning") else _EMPTY_THINK.match(text, prompt_end)
        return empty.end() if empty is not None else prompt_end

    def _prompt_end(self, turn: _Turn, text: str, lower: int, upper: int) -> int | None:
        """Returns where the generation prompt of a turn ends, which lies between two characters of the text."""
        for prompt in self._prompts or ():
            at = text.rfind(prompt, lower, upper)
            if at >= 0:
                return at + len(prompt)
        # No prompt of fixed text, or not here: what generation would be given is rendered. Where the template writes
        # earlier turns otherwise than in the whole conversation, its end still tells where the prompt ends.
        if turn.index == 0:
            return None
        try:
            rendered = self._template.render(
                turn.turns[: turn.index],
                tools=turn.conversation.tools,
                place=turn.place,
                add_generation_prompt=True,
            )
        except DataError:
            return None
        if lower <= len(rendered) <= upper and text.startswith(rendered):
            return len(rendered)
        last_token = max((token.start() for token in self._special.finditer(rendered)), default=len(rendered))
        for tail in (rendered[-_TAIL_CHARACTERS:], rendered[last_token:]):
            at = text.rfind(tail, 0, upper) if tail else -1
            if at >= 0 and at + len(tail) >= lower:
                return at + len(tail)
        return None

    def _keeps_blank(self, turn: _Turn, text: str, size: int) -> bool:
        """Tells whether the template keeps so much of the white space before an answer, by marking it too."""
        content = str(turn.turns[turn.index]["content"])
        start, end = len(turn.blank_before_content()) - size, len(content.rstrip())
        marker = Marker(turn.alphabet)
        enclosed = marker.enclosed(content[start:end], Mark(turn.index, "content", content[start:end]))
        marked = [*turn.turns]
        marked[turn.index] = {**marked[turn.index], "content": content[:start] + enclosed + content[end:]}
        try:
            rendered = self._template.render(marked, tools=turn.conversation.tools, place=turn.place)
        except DataError:
            return False
        return marker.read(rendered) == text

    def _turn_end_after(self, turn: _Turn, text: str) -> int:
        """Returns the end of the special token that ends a turn."""
        last = turn.found[-1]
        if last.mark.kind == "content":
            match = self._end.match(text, last.end)
            if match is not None:
                return match.end()
        else:
            # Closing marks may stand before it; of neighbouring special tokens it is the one that ends other turns.
            run = self._run.search(text, last.end)
            if run is not None:
                tokens = list(self._special.finditer(text, run.start(), run.end()))
                known = [token for token in tokens if token.group() in (self._turn_end, self._eos_token)]
                # After a name alone, the first special token may be one of the call's own.
                if known or not turn.marks_names:
                    return (known or tokens)[0].end()
        raise DataError(
            f"the chat template puts no special token after message {turn.number}, so the model would never learn "
            f"to stop; the text there is {shorten(text[last.end : last.end + 40])}",
            place=turn.place,
            remedy="Set `model.chat_template` to a template that ends each answer with an end-of-turn token.",
        )

    # The template

    def _learn_template(self, turns: Sequence[Turn]) -> None:
        """Finds the generation prompt and the token that ends a plain turn, once."""
        if self._prompts is not None:
            return
        question: Turn = {"role": "user", "content": "x"}
        first = next((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), 0)
        prompt = None
        for prefix in ([question], list(turns[:first])):
            prompt = self._added_prompt(prefix) if prefix and prompt is None else prompt
        self._prompts = ()
        if prompt:
            # Some prompts open or skip a think block, which the text of an earlier turn does not have.
            self._prompts = tuple(dict.fromkeys(part for part in (prompt, _THINK_PREFILL.sub("", prompt)) if part))
        marker = Marker()
        answer = marker.mark({"role": "assistant", "content": "y"}, 1)
        text = self._try_render([question, answer])
        if text is not None:
            plain = marker.read(text)
            end = self._end.match(plain, marker.found[0].end) if marker.found else None
            self._turn_end = end.group(1) if end is not None else None

    def _added_prompt(self, turns: Sequence[Turn]) -> str | None:
        """Returns what `add_generation_prompt` adds; some templates end the text otherwise without it."""
        without, with_prompt = self._try_render(turns), self._try_render(turns, add_generation_prompt=True)
        if without is None or with_prompt is None:
            return None
        differing = (index for index, pair in enumerate(zip(without, with_prompt, strict=False)) if pair[0] != pair[1])
        start = next(differing, min(len(without), len(with_prompt)))
        tokens = self._special.finditer(with_prompt)
        start = next((token.start() for token in tokens if token.start() < start < token.end()), start)
        return with_prompt[start:] if not self._special.sub("", without[start:]).strip() else None

    def _try_render(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str | None:
        """Renders a conversation that the template may refuse, which then tells nothing."""
        try:
            return self._template.render(turns, tools=(), place="", add_generation_prompt=add_generation_prompt)
        except DataError:
            return None


class _Turn:
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

    def has(self, kind: str) -> bool:
        return any(mark.kind == kind for mark in self.marks)

    def first(self, kind: str) -> Found | None:
        return next((item for item in self.found if item.mark.kind == kind), None)

    def blank_before_content(self) -> str:
        content = str(self.turns[self.index].get("content") or "")
        return "" if "</think>" in content else content[: len(content) - len(content.lstrip())]

    def changed(self) -> DataError:
        """The error of a turn whose words do not come out as they went in."""
        message = self.conversation.messages[self.index]
        said = message.content or message.extra.get("tool_calls") or ""
        return DataError(
            f"the chat template changes or leaves out message {self.number}: {shorten(said)}",
            place=self.place,
            remedy="Change the message to what the template keeps, or set `model.chat_template`.",
        )

    def require_words(self, text: str) -> None:
        """Raises unless the turn's words stand in the text as they are, tool calls without exception.

        Left out may be reasoning, and content beside tool calls; both are counted.
        """
        if not self.marks:
            raise DataError(
                f"message {self.number} has no words: no content, reasoning or tool call",
                place=self.place,
                remedy="Fill it, or remove it from the record.",
            )
        shown = [item.mark for item in self.found]
        for mark in self.marks:
            if mark.kind == "call" and mark not in shown:
                raise DataError(
                    f"the chat template leaves out tool call {mark.part + 1} of message {self.number}",
                    place=self.place,
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
    if mark.kind != "call":
        return (mark.body,)
    return (mark.body, json.dumps(mark.body, ensure_ascii=False)[1:-1], json.dumps(mark.body)[1:-1])


def _too_long(message: str, place: str) -> DataError:
    return DataError(message, place=place, remedy="Split the conversation into shorter ones.")


def _private_characters(place: str) -> DataError:
    return DataError(
        "the conversation uses characters from all over Unicode's private planes 15 and 16, where none is left to mark "
        "its answers while they are located",
        place=place,
        remedy="Remove them from the texts.",
    )
