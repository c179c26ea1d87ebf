"""What shells complete, by the protocol that Typer's scripts speak and through a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import make_run

import finetune
from finetune.commands.options import complete_data, complete_recipe, complete_run, complete_shipped

ROOT = Path(finetune.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fresh(*arguments: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "finetune", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False).stdout


def test_recipes_and_folders_to_look_into() -> None:
    for name in ("a.yaml", "b.yml", "c.txt", ".hidden.yaml", "sub/d.yaml", "other/e.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    assert complete_recipe("") == ["a.yaml", "b.yml", "other/", "sub/"]
    assert complete_recipe("b") == ["b.yml"]
    assert complete_recipe("su") == ["sub/d.yaml"]
    assert complete_recipe("oth") == ["other/"]
    assert complete_recipe(".h") == [".hidden.yaml"]
    assert complete_recipe("nowhere/x") == []


def test_runs_and_data() -> None:
    make_run(Path("runs/a"))
    Path("x.csv").touch()
    Path("x.jsonl.gz").touch()
    assert complete_run("r") == ["runs/a"]
    assert complete_data("x") == ["x.csv", "x.jsonl.gz"]


def test_names_of_shipped_recipes() -> None:
    assert complete_shipped("quick") == ["quickstart", "quickstart_base"]
    assert "configs/quantization/nf4" in complete_shipped("con")


@pytest.mark.parametrize(
    ("shell", "environment", "line_break"),
    [
        ("bash", {"COMP_WORDS": "finetune recipes show quick", "COMP_CWORD": "3"}, "\n"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "finetune recipes show quick"}, '"\n"'),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "finetune recipes show quick", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "\n",
        ),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_each_shell_is_answered(shell: str, environment: dict[str, str], line_break: str) -> None:
    out = fresh(_FINETUNE_COMPLETE=f"complete_{shell}", **environment)
    assert f"quickstart{line_break}quickstart_base" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_shown(shell: str) -> None:
    out = fresh("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert f"_FINETUNE_COMPLETE=complete_{shell}" in out


def test_bash_completes_with_the_script(folder: Path) -> None:
    """The script is sourced and asked as bash asks it: `finetune train re<TAB>`."""
    Path("recipe.yaml").touch()
    Path("readme.txt").touch()
    (folder / "bin").mkdir()
    command = folder / "bin/finetune"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m finetune "$@"\n')
    command.chmod(0o755)
    script = fresh("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    asking = "COMP_WORDS=(finetune train re); COMP_CWORD=2; _finetune_completion finetune; echo ${COMPREPLY[@]}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{command.parent}:{os.environ['PATH']}"}
    answer = subprocess.run(
        ["bash", "-c", f"{script}\n{asking}"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.stdout == "recipe.yaml\n", answer.stderr
