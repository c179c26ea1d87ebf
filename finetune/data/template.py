"""Apply a tokenizer's chat template to messages, on a fixed date, and show its refusals with their place.

A template is a program of the model's maker. What it is given is brought into one shape first: the arguments of a tool
call as an object (a template that writes them as JSON would otherwise quote a string twice), reasoning under both names
that templates read. A template that can only join arguments to text gets them as JSON text instead.

A template that asks for today's date (`strftime_now`) is given one date for the whole run, so that its tokens are the
same tomorrow. This is done in the text of the template: a macro of that name at its start hides the function. No
function or environment of transformers is changed, so others who use the tokenizer see what they always saw.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from finetune.data import render_limits
from finetune.data.types import Conversation
from finetune.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, Any]
"""A message as a template sees it."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold its reasoning; the first that is there counts."""

_DIRECTIVES = "aAbBcdDefFgGhHIjmMnpPrRsStTuUVwWxXyYzZ"
_PADLESS = "deHIjmMSyY"


def prints_today(chat_template: str | dict[str, str] | None) -> bool:
    """Tells whether a template writes today's date, so that its text needs a pinned one."""
    return "strftime_now" in str(chat_template)


def turns_of(conversation: Conversation) -> list[Turn]:
    """Returns the messages as templates take them; the conversation is left as it is."""
    turns: list[Turn] = []
    for message in conversation.messages:
        turn: Turn = {"role": message.role, "content": message.content, **message.extra}
        reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
        if reasoning is not None:
            turn |= {"thinking": reasoning, "reasoning_content": reasoning}
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_with_arguments(call, _parsed) for call in turn["tool_calls"]]
        turns.append(turn)
    return turns


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text in nested lists and objects, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


class ChatTemplate:
    """A tokenizer's chat template on one date.

    Args:
        date: what a template that prints a date writes. None takes today for one that asks for it, and leaves a
            template that only has a `date_string` variable to its own default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, date: datetime.date | None = None) -> None:
        self._tokenizer = tokenizer
        self._name = f"the chat template of {tokenizer.name_or_path}" if tokenizer.name_or_path else "the chat template"
        template = str(tokenizer.chat_template)
        self._variables: dict[str, Any] = {}
        if date is not None and "date_string" in template:
            self._variables["date_string"] = date.strftime("%d %b %Y")
        prints = prints_today(template) or bool(self._variables)
        self.pinned_date = (date or datetime.date.today()) if prints else None
        """The date that rendered texts show; None where the template shows none of its own."""
        self._prelude = _clock_macro(self.pinned_date) if self.pinned_date and prints_today(template) else ""
        self._joins_arguments = False
        self.takes_calls = "tool_calls" in template
        """Whether the template can write tool calls at all."""
        self.reads_reasoning_apart = "think>" not in template and any(key in template for key in REASONING_KEYS)
        """Whether the template takes an answer's reasoning beside its content only, and knows no `<think>` text."""

    def render(
        self, turns: Sequence[Turn], *, tools: Sequence[Turn], place: str, add_generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation.

        Raises:
            DataError: the template refuses the conversation or fails on it; its own words are in the message.
            EnvironmentProblem: the template is no Jinja, or takes more time or memory than one conversation can need.
        """
        try:
            with render_limits.limited():
                text = self._apply(turns, tools, add_generation_prompt)
        except TemplateSyntaxError as error:
            raise EnvironmentProblem(
                f"{self._name} is not valid Jinja: {error.message}",
                place=f"line {error.lineno} of the template",
                remedy="Correct the template, or set `model.chat_template` to another.",
            ) from error
        except render_limits.RenderingTooLong as error:
            raise self._endless(f"did not end within {render_limits.MAX_SECONDS:g} s", place) from error
        except MemoryError as error:
            raise self._endless(f"took more than {render_limits.MAX_BYTES >> 30} GiB of memory", place) from error
        # What programs of others fail with on data that they do not take; `raise_exception` is a TemplateError.
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise DataError(
                f"the chat template refuses this conversation: {kind}{error}",
                place=place,
                remedy=_refusal_remedy(turns),
            ) from error
        if len(text) > render_limits.MAX_CHARACTERS:
            raise self._endless(f"made a text of {len(text):,} characters", place)
        return text

    def _endless(self, what: str, place: str) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{self._name} {what} on one record",
            place=place,
            remedy="Correct the template (`model.chat_template` names another), or remove the record.",
        )

    def _apply(self, turns: Sequence[Turn], tools: Sequence[Turn], add_generation_prompt: bool) -> str:
        has_calls = any(turn.get("tool_calls") for turn in turns)
        if has_calls and self._joins_arguments:
            turns = [_with_argument_texts(turn) for turn in turns]
        try:
            return self._apply_once(turns, tools, add_generation_prompt)
        except TypeError:
            if not has_calls or self._joins_arguments:
                raise
            text = self._apply_once([_with_argument_texts(turn) for turn in turns], tools, add_generation_prompt)
            self._joins_arguments = True
            return text

    def _apply_once(self, turns: Sequence[Turn], tools: Sequence[Turn], add_generation_prompt: bool) -> str:
        template = None
        if self._prelude:
            template = self._prelude + self._tokenizer.get_chat_template(None, list(tools) or None)
        return self._tokenizer.apply_chat_template(
            list(turns),
            tools=list(tools) or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )  # type: ignore[return-value]


def _refusal_remedy(turns: Sequence[Turn]) -> str:
    """Returns what to change in a conversation that the template refuses."""
    remedy = "Change the roles or contents to what the model's template takes, or set `model.chat_template`."
    for number, turn in enumerate(turns, start=1):
        if turn.get("tool_calls") and turn.get("thinking") and str(turn.get("content") or "").strip():
            both = f"Message {number} has content and reasoning beside tool calls, of which gpt-oss takes one only"
            return f"{both}: keep one, or join them.\n{remedy}"
    return remedy


def _with_argument_texts(turn: Turn) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    return {**turn, "tool_calls": [_with_arguments(call, _as_json) for call in turn["tool_calls"]]}


def _with_arguments(call: Any, convert: Any) -> Any:
    """Returns a tool call with its arguments converted, in either of the two shapes that calls come in."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call


def _parsed(arguments: Any) -> Any:
    """Returns arguments given as JSON text as the object that the text means; any other text stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _clock_macro(date: datetime.date) -> str:
    """Returns Jinja text that defines `strftime_now(format)` as the start of one day."""
    moment = datetime.datetime.combine(date, datetime.time())
    codes = [f"%{letter}" for letter in _DIRECTIVES] + [f"%-{letter}" for letter in _PADLESS]
    values = {code: moment.strftime(code) for code in codes}
    values |= {f"%-{letter}": re.sub(r"^0+(?=\d)", "", values[f"%{letter}"]) for letter in _PADLESS}
    replacements = "".join(f"|replace({json.dumps(code)}, {json.dumps(value)})" for code, value in values.items())
    body = f"{{{{- format|replace('%%', '\\0'){replacements}|replace('\\0', '%') -}}}}"
    return "{%- macro strftime_now(format) -%}" + body + "{%- endmacro -%}"
