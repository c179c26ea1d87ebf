"""How a run ends where something comes between: a second signal, a folder that goes away, a result that is worse."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.cli import main
from finetune.errors import EnvironmentProblem, ExitCode, Interrupted
from finetune.run.folder import create_run_folder
from finetune.trainer.callbacks.metrics_log import MetricsLogCallback
from finetune.trainer.summary import folder_in_place

SLOW_ENDING = """
import pathlib, sys, time
import finetune.trainer.summary as summary
from finetune.cli import main
draw = summary.write_curves_png
def slow(*arguments):
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(2)
    draw(*arguments)
summary.write_curves_png = slow
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("endings")
    make_model_folder(root / "qwen3", "qwen3")
    make_chat_file(root / "train.jsonl", rows=40)
    make_chat_file(root / "eval.jsonl", rows=6, seed=9)
    return root


def write_recipe(parts: Path, folder: Path, **sections: dict) -> Path:
    recipe = make_recipe(parts / "qwen3", parts / "train.jsonl", folder / "run", **sections)
    recipe["data"] |= {"max_length": 128, "eval": [{"path": str(parts / "eval.jsonl")}]}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_cut_the_ending(parts: Path, tmp_path: Path, second: signal.Signals) -> None:
    """A scheduler sends SIGTERM twice; the second one left the manifest at `running`."""
    (tmp_path / "slow.py").write_text("import time\ndef score(prediction, reference):\n    time.sleep(60)\n")
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["./slow.py"], "at_start": False})
    drawing = tmp_path / "drawing"
    process = subprocess.Popen([sys.executable, "-c", SLOW_ENDING, str(recipe), str(drawing)])
    wait_for((tmp_path / "run" / "adapter" / "tokenizer.json").exists, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    wait_for(drawing.exists, process)
    process.send_signal(second)
    assert process.wait(timeout=60) == ExitCode.INTERRUPTED
    for name in ("run.json", "report.json"):
        assert json.loads((tmp_path / "run" / name).read_text())["status"] == "interrupted"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline, "the run did not get so far"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_folder_that_goes_away_is_named(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """It was a fault of the program, with a traceback."""
    log = MetricsLogCallback.on_log
    run = tmp_path / "run"

    def on_log(self: MetricsLogCallback, args, state, *rest, **more) -> None:
        if state.global_step == 2 and run.exists():
            shutil.rmtree(run) if how == "deleted" else run.rename(tmp_path / "elsewhere")
        log(self, args, state, *rest, **more)

    monkeypatch.setattr(MetricsLogCallback, "on_log", on_log)
    assert main(["train", str(write_recipe(parts, tmp_path)), "--json"]) == ExitCode.ENVIRONMENT
    error = json.loads(capsys.readouterr().out)
    assert "the run folder is gone" in error["message"]
    assert error["place"] == str(run)


def test_only_what_a_missing_folder_explains_is_told_as_such(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "run", recipe_text="", recipe_hash="0", environment={})
    with pytest.raises(FileNotFoundError), folder_in_place(run):
        raise FileNotFoundError("another file")
    shutil.rmtree(run.path)
    with pytest.raises(ZeroDivisionError), folder_in_place(run):
        raise ZeroDivisionError
    with pytest.raises(EnvironmentProblem, match="gone"), folder_in_place(run):
        raise FileNotFoundError(str(run.environment_path))
    with pytest.raises(EnvironmentProblem, match="gone"), folder_in_place(run):
        raise Interrupted("everything is saved", remedy="Go on.")


@pytest.mark.parametrize("deliver", ["best", "last"])
def test_a_result_worse_than_before_training_is_told(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], deliver: str
) -> None:
    """The lowest held-out loss after a step may be above that before the first one."""
    training = {"learning_rate": 100.0, "max_steps": 4, "schedule": "constant"}
    recipe = write_recipe(parts, tmp_path, training=training, evaluation={"every_steps": 2})
    assert main(["train", str(recipe), f"output.deliver={deliver}"]) == 0
    shown = capsys.readouterr()
    assert f"warning: the {deliver} weights are worse than before training" in shown.err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["summary"]["eval_loss_after"] > report["summary"]["eval_loss_before"]
    (check,) = [check for check in report["checks"] if "worse" in check["name"]]
    assert check["ok"] is False and deliver in check["detail"]
    assert "worse than before training" in (tmp_path / "run" / "report.html").read_text()


def test_a_result_that_is_better_has_no_such_check(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_recipe(parts, tmp_path))]) == 0
    assert "worse" not in capsys.readouterr().err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["summary"]["eval_loss_after"] < report["summary"]["eval_loss_before"]
    assert not [check for check in report["checks"] if "worse" in check["name"]]


