"""Files of one JSON object a line, which are read while another process may still be writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.errors import DataError


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file, in order; a missing file has none.

    A last line without its line end is what a killed run leaves, and what a reader meets while a line is written: it
    is left out where it is not a whole object.

    Raises:
        DataError: any other line is not a JSON object; the place is file and line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        is_cut_candidate = number == len(lines)
        if is_cut_candidate and not line:
            break
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif not is_cut_candidate:
            raise DataError(
                f"this line is not a JSON object: {line[:60].decode('utf-8', errors='replace')!r}",
                place=f"{path}:{number}",
                remedy="Remove or mend the line; the run's checkpoints and artifacts do not depend on it.",
            )
    return records
