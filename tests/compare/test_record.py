"""A run read from its folder: its status by the lock, and what is damaged told by file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from run_folders import full_report, make_run

from finetune.compare.record import read_run
from finetune.errors import DataError, RecipeError


@pytest.mark.parametrize("status", ["done", "failed", "stopped", "interrupted"])
def test_an_ended_run_has_the_status_of_its_manifest(tmp_path: Path, status) -> None:
    assert read_run(make_run(tmp_path / "r", status=status).path).status == status


def test_a_running_run_is_told_by_its_lock_from_a_killed_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", status="running")
    assert read_run(run.path).status == "killed"
    with run.lock():
        assert read_run(run.path).status == "running"


def test_a_continued_run_is_running_whatever_its_last_ending_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", status="failed", report=full_report())
    with run.lock():
        assert read_run(run.path).status == "running"


def test_seconds_are_of_the_report_or_since_the_start(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path / "done", report=full_report()).path).seconds == 12.5
    begin = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    run = make_run(tmp_path / "on", status="running", created=begin)
    assert read_run(run.path).seconds is None
    with run.lock():
        assert 100 <= (read_run(run.path).seconds or 0) < 130


def test_a_recipe_of_this_version_has_its_defaults(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    run.recipe_path.write_text("model: {path: a/b}\ndata: {train: [{path: x.jsonl}]}\noutput: {dir: o}\n")
    assert read_run(run.path).recipe_value("adapter.rank") == 16


def test_a_recipe_of_another_version_is_taken_as_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    run.recipe_path.write_text("model: {path: a/b}\nnewer: {key: 1}\n")
    record = read_run(run.path)
    assert record.recipe_value("newer.key") == 1
    assert record.recipe_value("adapter.rank") is None


def test_no_run_is_a_wrong_argument(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RecipeError, match="there is no"):
            read_run(path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{", "damaged"),
        ("run.json", None, "has no manifest"),
        ("recipe.yaml", "a: [", "no YAML"),
        ("recipe.yaml", "- a", "holds no sections"),
        ("recipe.yaml", None, "missing"),
        ("report.json", "{", "no JSON"),
        ("report.json", "[]", "no JSON object"),
        ("environment.json", "\xff", "no JSON"),
        ("metrics.jsonl", "nonsense\n{}\n", "not a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    run = make_run(tmp_path / "r", report=full_report())
    (run.path / file).unlink()
    if content is not None:
        (run.path / file).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=message) as caught:
        read_run(run.path)
    assert file in caught.value.place
    assert caught.value.remedy
