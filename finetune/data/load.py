"""Read records from data files: JSON, JSONL, CSV, Parquet and plain text.

Every file is UTF-8 (a byte order mark is accepted) whatever the system's locale. Records are streamed; only the text of
a JSON array is held as a whole. A file that cannot be read in full is an error: no record is skipped.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.types import Origin
from finetune.errors import DataError

Record = dict[str, Any] | str
"""A record of a data file: an object, or the whole text of a plain text file."""

_CHUNK_BYTES = 1 << 20
_MAX_CSV_FIELD = 2**31 - 1
_SHOWN_CHARACTERS = 80
_SAVE_AS_UTF8 = "Save the file as UTF-8 text, or name it by what it holds (.parquet for Parquet)."


def read_records(path: str | Path, *, max_rows: int | None) -> Iterator[tuple[Origin, Record]]:
    """Yields each record of a file with its origin, at most `max_rows` of them.

    A plain text file is one document, blank lines included; documents longer than a row are split later.

    Raises:
        DataError: the file is missing, a folder, empty, of an unknown type, not UTF-8, or broken at some record.
    """
    file = Path(path)
    reader = _reader_of(file)
    found = False
    for origin, record in islice(reader(file), max_rows):
        found = True
        yield origin, record
    if not found:
        raise DataError("the file holds no records", place=str(file), remedy="Check the path, or remove the source.")


def shorten(value: object) -> str:
    """Returns the value as one printable line of at most 80 characters, for messages."""
    shown = ascii(value) if isinstance(value, str) else ascii(value).replace("\n", " ")
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."


def _reader_of(file: Path) -> Callable[[Path], Iterator[tuple[Origin, Record]]]:
    if file.is_dir():
        raise DataError("this is a folder, not a file", place=str(file), remedy="Name one data file in the folder.")
    if not file.exists():
        raise DataError("the file does not exist", place=str(file), remedy=_missing_remedy(file))
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(
            f"unknown file type {file.suffix!r}",
            place=str(file),
            remedy=f"Use one of these and name the file by it: {', '.join(_READERS)}.",
        )
    return reader


def _missing_remedy(file: Path) -> str:
    if not file.parent.is_dir():
        return f"The folder {file.parent} does not exist either. Paths are relative to the recipe that names them."
    near = difflib.get_close_matches(file.name, [other.name for other in file.parent.iterdir()], n=3)
    if near:
        return f"Did you mean {', '.join(near)}?"
    return "Check the path; it is relative to the recipe that names it."


def _require_text(file: Path) -> None:
    """Raises unless the whole file is UTF-8 text; a pass of its own, so that the byte offset is exact."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(_CHUNK_BYTES)
            nul = chunk.find(b"\0")
            if nul >= 0:
                raise DataError(
                    f"not a text file: NUL byte at byte offset {offset + nul}", place=str(file), remedy=_SAVE_AS_UTF8
                )
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                raise DataError(
                    f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte offset {at}",
                    place=str(file),
                    remedy=_SAVE_AS_UTF8,
                ) from error
            if not chunk:
                return
            offset += len(chunk)


def _require_object(value: Any, origin: Origin) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"a record must be a JSON object, found {type(value).__name__}: {shorten(value)}",
            place=str(origin),
            remedy='Write each record as an object, such as {"messages": [...]}.',
        )
    return value


def _read_jsonl(file: Path) -> Iterator[tuple[Origin, Record]]:
    _require_text(file)
    # newline="\n": only a line feed ends a record, so a bare carriage return stays inside it.
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            text = line.rstrip()
            if not text:
                continue
            origin = Origin(str(file), number)
            try:
                value = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise _broken_json(error, place=str(origin), text=text) from error
            yield origin, _require_object(value, origin)


def _broken_json(error: json.JSONDecodeError | RecursionError, *, place: str, text: str) -> DataError:
    if isinstance(error, RecursionError):
        return DataError("JSON nested too deeply", place=place, remedy="Flatten the record.")
    around = text[max(0, error.pos - 20) : error.pos + 40]
    return DataError(
        f"broken JSON at column {error.colno}: {error.msg}, near {shorten(around)}",
        place=place,
        remedy="Write one complete JSON object on each line; inside strings, escape quotes and line breaks.",
    )


