"""Show a value inside a message."""

from __future__ import annotations

import json

_SHOWN_CHARACTERS = 80


def shorten(value: object) -> str:
    """Returns the value as one printable line of at most 80 characters, for messages."""
    # Only the start is needed, and making the whole of a long text printable would take as long as reading it.
    short = value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str | bytes | list) else value
    return _cut(ascii(short).replace("\n", " "))


def shorten_record(record: object) -> str:
    """Returns the beginning of a record as JSON text, at most 80 characters; what JSON lacks (dates) as a string."""
    short = record[: _SHOWN_CHARACTERS + 1] if isinstance(record, str | list) else record
    return _cut(json.dumps(short, default=str))


def shorten_line(line: str) -> str:
    """Returns the beginning of a line as it stands, at most 80 characters."""
    return _cut(line[: _SHOWN_CHARACTERS + 1])


def _cut(shown: str) -> str:
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
