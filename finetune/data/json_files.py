"""Read records from JSON and JSONL files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.data.shorten import shorten, shorten_line, shorten_record
from finetune.data.strict_json import JsonFault, decode, decode_at, skip_space
from finetune.data.text_files import MAX_RECORD_BYTES, read_lines, read_text
from finetune.data.types import Origin
from finetune.errors import DataError


def read_jsonl(file: Path) -> Iterator[tuple[Origin, dict[str, Any] | DataError]]:
    """Yields the object of each line that is not blank, or what is wrong with it; its number is the line's.

    Raises:
        DataError: the first line shows that the file is no JSONL, which all its lines would tell again.
    """
    for number, line in read_lines(file):
        text = line.rstrip()
        if not text:
            continue
        origin = Origin(str(file), number)
        try:
            yield origin, _object_of(text, origin)
        except DataError as error:
            if number == 1 and (text[0] == "[" or text == "{"):
                raise
            yield origin, error


def _object_of(text: str, origin: Origin) -> dict[str, Any]:
    number = origin.record
    try:
        value = decode(text)
    except JsonFault as fault:
        raise DataError(
            fault.shown(text),
            place=str(origin),
            remedy=fault.remedy or _line_remedy(text, number),
            kind=fault.kind,
            text=shorten_line(text),
        ) from fault
    if isinstance(value, list) and number == 1:
        raise DataError(
            f"the line is a JSON array, not an object: {shorten(text[:100])}",
            place=str(origin),
            remedy="If the file is one array of records, name it .json.",
        )
    return _require_object(value, origin)


def _line_remedy(text: str, number: int) -> str:
    if number == 1 and text in ("[", "{"):
        return "If the file is one JSON array over several lines, name it .json; else write one object on each line."
    return "Write one complete JSON object on each line; inside strings, escape quotes and line breaks."


def read_json(file: Path) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Yields the objects of a JSON array, one at a time, so that only the text is held and never all the objects."""
    text = read_text(file)
    position = skip_space(text, 0)
    if position == len(text):
        return
    if text[position] != "[":
        raise DataError(
            f"a JSON file must hold one array of objects, found {shorten(text[position : position + 40])}",
            place=f"{file}:{text.count(chr(10), 0, position) + 1}",
            remedy="Wrap the records in [ ]; if each line is an object of its own, rename the file to .jsonl.",
        )
    counted, line, number = 0, 1, 0
    position = skip_space(text, position + 1)
    while position < len(text) and (text[position] != "]" or number > 0):
        number += 1
        line, counted = line + text.count("\n", counted, position), position
        origin = Origin(str(file), number, line)
        value, end = _element(file, text, position, line)
        if end - position > MAX_RECORD_BYTES:
            raise DataError(
                f"the record is longer than {MAX_RECORD_BYTES:,} characters",
                place=str(origin),
                remedy="Split the record; store a long document as a .txt file.",
            )
        yield origin, _require_object(value, origin)
        position = skip_space(text, end)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise _at_position(file, text, position, "expected a comma or the closing bracket")
        position = skip_space(text, position + 1)
    if position >= len(text):
        raise _at_position(file, text, len(text), "the array is not closed")
    rest = skip_space(text, position + 1)
    if rest < len(text):
        raise _at_position(file, text, rest, "text after the end of the array")


def _element(file: Path, text: str, position: int, line: int) -> tuple[Any, int]:
    try:
        return decode_at(text, position)
    except JsonFault as fault:
        if fault.position is not None:
            raise _at_position(file, text, fault.position, fault.problem) from fault
        raise DataError(
            f"the record that starts on this line cannot be used: {fault.problem}",
            place=f"{file}:{line}",
            remedy=fault.remedy,
        ) from fault


def _at_position(file: Path, text: str, position: int, problem: str) -> DataError:
    """Returns the error for a broken JSON array, placed at `file:line`."""
    return DataError(
        JsonFault(problem, position).shown(text),
        place=f"{file}:{text.count(chr(10), 0, position) + 1}",
        remedy="The file must be one JSON array of objects. If each line is an object of its own, rename it to .jsonl.",
    )


def _require_object(value: Any, origin: Origin) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"a record must be a JSON object, found {type(value).__name__}: {shorten(value)}",
            place=str(origin),
            remedy='Write each record as an object, such as {"messages": [...]}.',
            kind=f"a record must be a JSON object, found {type(value).__name__}",
            text=shorten_record(value),
        )
    return value
