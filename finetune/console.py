"""What the user reads: plain lines, tables and errors.

Text goes to stdout, or to stderr under `--json`, where stdout holds one JSON object and nothing else. Warnings and
errors always go to stderr. Colour appears on a terminal only, and never under `NO_COLOR`. Nothing is cut or read
as markup, and only what holds no path is wrapped (`prose`), so that paths and messages can be copied and searched for.

On a terminal that shows both streams, warnings go out through the stream of people's text, so that a live view at the
bottom of the screen stays below them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TextIO

import rich.console
from rich.cells import cell_len
from rich.text import Text

from finetune.errors import FinetuneError, Interrupted

Cell = str | int | float
Say = Callable[[str], None]
"""Takes one line for people, such as `Console.line`."""
PLAIN_WIDTH = 80
"""Columns assumed where the output is no terminal."""
_KEPT_STDOUT: ContextVar[TextIO | None] = ContextVar("kept_stdout", default=None)
"""Where results go while `KeptStdout` sends all else that is written to stdout to stderr."""

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of writing
    "\u200b\u2060-\u2064\ufeff"  # what has no width; not the joiners U+200C and U+200D, which scripts and emoji use
    "\u2028\u2029\ud800-\udfff]"  # line and paragraph separators; halves of characters, which no encoding has
)


class Console:
    """Writes for people, and the one JSON object for programs.

    Args:
        is_json: people's text goes to stderr, and `result` may be called once.
        is_plain: no live view, also on a terminal.
    """

    def __init__(self, *, is_json: bool = False, is_plain: bool = False) -> None:
        self.is_json = is_json
        self._is_plain = is_plain
        self._error_stream = _rich_console(is_stderr=True)
        self._stream = self._error_stream if is_json else _rich_console(is_stderr=False)

    @property
    def is_terminal(self) -> bool:
        """Says whether people's text goes to a terminal."""
        return self._stream.is_terminal

    @property
    def can_redraw(self) -> bool:
        """Says whether a live view may be drawn: on a real terminal, unless lines were asked for.

        `TERM=dumb` cannot move its cursor, and who sets `NO_COLOR` or asks for `--json` reads lines.
        """
        is_terminal = self._stream.is_interactive and self._stream.file.isatty()
        return is_terminal and not (self._is_plain or self.is_json or os.environ.get("NO_COLOR"))

    @property
    def rich(self) -> rich.console.Console:
        """The stream of people's text, for a live view."""
        return self._stream

    def line(self, text: str = "", *, style: str = "") -> None:
        """Prints text as it is."""
        _print(self._stream, Text(visible(text), style=style))

    def prose(self, text: str, *, indent: int = 8) -> None:
        """Prints text, on a terminal with its lines broken between words, those that follow `indent` columns in."""
        for line in self._broken(text, indent):
            self.line(line)

    def _broken(self, text: str, indent: int) -> list[str]:
        if not self._stream.is_terminal or self._width() <= 2 * indent:
            return [text]
        return textwrap.wrap(
            text,
            self._width(),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        ) or [""]

    @property
    def has_color(self) -> bool:
        """Says whether people's text may be coloured."""
        return self._stream.color_system is not None and not self._stream.no_color

    def spans(self, spans: Sequence[tuple[str, str]]) -> None:
        """Prints stretches of text as they are, each in a style of its own: `(text, style)`."""
        _print(self._stream, Text.assemble(*((visible(text), style) for text, style in spans)))

    def note(self, text: str) -> None:
        """Prints something worth knowing that needs no action."""
        _print(self._stream, Text.assemble(("note: ", "cyan"), visible(text)))

    def warning(self, text: str) -> None:
        """Prints something that the user may want to change."""
        both_on_screen = self._stream.is_terminal and self._error_stream.is_terminal
        stream = self._stream if both_on_screen else self._error_stream
        _print(stream, Text.assemble(("warning: ", "bold yellow"), visible(text)))

    def error(self, error: FinetuneError) -> None:
        """Prints an error: place and message, then the remedy; several remedies one a line, each behind a dash.

        What the user stopped is no error, and is told as `stopped: `, with the place behind the message.
        """
        if isinstance(error, Interrupted):
            said = error.message.removeprefix("stopped").strip() or "as you asked"
            place = f" ({error.place})" if error.place else ""
            _print(self._error_stream, Text.assemble(("stopped: ", "bold yellow"), visible(said + place)))
        else:
            head = f"{error.place}: {error.message}" if error.place else error.message
            _print(self._error_stream, Text.assemble(("error: ", "bold red"), visible(head)))
        remedies = error.remedy.split("\n")
        shown = error.remedy if len(remedies) == 1 else "".join(f"\n  - {remedy}" for remedy in remedies)
        _print(self._error_stream, Text.assemble(("remedy:", "bold green"), " " * (len(remedies) == 1), visible(shown)))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Prints rows under column names, numbers to the right.

        A table wider than the terminal (80 columns where there is none) becomes one block a row, a line a column.
        """
        texts = [[visible(_text(cell)) for cell in row] for row in rows]
        widths = [max(cell_len(cell) for cell in column) for column in zip(columns, *texts, strict=True)]
        if title:
            self.line(title, style="bold")
        if sum(widths) + 2 * (len(widths) - 1) > self._width():
            self._blocks(columns, texts)
            return
        is_number = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
        self.line(_aligned(columns, widths, is_number), style="dim")
        for row in texts:
            self.line(_aligned(row, widths, is_number))

    def result(self, values: Mapping[str, object]) -> None:
        """Prints the JSON object of `--json` on stdout, on one line; without `--json` prints nothing.

        JSON has no NaN and no infinity: such a number becomes null.
        """
        if self.is_json:
            stream = _KEPT_STDOUT.get() or sys.stdout
            stream.write(json.dumps(_json_values(values), allow_nan=False, default=str) + "\n")
            stream.flush()

    def _width(self) -> int:
        return self._stream.width if self._stream.is_terminal else PLAIN_WIDTH

    def _blocks(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        label_width = max(cell_len(column) for column in columns)
        for index, row in enumerate(rows):
            if index:
                self.line()
            for column, cell in zip(columns, row, strict=True):
                self.line(f"{_padded(column, label_width)}  {cell}".rstrip())


class KeptStdout:
    """Keeps stdout for `Console.result`: what libraries, trackers or processes started meanwhile write goes to stderr.

    That holds for `sys.stdout` and for the file descriptor below it, which native code and other processes write to.
    """

    def __init__(self) -> None:
        self._stdout = sys.stdout
        self._is_real = _descriptor_of(sys.stdout) == 1
        results: TextIO = sys.stdout
        if self._is_real:
            sys.stdout.flush()
            self._kept = os.dup(1)
            results = os.fdopen(self._kept, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._token = _KEPT_STDOUT.set(results)

    def give_back(self) -> None:
        """Puts stdout back as it was, for who goes on in the same process."""
        _KEPT_STDOUT.reset(self._token)
        sys.stdout = self._stdout
        if self._is_real:
            self._stdout.flush()  # who held on to the old stream wrote into its buffer
            os.dup2(self._kept, 1)
            os.close(self._kept)


def _descriptor_of(stream: TextIO) -> int | None:
    """Returns the file descriptor of a stream; None where it has none, such as one in memory."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


