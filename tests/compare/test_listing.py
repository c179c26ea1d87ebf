"""The list of runs: every run is in it once, a broken one with its reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_folders import full_report, make_run, recipe_of

from finetune.compare.listing import MAX_DEPTH, list_runs
from finetune.compare.text import duration, show_runs
from finetune.console import Console
from finetune.errors import RecipeError


def names(folder: Path, sort: str = "name") -> list[str]:
    return [run.name for run in list_runs(folder, sort=sort)]


def test_runs_are_found_below_and_nothing_inside_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "group/b")
    make_run(tmp_path / "a/checkpoints/inner")
    make_run(tmp_path / ".hidden/c")
    make_run(tmp_path.joinpath(*"123456", "deep"))
    assert MAX_DEPTH == 5
    assert names(tmp_path) == ["a", "group/b"]
    assert names(tmp_path / "a") == ["a"]


def test_a_run_is_described(tmp_path: Path) -> None:
    recipe = recipe_of(model={"path": "/models/tiny-1b"}, adapter={"type": "none"})
    make_run(tmp_path / "a", recipe=recipe, report=full_report(), eval_losses=[5.0, 4.0])
    make_run(tmp_path / "b", losses=[3.0, 2.5])
    a, b = list_runs(tmp_path, sort="name")
    assert (a.status, a.model, a.method) == ("done", "tiny-1b", "sft full")
    assert (a.steps, a.total_steps, a.seconds) == (2, 2, 12.5)
    assert (a.loss_before, a.loss_after, a.loss_kind) == (5.0, 4.0, "held-out")
    assert (b.method, b.loss_before, b.loss_after, b.loss_kind) == ("sft lora", 3.0, 2.5, "train")


def test_broken_runs_are_listed_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "cut").manifest_path.write_text("{")
    make_run(tmp_path / "half").manifest_path.unlink()
    make_run(tmp_path / "norecipe").recipe_path.unlink()
    runs = list_runs(tmp_path, sort="name")
    reasons = {run.name: run.reason for run in runs if run.status == "broken"}
    assert reasons.keys() == {"cut", "half", "norecipe"}
    assert reasons["cut"].startswith("run.json: the run's manifest is damaged")
    assert reasons["norecipe"] == "recipe.yaml: the run's recipe is missing"
    show_runs(Console(), runs, folder="x")
    assert capsys.readouterr().out.endswith("4 runs, 3 of them broken\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.path.chmod(0)
    try:
        (listed,) = list_runs(tmp_path, sort="name")
    finally:
        run.path.chmod(0o755)
    assert listed.status == "broken"


def test_sorting(tmp_path: Path) -> None:
    make_run(tmp_path / "a", created="2026-01-01T00:00:00+00:00", losses=[1.0, 0.5])
    make_run(tmp_path / "b", created="2026-03-01T00:00:00+00:00", losses=[3.0, 2.0, 1.0], status="failed")
    make_run(tmp_path / "c", created="nonsense", losses=[])
    assert names(tmp_path, "when") == ["b", "a", "c"]
    assert names(tmp_path, "loss") == ["a", "b", "c"]
    assert names(tmp_path, "steps") == ["b", "a", "c"]
    assert names(tmp_path, "status") == ["a", "c", "b"]


def test_wrong_folder_and_wrong_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(RecipeError, match="folder"):
            list_runs(folder, sort="when")
    with pytest.raises(RecipeError, match="no field `size`"):
        list_runs(tmp_path, sort="size")


def test_the_times_of_all_statuses_stand_below_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, status in (("a", "early-stopped"), ("b", "done")):
        make_run(tmp_path / name, created="2026-01-01T00:00:00+00:00", losses=[1.0, 0.5], status=status)
    show_runs(Console(), list_runs(tmp_path, sort="name"), folder="here")
    heads = [line for line in capsys.readouterr().out.splitlines() if "2026" in line]
    assert len(heads) == 2 and len({line.index("2026") for line in heads}) == 1


def test_no_runs_are_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_runs(Console(), list_runs(tmp_path, sort="when"), folder="here")
    assert capsys.readouterr().out == "no runs in or below here\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (3.14159, "3.1s"),
        (9.97, "10s"),
        (59.7, "1m 00s"),
        (128, "2m 08s"),
        (3900, "1h 05m"),
        (2e5, "2d 07h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