def _read_json(file: Path) -> Iterator[tuple[Origin, Record]]:
    """Decodes one element of the array at a time, so that only the text is in memory and never all the objects."""
    _require_text(file)
    text = file.read_text(encoding="utf-8-sig")
    position = _skip_space(text, 0)
    if position == len(text):
        return
    if text[position] != "[":
        raise DataError(
            f"a JSON file must hold one array of objects, found {shorten(text[position : position + 40])}",
            place=str(file),
            remedy="Wrap the records in [ ]; if each line is an object of its own, rename the file to .jsonl.",
        )
    position = _skip_space(text, position + 1)
    number = 0
    while position < len(text) and (text[position] != "]" or number > 0):
        number += 1
        origin = Origin(str(file), number)
        try:
            value, position = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _at_position(file, text, error.pos, error.msg) from error
        except RecursionError as error:
            raise _at_position(file, text, position, "nested too deeply") from error
        yield origin, _require_object(value, origin)
        position = _skip_space(text, position)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise _at_position(file, text, position, "expected a comma or the closing bracket")
        position = _skip_space(text, position + 1)
    if position >= len(text):
        raise _at_position(file, text, len(text), "the array is not closed")
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        raise _at_position(file, text, rest, "text after the end of the array")


_DECODER = json.JSONDecoder()


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _at_position(file: Path, text: str, position: int, problem: str) -> DataError:
    """Returns the error for a broken JSON array, placed at `file:line`."""
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    around = text[max(0, position - 20) : position + 40]
    return DataError(
        f"broken JSON at column {column}: {problem}, near {shorten(around)}",
        place=f"{file}:{line}",
        remedy="The file must be one JSON array of objects. If each line is an object of its own, rename it to .jsonl.",
    )


def _read_csv(file: Path) -> Iterator[tuple[Origin, Record]]:
    _require_text(file)
    # The module's default of 128 KiB a field would refuse long documents; the limit exists only process-wide.
    csv.field_size_limit(_MAX_CSV_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, strict=True)
        header: list[str] | None = None
        number = 0
        try:
            for row in rows:
                if not row:
                    continue
                if header is None:
                    header = _require_header(row, file)
                    continue
                number += 1
                origin = Origin(str(file), number)
                if len(row) != len(header):
                    raise DataError(
                        f"row {number} (ending on line {rows.line_num}) has {len(row)} fields, the header has "
                        f"{len(header)}: {shorten(row)}",
                        place=str(origin),
                        remedy="Give each row as many fields as the header; quote fields that hold commas or breaks.",
                    )
                yield origin, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise DataError(
                f"broken CSV at row {number + 1} (line {rows.line_num}): {error}",
                place=f"{file}:{number + 1}",
                remedy="Quote fields that hold commas or line breaks, and double the quotes inside them.",
            ) from error


def _require_header(row: list[str], file: Path) -> list[str]:
    if len(set(row)) != len(row) or not all(name.strip() for name in row):
        raise DataError(
            f"the header has an empty or repeated column name: {shorten(row)}",
            place=f"{file}:1",
            remedy="Name each column once in the first line.",
        )
    return row


def _read_parquet(file: Path) -> Iterator[tuple[Origin, Record]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # Opened by us and not by pyarrow, so that an error of the file system keeps its own type.
        with file.open("rb") as stream, pq.ParquetFile(stream) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Origin(str(file), number), _without_none(row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"broken Parquet file at row {number + 1}: {shorten(str(error))}",
            place=f"{file}:{number + 1}",
            remedy="Write the file again; it may have been copied only in part.",
        ) from error


def _without_none(value: Any) -> Any:
    """Returns the value without the keys that Arrow filled with None because another row has them."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _read_txt(file: Path) -> Iterator[tuple[Origin, Record]]:
    _require_text(file)
    text = file.read_text(encoding="utf-8-sig")
    if text.strip():
        yield Origin(str(file), 1), text


_READERS: dict[str, Callable[[Path], Iterator[tuple[Origin, Record]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
