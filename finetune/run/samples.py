"""`samples.jsonl`: what the model answered to the same held-out prompts, at the start, at each evaluation, at the end.

One line an answer, `{"step", "prompt", "reference", "answer"}`; `reference` may be null. This module reads the file,
also while the run writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import DataError
from finetune.run.json_lines import read_json_lines

KEYS = ("step", "prompt", "reference", "answer")
_TAIL_BYTES = 256 * 1024


@dataclass(frozen=True)
class SampleAnswer:
    """One answer of the model as it was after `step` steps."""

    step: int
    prompt: str
    reference: str | None
    answer: str


def read_samples(path: Path) -> list[SampleAnswer]:
    """Returns the answers in the order they were given; a missing file has none, a cut last line is left out.

    Raises:
        DataError: a line is not an object of the four keys; the place is file and line.
    """
    found = [_parse(record) for record in read_json_lines(path)]
    for number, sample in enumerate(found, start=1):
        if sample is None:
            raise DataError(
                f"this line is not a sample; wanted are {', '.join(KEYS)}",
                place=f"{path}:{number}",
                remedy="Remove or mend the line; the run's checkpoints and artifacts do not depend on it.",
            )
    return [sample for sample in found if sample is not None]


def group_by_prompt(samples: Sequence[SampleAnswer]) -> list[list[SampleAnswer]]:
    """Returns the answers of each prompt in the order of their steps; of one step the last, as a resumed run leaves."""
    groups: dict[tuple[str, str | None], dict[int, SampleAnswer]] = {}
    for sample in samples:
        groups.setdefault((sample.prompt, sample.reference), {})[sample.step] = sample
    return [[answers[step] for step in sorted(answers)] for answers in groups.values()]


class LatestSample:
    """Tells the newest answer to the first prompt; looks at the file again only where it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._latest: SampleAnswer | None = None

    def __call__(self) -> SampleAnswer | None:
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return None
        if self._seen != (state.st_mtime_ns, state.st_size):
            self._seen = (state.st_mtime_ns, state.st_size)
            self._latest = self._read() or self._latest
        return self._latest

    def _read(self) -> SampleAnswer | None:
        with self._path.open("rb") as stream:
            stream.seek(max(0, self._seen[1] - _TAIL_BYTES) if self._seen else 0)
            lines = stream.read().split(b"\n")
        # The first line may be cut by where the reading began, the last one by the writer.
        samples = [sample for sample in map(_parse_line, lines) if sample is not None]
        newest = max((sample.step for sample in samples), default=0)
        return next((sample for sample in samples if sample.step == newest), None)


def _parse_line(line: bytes) -> SampleAnswer | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return _parse(record) if isinstance(record, dict) else None


def _parse(record: dict[str, Any]) -> SampleAnswer | None:
    step, prompt, reference, answer = (record.get(key) for key in KEYS)
    if not isinstance(step, int) or not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    return SampleAnswer(step, prompt, reference, answer) if reference is None or isinstance(reference, str) else None
