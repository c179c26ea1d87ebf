"""A look at the user's data before there is a recipe: format, columns, rows, lengths. No tokenizer is needed.

Files are read and records recognised and converted by the data layer itself, so what is said here is what a run finds.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.data.formats import convert, describe, recognise
from finetune.data.load import Record
from finetune.data.sources import read_source
from finetune.data.types import Conversation, Origin
from finetune.errors import DataError, RecipeError
from finetune.recipe.schema import Columns, Source

MAX_ROWS = 20_000
"""Rows that are looked at; a longer file is said to have more."""
NAMED_ROWS = 1_000
"""Rows whose columns are known by name: a key that may be left out need not be in the first record."""
BYTES_PER_TOKEN = 3
"""Bytes of UTF-8 that are taken for a token: less than the 4 or so of English, so that the guess is not too short."""
TOKENS_PER_MESSAGE = 12
"""Taken for what a chat template writes around a message."""
_NAMES = {
    "instruction": ("instruction", "question", "query", "prompt", "request", "user", "ask", "input"),
    "output": ("output", "answer", "response", "reply", "completion", "assistant", "target", "label"),
    "text": ("text", "content", "document", "body", "article", "page"),
    "messages": ("messages", "conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
}
"""Column names that play a role often, the likeliest first."""
_SHOWN_MESSAGES = 4
_MEANT = {"question": "instruction", "response": "output", "reply": "output", "query": "instruction"}
"""Words that people use for a role."""
ROLES = tuple(Columns.model_fields)


@dataclass(frozen=True)
class Look:
    """What was seen of a source."""

    format: str
    """The format's name with its shape, as a run says it."""
    columns: Mapping[str, str]
    """Column names by role; empty where the names are those of the format."""
    num_rows: int
    is_whole: bool
    """Whether `num_rows` is all there are, or the look ended there."""
    num_faulty: int = 0
    first_fault: str = ""
    longest_tokens: int = 0
    """Tokens of the longest conversation, as an estimate from its bytes."""
    total_tokens: int = 0
    """Tokens of all rows looked at, as an estimate."""
    first_record: tuple[str, ...] = ()
    """The first record as it was understood, for people: a short line a message."""

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "first_record"}
        return {**values, "columns": dict(self.columns)}


@dataclass(frozen=True)
class Unmapped:
    """A source whose first record fits no format by the names of its columns."""

    columns: tuple[str, ...]
    guess: dict[str, str] = field(default_factory=dict)
    """Roles that the names suggest: a question and an answer, one text, or messages; empty where they say nothing."""


def look_at(path: str, *, columns: Mapping[str, str]) -> Look | Unmapped:
    """Reads the first rows of a source of files.

    Args:
        path: file, folder or pattern, absolute.
        columns: column names by role, as the recipe has them.

    Raises:
        DataError: a file cannot be read, or its first record cannot be used.
        RecipeError: a column is given for a role that does not exist.
    """
    require_roles(columns)
    source = Source(path=path, columns=Columns(**columns) if columns else None)
    look: Look | Unmapped | None = None
    seen = _Seen()
    for origin, record in read_source(source.model_copy(update={"max_rows": MAX_ROWS + 1}), say=lambda _: None):
        if look is None:
            look = _first_look(record, origin, columns)
            if isinstance(look, Unmapped):
                return look
        seen.add(record, origin, look.format.partition(" ")[0])
    assert look is not None, "read_source refuses a source without records"
    return seen.completed(look)


def column_names(path: str) -> tuple[str, ...]:
    """Returns the names of the columns that the first records have between them; none for plain text.

    Args:
        path: file, folder or pattern, absolute.

    Raises:
        DataError: a file, or its first record, cannot be read.
    """
    names: dict[str, None] = {}
    for index, (_, record) in enumerate(read_source(Source(path=path, max_rows=NAMED_ROWS), say=lambda _: None)):
        if isinstance(record, DataError) and index == 0:
            raise record
        if isinstance(record, dict):
            names.update(dict.fromkeys(map(str, record)))
    return tuple(names)


