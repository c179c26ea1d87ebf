"""`metrics.jsonl`: one JSON object a line, appended while the run goes on.

Each line is flushed when it is written, so a killed run loses at most the line it was writing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.run.atomic import write_text
from finetune.run.json_lines import read_json_lines

MetricsRecord = dict[str, Any]


class MetricsWriter:
    """Appends records to a metrics file.

    Args:
        path: the file; its folder exists.
        resumed_step: the step that the run continues from. Lines of later steps are removed, as they will be written
            again. None starts an empty file.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        keep_until(path, -1 if resumed_step is None else resumed_step)
        self._stream = path.open("a", encoding="utf-8", newline="\n")

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one record; a number that is not finite becomes null, as JSON has no NaN."""
        self._stream.write(_line(record))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep_until(path: Path, step: int) -> None:
    """Removes the records of later steps from a file; a missing one is made, empty."""
    kept = [record for record in read_metrics(path) if record.get("step", 0) <= step] if step >= 0 else []
    write_text(path, "".join(_line(record) for record in kept))


def append_records(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Appends records to a file of such lines, as `MetricsWriter` does for one that stays open."""
    with path.open("a", encoding="utf-8", newline="\n") as stream:
        stream.write("".join(_line(record) for record in records))


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Returns the records of a metrics file, in order; `read_json_lines` says what a cut line and a wrong one do."""
    return read_json_lines(path)


def _line(record: Mapping[str, object]) -> str:
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """Turns numbers of numpy and torch into Python's, and those that are not finite into None."""
    item = getattr(value, "item", None)
    if callable(item):
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
