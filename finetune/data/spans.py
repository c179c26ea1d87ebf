"""Find the characters of a rendered conversation that the model generates, turn by turn.

A turn's span reaches from where generation begins to the end of the special token that ends the turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\nwhy\\n</think>\\n\\nHello!<|im_end|>\\n
                                                            ^------------------------------------^

The words of the turn are found by marks (`marks.py`). What generation is given is the template's generation prompt: the
text that `add_generation_prompt` adds, looked for before the turn's first words. `docs/labels.md` has the cases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.data.load import shorten
from finetune.data.marked_rendering import Context, MarkedRendering
from finetune.data.marked_turn import MarkedTurn
from finetune.data.marks import Mark, Marker, TooManyMarks, alphabet_for
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
    has_reasoning_place: bool = False
    """Of a dropped reasoning: the template shows it where the turn is the last one."""
    is_trimmed: bool = False
    """White space at the ends of its content is not learned, as the template leaves it out."""


@dataclass(frozen=True)
class Located:
    """The span of each assistant turn, or why it has none, by message; and what became of all that is around them."""

    turns: dict[int, TurnSpan | DataError]
    context: Context


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
        self._shows_last_reasoning: dict[bool, bool] = {}

    def find(self, conversation: Conversation, text: str) -> Located:
        """Returns where the answers of a rendered conversation are, and whether all that surrounds them is there."""
        place = str(conversation.origin)
        alphabet = alphabet_for(text)
        turns = turns_of(conversation)
        self._learn_template(turns)
        marked = MarkedRendering(self._template, conversation, turns, text, alphabet)
        spans: dict[int, TurnSpan | DataError] = {}
        lower = 0
        for index in (index for index, turn in enumerate(turns) if turn["role"] == "assistant"):
            try:
                if alphabet is None:
                    raise _private_characters(place)
                turn = MarkedTurn(conversation, turns, index, marked.marks_of_answer(index))
                spans[index] = span = self._locate(turn, text, lower)
            except DataError as error:
                spans[index] = error
            except TooManyMarks as error:
                spans[index] = _too_long(str(error), place)
            else:
                lower = span.end
        return Located(spans, marked.context())

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

    def _locate(self, turn: MarkedTurn, text: str, lower: int) -> TurnSpan:
        turn.require_words(text, takes_calls=self._template.takes_calls)
        content = turn.first("content")
        is_shown = turn.first("reasoning") is not None
        has_calls = turn.first("call") is not None
        first = turn.found[0].start
        prompt_end = self._prompt_end(turn, text, lower, first)
        if is_shown or has_calls:
            start = self._structured_start(turn, text, prompt_end)
        else:
            start = self._plain_start(turn, text, first, lower, prompt_end)
        is_dropped = not is_shown and turn.has("reasoning")
        return TurnSpan(
            start,
            self._turn_end_after(turn, text),
            prompt_end,
            content.start if content is not None else None,
            is_content_alone=not (is_shown or has_calls or turn.has_think_text),
            is_reasoning_dropped=is_dropped,
            is_content_dropped=content is None and turn.has("content"),
            has_reasoning_place=is_dropped and self._has_reasoning_place(is_text=turn.has_think_text),
            is_trimmed=turn.is_trimmed(text, start, content),
        )

    def _plain_start(self, turn: MarkedTurn, text: str, first: int, lower: int, prompt_end: int | None) -> int:
        """Returns where an answer of content alone begins: at its first character, or at white space before it that
        is its own, or that generation's prompt does not hold, so that the model must produce it."""
        if prompt_end is not None and not text[prompt_end:first].strip():
            return prompt_end
        at = first if prompt_end is None else prompt_end
        if self._is_own_think_block(turn, text, at, first):
            return at
        blank = turn.blank_before_content()
        for size in range(min(len(blank), first - (prompt_end or lower)), 0, -1):
            if text.endswith(blank[-size:], 0, first) and self._keeps_blank(turn, text, size):
                return first - size
        return first

    def _structured_start(self, turn: MarkedTurn, text: str, prompt_end: int | None) -> int:
        """Returns where a turn with reasoning or tool calls begins: after generation's prompt, and after an empty think
        block that stands there for reasoning that the turn has not."""
        if prompt_end is None:
            first = turn.found[0].start
            what = "calls tools" if turn.first("call") else "has reasoning"
            raise DataError(
                f"message {turn.number} {what}, and the chat template shows no generation prompt before it, so where "
                f"generation would begin is unknown; the text there is {shorten(text[max(0, first - 60) : first])}",
                place=turn.place,
                kind=f"a message {what}, and the chat template shows no generation prompt before it",
                remedy="Set `model.chat_template` to a template whose generation prompt opens the assistant's turn.",
            )
        empty = None if turn.first("reasoning") else _EMPTY_THINK.match(text, prompt_end)
        if empty is None or self._is_own_think_block(turn, text, prompt_end, empty.end()):
            return prompt_end
        return empty.end()

    def _is_own_think_block(self, turn: MarkedTurn, text: str, start: int, end: int) -> bool:
        """Tells whether an empty think block in characters [start, end) comes from the data: without it there, the
        template writes another text. Generation must produce such a block, so it is learned."""
        if not turn.has_think_text or _EMPTY_THINK.fullmatch(text, start, end) is None:
            return False
        answer = str(turn.turns[turn.index]["content"]).rpartition("</think>")[2].lstrip()
        turns = [*turn.turns]
        turns[turn.index] = {**turns[turn.index], "content": answer}
        try:
            return self._template.render(turns, tools=turn.conversation.tools, place=turn.place) != text
        except DataError:
            return True  # the template refuses the turn without the block, so it does not write one of itself

    def _has_reasoning_place(self, *, is_text: bool) -> bool:
        """Tells whether the template shows the reasoning of a last turn, given as `<think>` text or beside it."""
        if is_text not in self._shows_last_reasoning:
            apart: Turn = {"role": "assistant", "content": "y", "thinking": "r", "reasoning_content": "r"}
            inside: Turn = {"role": "assistant", "content": "<think>\nr\n</think>\n\ny"}
            marker = Marker()
            text = self._try_render([{"role": "user", "content": "x"}, marker.mark(inside if is_text else apart, 1)])
            marker.read(text or "")
            self._shows_last_reasoning[is_text] = any(item.mark.kind == "reasoning" for item in marker.found)
        return self._shows_last_reasoning[is_text]

    @property
    def has_prompt(self) -> bool:
        """Whether `add_generation_prompt` adds anything; known once a conversation was looked at."""
        return bool(self._prompts)

    def beside_prompt(self, conversation: Conversation, index: int, text: str, span: TurnSpan) -> str | None:
        """Compares generation's prompt with the text before a turn's learned words.

        Returns what the template writes after the prompt and before those words, mostly nothing; None where the text
        does not have the prompt there at all. Of a template without a generation prompt (`has_prompt`) it is what
        stands between the messages before the turn and its words.
        """
        if index == 0:
            return ""
        prompt = self._prompts[0] if self._prompts else ""
        if span.prompt_end is not None and text.endswith(prompt, 0, span.prompt_end):
            return text[span.prompt_end : span.start]
        if not prompt:
            return ""
        # The fixed prompt is not here: what this template gives for these messages costs one more rendering a record.
        try:
            rendered = self._template.render(
                turns_of(conversation)[:index],
                tools=conversation.tools,
                place=str(conversation.origin),
                add_generation_prompt=True,
            )
        except DataError:
            return ""  # it takes the messages with their answer only: there is no prompt to compare with
        return "" if text.endswith(rendered[-len(prompt) :], 0, span.start) else None

    def _prompt_end(self, turn: MarkedTurn, text: str, lower: int, upper: int) -> int | None:
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

    def _keeps_blank(self, turn: MarkedTurn, text: str, size: int) -> bool:
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

    def _turn_end_after(self, turn: MarkedTurn, text: str) -> int:
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
            kind="the chat template puts no special token after an answer",
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


def _too_long(message: str, place: str) -> DataError:
    return DataError(message, place=place, remedy="Split the conversation into shorter ones.")


def _private_characters(place: str) -> DataError:
    return DataError(
        "the conversation uses characters from all over Unicode's private planes 15 and 16, where none is left to mark "
        "its answers while they are located",
        place=place,
        remedy="Remove them from the texts.",
    )