def require_roles(columns: Mapping[str, str]) -> None:
    """Raises RecipeError where a column is given for a role that does not exist."""
    for role in columns:
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Use one of: {', '.join(ROLES)}."
            if role in _MEANT:
                remedy = "The question's column has the role instruction, the answer's the role output (`answer` is "
                remedy += "what a reward compares with): --column instruction=NAME --column output=NAME"
            raise RecipeError(f"`{role}` is no role that a column can play", place="--column", remedy=remedy)


def _first_look(record: Record | DataError, origin: Origin, columns: Mapping[str, str]) -> Look | Unmapped:
    if isinstance(record, DataError):
        raise record
    try:
        format = recognise(record, origin)
    except DataError:
        if columns or isinstance(record, str):
            raise
        return Unmapped(tuple(map(str, record)), _guess(tuple(map(str, record))))
    if format == "prompt_answer" and not columns and isinstance(record, dict):
        # A prompt and its answer, which supervised training learns under the names of their roles.
        return Unmapped(tuple(map(str, record)), {"instruction": "prompt", "output": "answer"})
    conversation = convert(record, format=format, origin=origin)
    return Look(describe(record, format), dict(columns), 0, True, first_record=_as_lines(conversation))


def _as_lines(conversation: Conversation) -> tuple[str, ...]:
    """Returns a line a message of a conversation, the first few; a text or completion is one line."""
    parts = [(message.role, message.content) for message in conversation.messages[:_SHOWN_MESSAGES]]
    parts += [(name, text) for name, text in (("text", conversation.text), ("answer", conversation.completion)) if text]
    return tuple(
        f"{'record   ' if index == 0 else '         '}{name}: {textwrap.shorten(text, 60, placeholder=' ...')}"
        for index, (name, text) in enumerate(parts)
    )


def _guess(names: tuple[str, ...]) -> dict[str, str]:
    found = {role: _likeliest(names, role) for role in _NAMES}
    question, answer = found["instruction"], found["output"]
    if found["messages"]:
        return {"messages": found["messages"]}
    if question and answer and question != answer:
        return {"instruction": question, "output": answer}
    return {"text": found["text"]} if found["text"] and not answer else {}


def _likeliest(names: tuple[str, ...], role: str) -> str | None:
    by_plain = {name.strip().lower(): name for name in names}
    return next((by_plain[candidate] for candidate in _NAMES[role] if candidate in by_plain), None)


@dataclass
class _Seen:
    """Counts over the rows."""

    num_rows: int = 0
    num_faulty: int = 0
    first_fault: str = ""
    longest: int = 0
    total: int = 0
    is_whole: bool = True

    def add(self, record: Record | DataError, origin: Origin, format: str) -> None:
        if self.num_rows == MAX_ROWS:
            self.is_whole = False
            return
        self.num_rows += 1
        try:
            if isinstance(record, DataError):
                raise record
            tokens = estimated_tokens(convert(record, format=format, origin=origin))  # pyright: ignore[reportArgumentType]
        except DataError as fault:
            self.num_faulty += 1
            self.first_fault = self.first_fault or f"{fault.place}: {fault.message}"
            return
        self.longest, self.total = max(self.longest, tokens), self.total + tokens

    def completed(self, look: Look) -> Look:
        return Look(
            look.format,
            look.columns,
            self.num_rows,
            self.is_whole,
            self.num_faulty,
            self.first_fault,
            self.longest,
            self.total,
            look.first_record,
        )


def estimated_tokens(conversation: Conversation) -> int:
    """Returns a generous guess of a conversation's tokens, from the bytes of its texts."""
    texts = [conversation.text, conversation.completion, *(message.content for message in conversation.messages)]
    extras = [str(message.extra) for message in conversation.messages if message.extra]
    tools = [str(conversation.tools)] if conversation.tools else []
    num_bytes = sum(len(text.encode("utf-8", errors="replace")) for text in (*texts, *extras, *tools))
    return -(-num_bytes // BYTES_PER_TOKEN) + TOKENS_PER_MESSAGE * max(1, len(conversation.messages))
