"""The metrics file survives a kill and holds no step twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finetune.errors import DataError, EnvironmentProblem
from finetune.run.metrics import MetricsWriter, add_lost, append_records, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_lines_are_on_disk_before_the_file_is_closed(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.write({"kind": "train", "step": 1, "loss": 2.5})
    assert read_metrics(path) == [{"kind": "train", "step": 1, "loss": 2.5}]
    writer.close()


def test_not_finite_becomes_null_and_numpy_becomes_plain(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write({"step": np.int64(1), "loss": float("nan"), "grad_norm": np.float32("inf"), "lr": np.float64(0.5)})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}


def test_resume_drops_later_steps_and_the_cut_line(path: Path) -> None:
    with MetricsWriter(path) as writer:
        for step in range(1, 8):
            writer.write({"kind": "train", "step": step})
    with path.open("a") as stream:
        stream.write('{"kind": "tra')
    with MetricsWriter(path, resumed_step=4) as writer:
        writer.write({"kind": "train", "step": 5, "again": True})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[-1]["again"]


def test_new_run_starts_empty(path: Path) -> None:
    path.write_text('{"step": 1}\n')
    MetricsWriter(path).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize("tail", ['{"step": 2, "lo', "\x00\x00"])
def test_one_cut_last_line_is_left_out(path: Path, tail: str) -> None:
    path.write_text('{"step": 1}\n' + tail)
    assert read_metrics(path) == [{"step": 1}]


def test_whole_last_line_without_its_end_is_kept(path: Path) -> None:
    path.write_text('{"step": 1}\n{"step": 2}')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("damaged", ['{"step": 2, "lo', "[1]", "", "\x00"])
def test_other_damage_is_an_error_with_its_line(path: Path, damaged: str) -> None:
    path.write_text('{"step": 1}\n' + damaged + '\n{"step": 3}\n')
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert caught.value.place == f"{path}:2" and caught.value.remedy


def test_missing_file_has_no_records(path: Path) -> None:
    assert read_metrics(path) == []


@pytest.mark.parametrize("line", ['{"kind": "train", "step": "x"}', '{"kind": "train", "step": true}', '{"loss": 1}'])
def test_a_step_that_is_no_number_is_named_by_its_line(path: Path, line: str) -> None:
    path.write_text('{"kind": "train", "step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match="step") as caught:
        read_metrics(path)
    assert caught.value.place == f"{path}:2"


def test_a_run_folder_that_went_away_is_named(tmp_path: Path) -> None:
    """The open stream went on taking lines that nobody could read, and the other file gave a traceback."""
    folder = tmp_path / "run"
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.write({"kind": "train", "step": 1})
        folder.rename(tmp_path / "moved")
        with pytest.raises(EnvironmentProblem, match="run folder is gone") as caught:
            writer.write({"kind": "train", "step": 2})
    assert caught.value.place == str(folder)
    with pytest.raises(EnvironmentProblem, match="run folder is gone"):
        append_records(folder / "samples.jsonl", [{"step": 2}])


def test_lost_lines_are_put_back_at_their_places(path: Path) -> None:
    known = [{"kind": kind, "step": step, "x": step} for step in (1, 2, 3) for kind in ("train", "eval")]
    begun = {"kind": "eval", "step": 0}
    spike = {"kind": "spike", "step": 2, "of": "loss"}
    append_records(path, [begun, known[0], known[1], spike, known[3], known[5]])
    assert add_lost(path, known) == [2, 3]
    assert read_metrics(path) == [begun, known[0], known[1], known[2], spike, *known[3:]]
    before = path.stat().st_mtime_ns
    assert add_lost(path, known) == [] and path.stat().st_mtime_ns == before
