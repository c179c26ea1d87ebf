"""Pieces of the report page: texts of values, tables of nested dicts. Everything that goes in is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_SHARE_KEY = re.compile(r"(fraction|share|fill|efficiency)$")
_LONG_NUMBER = re.compile(r"(?<![\w.])\d+\.\d{6,}(?:e-?\d+)?(?![\w.])")
_NAMES = {
    "cpu": "CPU", "cpus": "CPUs", "cuda": "CUDA", "gpu": "GPU", "gpus": "GPUs", "lora": "LoRA", "ram": "RAM",
}  # fmt: skip
_LARGEST_NESTED_ROWS = 50
_MANY_COLUMNS = 5
"""From which on a table is stacked already where there is half a screen."""


def humanize(key: str) -> str:
    """Returns a key as words, without the unit that its value will show: `peak_memory_bytes` as `Peak memory`."""
    words = "size" if key == "bytes" else key.replace("_", " ").strip()
    words = re.sub(r"^seconds to ", "time to ", words)
    words = re.sub(r"^num (?=.)| (bytes|seconds)$", "", words)
    words = " ".join(_NAMES.get(word, word) for word in words.split(" "))
    return words[:1].upper() + words[1:]


def format_value(key: str, value: object) -> str:
    """Returns a single value as text, in the unit that its key ends with; not escaped."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _format_number(key, value)
    return str(value)


def _format_number(key: str, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if key.endswith("bytes"):
        return format_bytes(value)
    if key.endswith("seconds") or key.startswith("seconds_"):
        return format_seconds(value)
    if _SHARE_KEY.search(key) and 0 <= value <= 1:
        return f"{100 * value:.3g}%"
    return format_plain(value)


def format_plain(value: float) -> str:
    """Returns a number with four significant digits, or all of them where it is whole."""
    if isinstance(value, int) or (value == round(value) and abs(value) < 1e15):
        return f"{value:,.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def round_numbers(text: str) -> str:
    """Returns a sentence with its fractions of six digits and more cut to four significant ones."""
    return _LONG_NUMBER.sub(lambda match: format_plain(float(match.group())), text)


def format_axis(value: float) -> str:
    """Returns a number short enough to stand beside an axis."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for divisor, unit, limit in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if size >= limit:
            return f"{value / divisor:.4g}{unit}"
    if size >= 1e-2:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def format_bytes(value: float) -> str:
    """Returns bytes in the largest binary unit that leaves at least 1."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(value) >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def format_seconds(value: float) -> str:
    """Returns a duration: `0.42 s`, `37 s`, `12 min 5 s`, `3 h 20 min`."""
    if value < 10:
        return f"{value:.2f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def render_value(key: str, value: Any) -> str:
    """Returns any JSON value as HTML: dicts as pairs, lists of dicts as rows, the rest as text."""
    if isinstance(value, Mapping):
        return render_pairs(value) if value else "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            return "-"
        if all(isinstance(item, Mapping) for item in value):
            return render_rows(value)
        shown = ", ".join(format_value("", item) for item in value[:_LARGEST_NESTED_ROWS])
        left_out = len(value) - _LARGEST_NESTED_ROWS
        return escape(f"{shown} and {left_out:,} more" if left_out > 0 else shown)
    return escape(format_value(key, value))


def render_pairs(pairs: Mapping[str, Any], *, caption: str = "", is_verbatim: bool = False) -> str:
    """Returns a dict as a table of two columns; nested tables take the whole width. Verbatim keys stay as they are."""
    head = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = ""
    for key, value in pairs.items():
        name = escape(str(key) if is_verbatim else humanize(str(key)))
        shown = render_value(str(key), value)
        if _is_nested(value):
            body += f'<tr><td class="wide" colspan="2"><h4>{name}</h4>{shown}</td></tr>'
        else:
            body += f'<tr><th scope="row">{name}</th><td>{shown}</td></tr>'
    return f'<table class="pairs">{head}<tbody>{body}</tbody></table>'


def render_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns dicts as a table with one column a key; of many rows the first 50 and how many are left out.

    Where there is too little room for the columns, each row becomes a block with a line a column.
    """
    keys = list(dict.fromkeys(str(key) for row in rows for key in row))
    is_number = {key: all(_is_number(row.get(key)) for row in rows) for key in keys}
    mark = {key: ' class="number"' if is_number[key] else "" for key in keys}
    head = "".join(f'<th scope="col"{mark[key]}>{escape(humanize(key))}</th>' for key in keys)
    body = "".join(
        f"<tr>{''.join(_cell(key, row.get(key), mark[key]) for key in keys)}</tr>"
        for row in rows[:_LARGEST_NESTED_ROWS]
    )
    left_out = len(rows) - _LARGEST_NESTED_ROWS
    rest = f'<p class="soft">{left_out:,} more are in report.json.</p>' if left_out > 0 else ""
    table = f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    size = " many" if len(keys) >= _MANY_COLUMNS else ""
    return f'<div class="scroll{size}">{table}</div>{rest}'


def _cell(key: str, value: Any, mark: str) -> str:
    """Returns a cell that knows its column's name, which stands before it where rows are stacked."""
    return f'<td{mark} data-name="{escape(humanize(key))}"><div>{render_value(key, value)}</div></td>'


def _is_nested(value: object) -> bool:
    """Tells whether `render_value` makes a table of the value."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping) and bool(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
