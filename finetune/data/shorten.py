"""Show a value inside a message."""

from __future__ import annotations

_SHOWN_CHARACTERS = 80


def shorten(value: object) -> str:
    """Returns the value as one printable line of at most 80 characters, for messages."""
    # Only the start is needed, and making the whole of a long text printable would take as long as reading it.
    short = value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str | bytes | list) else value
    shown = ascii(short).replace("\n", " ")
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
