"""Decode JSON and refuse what Python's decoder would take in silence or fail on without a place.

Refused are `NaN` and `Infinity` (no JSON), numbers too large for a float or so small that they would become 0, an
object with the same key twice (the first value would vanish), half of a surrogate pair in any text or key (it cannot be
encoded), and integers too long to read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isinf
from typing import Any, NoReturn

from finetune.data.shorten import shorten


class JsonFault(ValueError):
    """Text that is no JSON, or JSON that is refused.

    Args:
        problem: what is wrong.
        position: index of the character where it is, where the decoder tells.
        kind: the problem without the value found; the problem itself where it shows none.
        remedy: what to do about JSON that is refused; empty for text that is no JSON.
    """

    def __init__(self, problem: str, position: int | None = None, *, kind: str = "", remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.position = position
        self.kind = kind or (problem if position is None else f"broken JSON: {problem}")
        self.remedy = remedy

    def shown(self, text: str) -> str:
        """Returns the problem with its column and the text around it."""
        if self.position is None:
            return self.problem
        column = self.position - text.rfind("\n", 0, self.position)
        around = text[max(0, self.position - 20) : self.position + 40]
        return f"broken JSON at column {column}: {self.problem}, near {shorten(around)}"


def decode(text: str) -> Any:
    """Returns the one JSON value that the text is.

    Raises:
        JsonFault: the text is not exactly one value, or the value is refused.
    """
    start = skip_space(text, 0)
    value, end = decode_at(text, start)
    end = skip_space(text, end)
    if end < len(text):
        raise JsonFault("Extra data", end)
    return value


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that starts at a character, and the index after it.

    Raises:
        JsonFault: there is no value, or it is refused.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except JsonFault:
        raise
    except json.JSONDecodeError as error:
        raise JsonFault(error.msg, error.pos) from error
    except RecursionError as error:
        raise JsonFault("JSON nested too deeply", remedy="Nest the record less deeply, or remove it.") from error
    # Text decoded from UTF-8 holds no surrogate, so one can only come from an escape; others need no walk.
    if text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0:
        _refuse_surrogates(value, "")
    return value, end


def skip_space(text: str, position: int) -> int:
    """Returns the index of the first character from `position` on that is no JSON white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _refuse_surrogates(value: Any, where: str) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            at = f"{where or 'the text'} holds half of a surrogate pair at character {error.start}"
            raise JsonFault(
                f"{at}: {shorten(value[error.start :])}",
                kind="a text holds half of a surrogate pair",
                remedy="Write the file again with whole characters; the text was cut inside an escaped one.",
            ) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key, f"the key {shorten(key)}")
            _refuse_surrogates(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_surrogates(item, f"{where}[{index}]")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise JsonFault(
            f"the key {shorten(twice)} stands twice in one object, and only one value could be kept",
            kind="a key stands twice in one object, and only one value could be kept",
            remedy="Keep one of the two, or give one another key.",
        )
    return result


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise JsonFault(
            f"the number {shorten(text)} is too large for a float",
            kind="a number is too large for a float",
            remedy="Write a number up to 1.7e308, or write it as a string.",
        )
    if number == 0 and text.lower().partition("e")[0].strip("-.0"):
        raise JsonFault(
            f"the number {shorten(text)} is too small for a float and would become 0",
            kind="a number is too small for a float and would become 0",
            remedy="Write 0 if that is meant, or write the number as a string.",
        )
    return number


def _readable(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:  # Python's limit on the digits of an integer
        raise JsonFault(
            f"the integer {shorten(text)} has too many digits to be read ({len(text.lstrip('-')):,})",
            kind="an integer has too many digits to be read",
            remedy="Write the number as a string, or remove the key.",
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise JsonFault(f"{name} is no JSON value", remedy="Write null or a number in its place, or leave the key out.")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_readable, parse_constant=_refuse_constant
)
