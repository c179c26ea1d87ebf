"""Read records from tables: CSV, TSV, Parquet and Arrow."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.shorten import shorten, shorten_record
from finetune.data.text_files import MAX_RECORD_BYTES, read_lines, require_regular
from finetune.data.types import Origin
from finetune.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 1024
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def _read_delimited(file: Path, *, delimiter: str) -> Iterator[tuple[Origin, dict[str, Any] | DataError]]:
    """Yields each row under the header's names; every value is text, and a row's number is the line it starts on."""
    # The module's default of 128 KiB a field would refuse long documents; the limit exists only process-wide.
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows = csv.reader((line for _, line in read_lines(file)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number, line = 0, 1
    try:
        for row in rows:
            start, line = line, rows.line_num + 1
            if not row:
                continue
            if header is None:
                header = _require_header(row, file, line=start, delimiter=delimiter)
                continue
            number += 1
            origin = Origin(str(file), start)
            if len(row) != len(header):
                yield (
                    origin,
                    DataError(
                        f"row {number} (ending on line {rows.line_num}) has {len(row)} fields, the header has "
                        f"{len(header)}: {shorten(row)}",
                        place=str(origin),
                        remedy="Give each row as many fields as the header; quote fields that hold separators or "
                        "breaks.",
                        kind=f"a row has {len(row)} fields, the header has {len(header)}",
                        text=shorten_record(row),
                    ),
                )
                continue
            yield origin, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(
            f"broken {file.suffix[1:].upper()} at row {number + 1}, which starts on this line: {error}",
            place=f"{file}:{line}",
            remedy="Quote fields that hold separators or line breaks, double the quotes inside them, and end lines "
            "with a line feed.",
        ) from error


read_csv = partial(_read_delimited, delimiter=",")
read_tsv = partial(_read_delimited, delimiter="\t")


def _require_header(row: list[str], file: Path, *, line: int, delimiter: str) -> list[str]:
    other = next((mark for mark in _DELIMITERS if mark != delimiter and len(row) == 1 and mark in row[0]), None)
    if other is not None:
        raise DataError(
            f"the header is a single column, {shorten(row[0])}; it seems that {_DELIMITERS[other]} separate columns",
            place=f"{file}:{line}",
            remedy="Separate the columns by commas in a .csv file and by tabs in a .tsv file.",
        )
    if len(set(row)) != len(row) or not all(name.strip() for name in row):
        raise DataError(
            f"the header has an empty or repeated column name: {shorten(row)}",
            place=f"{file}:{line}",
            remedy="Name each column once in the first line.",
        )
    return row


def read_parquet(file: Path) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Yields the rows of a Parquet file, batch by batch."""
    import pyarrow.parquet as pq

    require_regular(file)

    def batches() -> Iterator[pa.RecordBatch]:
        # Opened by us and not by pyarrow, so that an error of the file system keeps its own type.
        with file.open("rb") as stream, pq.ParquetFile(stream) as table:
            yield from table.iter_batches(batch_size=_BATCH_ROWS)

    yield from _rows(file, batches(), kind="Parquet")


def read_arrow(file: Path) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Yields the rows of an Arrow file, of the random access (IPC file) or the streaming kind."""
    import pyarrow as pa

    require_regular(file)

    def batches() -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(file)) as stream:
            is_random_access = stream.read(6) == b"ARROW1"
            # A stream may be cut between two batches, where only its end mark is missing.
            stream.seek(max(0, stream.size() - len(_STREAM_END)))
            is_ended = stream.read() == _STREAM_END
            stream.seek(0)
            if is_random_access:
                reader = pa.ipc.open_file(stream)
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
            else:
                yield from pa.ipc.open_stream(stream)
                if not is_ended:
                    raise EOFError("the stream has no end mark, so batches may be missing")

    yield from _rows(file, batches(), kind="Arrow")


def _rows(file: Path, batches: Iterator[pa.RecordBatch], *, kind: str) -> Iterator[tuple[Origin, dict[str, Any]]]:
    import pyarrow as pa

    number = 0
    try:
        for batch in batches:
            for row in rows_of(batch):
                number += 1
                yield Origin(str(file), number), row
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"broken {kind} file at row {number + 1}: {shorten(str(error))}",
            place=str(Origin(str(file), number + 1)),
            remedy="Write the file again; it may have been copied only in part.",
        ) from error


def rows_of(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch without the nulls that Arrow fills in.

    Rows of a table share one set of columns, down to the arguments of a tool call; a row that lacks one gets a null
    there, which no one wrote. So a null is taken for a key that is absent.
    """
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        for row in batch.slice(start, _BATCH_ROWS).to_pylist(maps_as_pydicts="strict"):
            yield without_none(row)


def without_none(value: Any) -> Any:
    """Returns the value without the keys of objects, at any depth, that are null."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
