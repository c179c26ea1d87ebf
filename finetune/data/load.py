"""Read records from one data file: JSON, JSONL, CSV, TSV, Parquet, Arrow and plain text.

Text is UTF-8 (a byte order mark is accepted) whatever the system's locale, plain or compressed (`.gz`, `.zst`). Records
are streamed; only the text of a JSON array and of a plain text file is held as a whole. A file that cannot be read in
full is an error: no record is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.json_files import read_json, read_jsonl
from finetune.data.shorten import shorten as shorten
from finetune.data.table_files import read_arrow, read_csv, read_parquet, read_tsv
from finetune.data.text_files import read_text, require_regular
from finetune.data.types import Origin
from finetune.errors import DataError
from finetune.recipe.paths import COMPRESSED_SUFFIXES

Record = dict[str, Any] | str
"""A record of a data file: an object, or the whole text of a plain text file."""

Reader = Callable[[Path], Iterator[tuple[Origin, Record | DataError]]]
"""Yields records; in place of one that is broken while the rest can be read, what is wrong with it."""


def read_records(path: str | Path, *, max_rows: int | None) -> Iterator[tuple[Origin, Record]]:
    """Yields what `read_records_and_faults` does, and raises the first fault.

    Raises:
        DataError: the file cannot be read in full, or is broken at some record.
    """
    for origin, record in read_records_and_faults(path, max_rows=max_rows):
        if isinstance(record, DataError):
            raise record
        yield origin, record


def read_records_and_faults(path: str | Path, *, max_rows: int | None) -> Iterator[tuple[Origin, Record | DataError]]:
    """Yields each record of a file with its origin, or what is wrong with it, at most `max_rows` of them.

    A plain text file is one document, blank lines included; documents longer than a row are split later.

    Raises:
        DataError: the file is missing, no regular file, empty, of an unknown type, not UTF-8, or
            broken so that what follows cannot be read.
    """
    file = Path(path)
    require_regular(file)
    reader = _reader_of(file)
    found = False
    for origin, record in islice(reader(file), max_rows):
        found = True
        yield origin, record
    if not found:
        raise DataError("the file holds no records", place=str(file), remedy="Check the path, or remove the source.")


def is_data_file(name: str) -> bool:
    """Says whether a file's name ends like one that `read_records` reads."""
    return _reader_for(Path(name)) is not None


def _reader_of(file: Path) -> Reader:
    reader = _reader_for(file)
    if reader is None:
        raise DataError(
            f"unknown file type {''.join(file.suffixes[-2:])!r}",
            place=str(file),
            remedy=f"Use one of these and name the file by it: {', '.join(_READERS)}; "
            f"those of text may also end in {' or '.join(COMPRESSED_SUFFIXES)}.",
        )
    return reader


def _reader_for(file: Path) -> Reader | None:
    suffix = file.suffix.lower()
    if suffix not in COMPRESSED_SUFFIXES:
        return _READERS.get(suffix)
    inner = Path(file.stem).suffix.lower()
    return None if inner in _BINARY else _READERS.get(inner)


def _read_txt(file: Path) -> Iterator[tuple[Origin, Record]]:
    text = read_text(file)
    if text.strip():
        yield Origin(str(file), 1), text


_READERS: dict[str, Reader] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": _read_txt,
}
_BINARY = (".parquet", ".arrow")
