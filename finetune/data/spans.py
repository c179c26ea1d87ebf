"""Find one answer in rendered text by comparing it with the text of another answer; plain strings, no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

_UNUSED_CHARACTERS = [chr(code) for code in (0x30, 0x7A, 0x51, *range(0xE000, 0xE100), *range(0x4E00, 0x5200))]
"""Candidates for a probe; the first that an answer does not contain is taken, so that it differs everywhere."""


@dataclass
class AnswerSpan:
    """An answer and its end token: characters [start, end) of the text, tokens [first_token, last_token)."""

    start: int
    end: int
    first_token: int = -1
    last_token: int = -1


def probe_for(content: str) -> str:
    """Returns a text that shares no character with the content, so that it differs from it at both ends."""
    return next(char for char in _UNUSED_CHARACTERS if char not in content) * 3


def difference(text: str, other: str) -> tuple[int, int]:
    """Returns the smallest stretch [start, end) of `text` outside of which both texts are equal."""
    start = _common_prefix(text, other)
    limit = min(len(text), len(other)) - start
    end = len(text) - min(limit, _common_prefix(text[::-1], other[::-1]))
    return start, end


def _common_prefix(text: str, other: str) -> int:
    """Returns the length of the common prefix by bisection: a few block compares instead of a loop over characters."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def think_start(text: str, *, start: int, end: int, content: str, is_plain: bool) -> int | None:
    """Returns where an answer with a think block inside its content starts in the rendered text, if it can be told.

    A template either writes the block out again before the answer, or leaves it out of earlier turns. `is_plain` says
    that what differs is just the answer.
    """
    body = content.strip()
    if "</think>" not in body:
        return None
    written = text[:end].rstrip()
    if written.endswith(body):
        return len(written) - len(body)
    answer = text[start:end].strip()
    is_left_out = answer != "" and body.endswith(answer) and body[: -len(answer)].rstrip().endswith("</think>")
    return start if is_plain and is_left_out else None
