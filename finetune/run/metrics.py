"""`metrics.jsonl`: one JSON object a line, appended while the run goes on.

Each line is flushed when it is written, so a killed run loses at most the line it was writing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.errors import DataError, EnvironmentProblem
from finetune.run.atomic import write_text
from finetune.run.json_lines import read_json_lines

MetricsRecord = dict[str, Any]
_KINDS = ("train", "spike", "eval", "scores")
"""Kinds of lines, in the order in which those of one step are written."""


class MetricsWriter:
    """Appends records to a metrics file.

    Args:
        path: the file; its folder exists.
        resumed_step: the step that the run continues from. Lines of later steps are removed, as they will be written
            again. None starts an empty file.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        keep_until(path, -1 if resumed_step is None else resumed_step)
        self._path = path
        self._stream = path.open("a", encoding="utf-8", newline="\n")

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one record; a number that is not finite becomes null, as JSON has no NaN.

        Raises:
            EnvironmentProblem: the file is gone; the open stream would take lines that nobody can read.
        """
        if not self._path.exists():
            raise run_folder_gone(self._path.parent)
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


def add_lost(path: Path, known: Sequence[Mapping[str, object]]) -> list[int]:
    """Writes those of `known` into a metrics file that have no line of their kind and step there, each at its place.

    Returns the steps of the lines that were lost, in order.
    """
    records = read_metrics(path)
    present = {(record.get("kind"), record["step"]) for record in records}
    lost = [record for record in known if (record.get("kind"), record["step"]) not in present]
    if lost:
        merged = sorted([*records, *lost], key=_place)
        write_text(path, "".join(_line(record) for record in merged))
    return sorted({step for record in lost if isinstance(step := record["step"], int)})


def append_records(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Appends records to a file of such lines, as `MetricsWriter` does for one that stays open."""
    text = "".join(_line(record) for record in records)
    try:
        with path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    except FileNotFoundError as error:
        raise run_folder_gone(path.parent) from error


def run_folder_gone(folder: Path) -> EnvironmentProblem:
    """Describes a run folder, or the files in it, that went away while the run wrote into it."""
    return EnvironmentProblem(
        "the run folder is gone: it was moved or deleted while the run went on",
        place=str(folder),
        remedy="Start the run again, or put the folder back where it was and add --resume. Leave the folder in place "
        "until the run has ended.",
    )


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Returns the records of a metrics file, in order; `read_json_lines` says what a cut line and a wrong one do.

    Raises:
        DataError: a line is not a JSON object, or its `step` is not a whole number; the place is file and line.
    """
    records = read_json_lines(path)
    for number, record in enumerate(records, start=1):  # every line before the last is a record
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise DataError(
                f"`step` of this line is not a whole number: {step!r:.60}" if "step" in record else "no `step` here",
                place=f"{path}:{number}",
                remedy="Remove or mend the line; the run's checkpoints and artifacts do not depend on it.",
            )
    return records


def _place(record: Mapping[str, Any]) -> tuple[int, int]:
    kind = record.get("kind")
    return record["step"], _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


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
