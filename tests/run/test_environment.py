"""The environment record is complete enough to repeat a run and safe to share."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import finetune
from finetune.run.environment import collect_environment, shareable_command


def test_record_is_json_and_names_the_versions() -> None:
    record = json.loads(json.dumps(collect_environment()))
    assert record["finetune"] == finetune.__version__
    assert record["packages"]["torch"] and record["num_cpus"] >= 1 and record["ram_bytes"] > 2**28


def test_record_holds_no_host_name_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PRIVATE_SETTING", "do-not-show-this")
    text = json.dumps(collect_environment())
    assert "do-not-show-this" not in text and "SOME_PRIVATE_SETTING" not in text
    assert socket.gethostname() not in text


def test_command_hides_secrets_and_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    argv = [
        "/home/ada/bin/finetune",
        "train",
        "/home/ada/r.yaml",
        "hub_token=abc",
        "--api-key",
        "k1",
        "x=hf_abcdefghijkl",
    ]
    argv += ["url=https://ada:pw@example.org", "training.max_steps=3", "/home/adam/r.yaml"]
    shown = shareable_command(argv)
    expected = ["finetune", "train", "~/r.yaml", "hub_token=***", "--api-key", "***", "***", "***"]
    assert shown == [*expected, "training.max_steps=3", "/home/adam/r.yaml"]


@pytest.mark.parametrize("key", ["evaluation.max_new_tokens=64", "model.tokenizer=x", "author=y"])
def test_command_keeps_keys_that_only_sound_like_secrets(key: str) -> None:
    assert shareable_command(["finetune", key])[1] == key


def test_torch_is_not_imported_to_describe_it() -> None:
    code = (
        "import sys; from finetune.run.environment import collect_environment\n"
        "assert collect_environment()['torch'] is None; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_installation_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "__file__", str(tmp_path / "finetune" / "__init__.py"))
    assert collect_environment()["git_commit"] is None


def test_commit_of_a_source_tree_tells_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "file").write_text("a")
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(finetune, "__file__", str(tmp_path / "finetune" / "__init__.py"))
    commit = git("rev-parse", "HEAD")
    assert collect_environment()["git_commit"] == commit
    (tmp_path / "file").write_text("b")
    assert collect_environment()["git_commit"] == f"{commit}-dirty"
