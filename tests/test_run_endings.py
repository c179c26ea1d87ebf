"""How a run ends where something comes between: a second signal, a folder that goes away, a result that is worse."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
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