class _Stream(rich.console.Console):
    """A stream whose reader may go away, as `head` does: the run goes on without it."""

    def on_broken_pipe(self) -> None:
        """Sends what follows nowhere; rich would end the process, and with it the training."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2 if self.stderr else 1)
        os.close(nowhere)


def _rich_console(*, is_stderr: bool) -> rich.console.Console:
    return _Stream(stderr=is_stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _print(stream: rich.console.Console, text: Text) -> None:
    stream.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _json_values(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def visible(text: str) -> str:
    """Returns text with what cannot be seen spelled out, such as `\\x1b` or `\\u202e`; tabs and line feeds stay.

    So data can neither steer the terminal nor turn the order in which a line is read.
    """
    return _UNSEEN.sub(lambda match: ascii(match.group())[1:-1], text)


def plural(number: int, word: str) -> str:
    """Returns a count with its noun: `1 row`, `2,000 rows`, `2 micro-batches`."""
    ending = "" if number == 1 else "es" if word.endswith(("ch", "x", "s")) else "s"
    return f"{number:,} {word}{ending}"


def ordinal(number: int) -> str:
    """Returns a number as one names a place in a list, from 1: `1st`, `2nd`, `3rd`, `11th`, `21st`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _text(cell: Cell) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _padded(text: str, width: int, *, to_right: bool = False) -> str:
    space = " " * (width - cell_len(text))
    return space + text if to_right else text + space


def _aligned(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = [_padded(cell, width, to_right=right) for cell, width, right in zip(cells, widths, is_number, strict=True)]
    return "  ".join(padded).rstrip()
