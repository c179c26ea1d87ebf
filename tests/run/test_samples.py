"""Answers over the steps are read while they are written, and after a run was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import DataError
from finetune.run.samples import LatestSample, SampleAnswer, group_by_prompt, read_samples


def line(number: int, prompt: str = "p", answer: str | None = "a", **changes: Any) -> str:
    return json.dumps({"step": number, "prompt": prompt, "reference": None, "answer": answer} | changes) + "\n"


def test_samples_are_read_and_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == []
    path.write_text(line(0, reference="r") + line(5)[:-4])
    assert read_samples(path) == [SampleAnswer(0, "p", "r", "a")]


@pytest.mark.parametrize("wrong", ['{"step": 1}\n', line(1, step="1"), line(1, reference=3), line(1, answer=None)])
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(line(0) + wrong)
    with pytest.raises(DataError) as error:
        read_samples(path)
    assert error.value.place == f"{path}:2"


def test_groups_are_in_the_order_of_steps_and_a_repeated_step_counts_once() -> None:
    samples = [SampleAnswer(step, prompt, None, f"{prompt}{n}") for n, (step, prompt) in enumerate(
        [(0, "a"), (0, "b"), (5, "a"), (5, "b"), (5, "a")]
    )]  # fmt: skip
    groups = group_by_prompt(samples)
    assert [[(s.step, s.answer) for s in group] for group in groups] == [[(0, "a0"), (5, "a4")], [(0, "b1"), (5, "b3")]]


def test_the_latest_sample_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    latest = LatestSample(path)
    assert latest() is None
    path.write_text(line(0, "first") + line(0, "second"))
    assert (found := latest()) is not None and (found.step, found.prompt) == (0, "first")
    with path.open("a") as stream:
        stream.write(line(5, "first", "better")[:20])
    assert (found := latest()) is not None and found.step == 0
    with path.open("a") as stream:
        stream.write(line(5, "first", "better")[20:] + line(5, "second"))
    assert (found := latest()) is not None and (found.step, found.answer) == (5, "better")


def test_the_latest_sample_of_a_long_file_is_found_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(line(step, answer="x" * 5000) for step in range(200)))
    assert (found := LatestSample(path)()) is not None and found.step == 199
