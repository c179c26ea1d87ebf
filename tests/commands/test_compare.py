"""`finetune diff` and `finetune runs` as commands: exit codes, JSON, 80 columns, no colour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import full_report, make_run, recipe_of

from finetune.cli import main


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_diff_exits_0_whether_runs_differ_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("a"), report=full_report())
    make_run(Path("b"), report=full_report(), recipe=recipe_of(training={"seed": 8}))
    for pair, is_same in ((("a", "a"), True), (("a", "b"), False)):
        assert main(["diff", *pair, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["is_same"] is is_same
        assert captured.err
    assert main(["diff", "a", "b"]) == 0
    out = capsys.readouterr().out
    assert "training.seed  7  8\n" in out
    assert out.endswith("\ndifferent: recipe\n")


@pytest.mark.parametrize(("b", "code"), [("nowhere", 2), (".", 2), ("broken", 3)])
def test_diff_of_what_is_no_run(b: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("a"))
    make_run(Path("broken")).manifest_path.write_text("{")
    assert main(["diff", "a", b, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["exit_code"] == code


def test_runs_takes_the_folder_runs_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("other"))
    assert main(["runs", "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["other"]
    make_run(Path("runs/a"))
    assert main(["runs", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["name"], run["status"], run["steps"]) == ("a", "done", 2)


def test_runs_with_a_wrong_field_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", ".", "--sort", "size"]) == 2
    assert "remedy: Use one of: when, name" in capsys.readouterr().err


def test_lines_fit_80_columns_and_have_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"path": "/models/a-model-with-quite-a-long-name-of-its-own-14b-instruct"}
    make_run(Path("runs/a-run-with-a-long-name"), recipe=recipe_of(model=model), eval_losses=[12.5, 3.25])
    make_run(Path("runs/b")).recipe_path.unlink()
    make_run(Path("runs/c")).report_json.write_text("{")
    make_run(Path("runs/d"), report=full_report(), losses=[1.0])
    assert main(["runs"]) == 0
    assert main(["diff", "runs/a-run-with-a-long-name", "runs/d"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    wide = [line for line in out.splitlines() if len(line) > 80]
    assert all("/" in line for line in wide), wide  # a path is never cut
    assert len(wide) <= 2  # the two run folders of diff