class FullDisk:
    """Refuses to write checkpoints after the first, and everything that is replaced as a whole, until it is freed."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, *, is_freed_by_removal: bool) -> None:
        self.is_full = False
        self._second = run / "checkpoints" / "checkpoint-4"
        self._is_freed_by_removal = is_freed_by_removal
        save, make = torch.save, tempfile.mkstemp

        def full_save(value: object, path: object, *rest: object, **more: object) -> None:
            if str(path).startswith(str(self._second)):
                Path(str(path)).write_bytes(b"half")
                self.is_full = True
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 970240 vs 970132")
            save(value, path, *rest, **more)

        def full_make(*rest: Any, **more: Any) -> tuple[int, str]:
            self.write()
            return make(*rest, **more)

        monkeypatch.setattr(torch, "save", full_save)
        monkeypatch.setattr(tempfile, "mkstemp", full_make)

    def write(self) -> None:
        if self.is_full and not (self._is_freed_by_removal and not self._second.exists()):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_freed_by_removal", [True, False], ids=["room-for-the-report", "no-room-at-all"])
def test_a_disk_that_fills_up_ends_the_run_and_it_goes_on_from_the_checkpoint(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_freed_by_removal: bool
) -> None:
    """The manifest stayed at `running`, and the message named neither the run nor what to do."""
    training = {"max_steps": 6}
    (tmp_path / "whole").mkdir()
    whole = write_recipe(parts, tmp_path / "whole", training=training)
    assert main(["train", str(whole)]) == 0
    recipe, run = write_recipe(parts, tmp_path, training=training), tmp_path / "run"
    command = ["train", str(recipe), "output.save_every_steps=2", "--json"]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as monkeypatch:
        FullDisk(run, monkeypatch, is_freed_by_removal=is_freed_by_removal)
        assert main(command) == ExitCode.ENVIRONMENT
    error = json.loads(capsys.readouterr().out)
    assert (error["error"], error["place"]) == ("EnvironmentProblem", str(run))
    assert "the disk is full" in error["message"] and "bytes were free" in error["message"]
    assert "--resume: it goes on from checkpoint-2" in error["remedy"]
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["status"] == "failed" and manifest["recipe_hash"]
    assert not (run / "checkpoints" / "checkpoint-4").exists()
    if is_freed_by_removal:
        report = json.loads((run / "report.json").read_text())
        assert report["status"] == "failed" and "the disk is full" in report["message"]
        assert report["timings"]["training_seconds"] > 0
    assert main([*command, "--resume"]) == 0
    assert adapter_of(run) == adapter_of(tmp_path / "whole" / "run")


def adapter_of(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_full_disk_without_a_checkpoint_says_that_the_run_begins_again(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics are what cannot be written here; the limit is of file sizes, as `ulimit -f` sets it."""
    on_log = MetricsLogCallback.on_log

    def full(self: MetricsLogCallback, args, state, *rest, **more) -> None:
        if state.global_step == 1:
            raise OSError(errno.EFBIG, "File too large")
        on_log(self, args, state, *rest, **more)

    monkeypatch.setattr(MetricsLogCallback, "on_log", full)
    assert main(["train", str(write_recipe(parts, tmp_path)), "--json"]) == ExitCode.ENVIRONMENT
    assert "begins at the first step" in json.loads(capsys.readouterr().out)["remedy"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_continued_run_tells_the_time_of_all_its_steps(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last command's time was told; a run that stopped early had none of its steps'."""
    recipe, run = write_recipe(parts, tmp_path, training={"max_steps": 4}), tmp_path / "run"
    command = ["train", str(recipe), "output.save_every_steps=2"]
    with monkeypatch.context() as patched:
        patched.setattr("finetune.train.check_weights_are_finite", lambda model: 1 / 0)
        assert main(command) == 1
    first = json.loads((run / "report.json").read_text())["timings"]["training_seconds"]
    assert first > 0
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    meter = run / "checkpoints" / "checkpoint-2" / "meter.json"
    text = json.dumps(json.loads(meter.read_text()) | {"elapsed_seconds": 3723.0})
    meter.write_text(text)
    marker = meter.with_name("complete.json")
    sizes = json.loads(marker.read_text())
    sizes["files"]["meter.json"], sizes["checksums"] = len(text), {}  # as before checksums were kept
    marker.write_text(json.dumps(sizes))
    capsys.readouterr()
    assert main([*command, "--resume"]) == 0
    assert "time      1 h 2 min in steps, over all starts; " in capsys.readouterr().out
    timings = json.loads((run / "report.json").read_text())["timings"]
    assert 3723 < timings["training_seconds"] < 3783
    assert timings["total_seconds"] < 600
    page = (run / "report.html").read_text()
    assert "<dt>All steps took</dt><dd>1 h 2 min" in page and "Last command took" in page
