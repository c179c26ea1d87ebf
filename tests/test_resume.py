"""A run is continued where it lies, from what can be read, and leaves the same files as one that was not stopped."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.cli import main
from finetune.errors import ExitCode
from finetune.trainer.ending import Ending
from finetune.trainer.evaluation import Evaluator
from finetune.trainer.result import Results


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    make_model_folder(root / "qwen3", "qwen3")
    make_chat_file(root / "train.jsonl", rows=40)
    make_chat_file(root / "eval.jsonl", rows=6, seed=9)
    return root


def write_recipe(parts: Path, folder: Path, **sections: dict) -> Path:
    """Writes a recipe whose `output.dir` is relative, as most are."""
    training = {"max_steps": 6} | sections.pop("training", {})
    recipe = make_recipe(parts / "qwen3", parts / "train.jsonl", Path("one"), training=training, **sections)
    recipe["data"] |= {"max_length": 128}
    if "evaluation" in sections:
        recipe["data"]["eval"] = [{"path": str(parts / "eval.jsonl")}]
    recipe["output"] |= {"save_every_steps": 2, "keep_checkpoints": 3}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def fail_at_the_end(*arguments: str) -> None:
    """Trains all steps, and fails before there is a result."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("finetune.train.check_weights_are_finite", lambda model: 1 / 0)
        assert main(["train", *arguments]) == 1


@pytest.fixture
def stopped(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run in `one` that has checkpoints and no result."""
    monkeypatch.chdir(tmp_path)
    fail_at_the_end(str(write_recipe(parts, tmp_path)))
    return tmp_path


def status_of(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["status"]


def adapter_of(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("spelling", ["./one", "one/", "{cwd}/one", "../{name}/one"])
def test_a_folder_may_be_spelled_in_any_way(stopped: Path, spelling: str) -> None:
    """It was compared as text, and another spelling was another run."""
    folder = spelling.format(cwd=stopped, name=stopped.name)
    assert main(["train", "mine.yaml", f"output.dir={folder}", "--resume"]) == 0
    assert status_of(stopped / "one") == "done"


@pytest.mark.parametrize("override", [[], ["output.dir=two"]], ids=["as-it-lies", "named"])
def test_a_copied_run_is_continued_itself(
    stopped: Path, capsys: pytest.CaptureFixture[str], override: list[str]
) -> None:
    """The recipe of the copy continued the original, without a word."""
    shutil.copytree(stopped / "one", stopped / "two")
    capsys.readouterr()
    assert main(["train", "two/recipe.yaml", *override, "--resume", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert str(stopped / "two" if not override else "two") in shown.out.splitlines()[-1]
    assert ("its output.dir says one" in shown.out) == (not override)
    assert main(["train", "two/recipe.yaml", *override, "--resume"]) == 0
    assert (status_of(stopped / "two"), status_of(stopped / "one")) == ("done", "failed")
    report = json.loads((stopped / "two" / "report.json").read_text())
    assert all(Path(artifact["path"]).is_relative_to(stopped / "two") for artifact in report["artifacts"])


def test_a_moved_run_is_continued_from_any_folder(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was "no run in this folder": output.dir was read from the current one."""
    (stopped / "deep").mkdir()
    (stopped / "one").rename(stopped / "deep" / "two")
    elsewhere = stopped / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["train", "../deep/two/recipe.yaml", "--resume"]) == 0
    assert status_of(stopped / "deep" / "two") == "done"
    assert list(elsewhere.iterdir()) == []


def test_an_edited_recipe_is_refused_also_in_a_copy(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(stopped / "one", stopped / "two")
    recipe = stopped / "two" / "recipe.yaml"
    values = yaml.safe_load(recipe.read_text())
    values["training"]["learning_rate"] *= 2
    recipe.write_text(yaml.safe_dump(values))
    capsys.readouterr()
    assert main(["train", "two/recipe.yaml", "--resume", "--json"]) == ExitCode.RECIPE
    assert "edited" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "meter.json"]
)
def test_a_damaged_checkpoint_of_full_size_is_passed_over(
    stopped: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It ended in a traceback of the reader."""
    shutil.copytree(stopped / "one", stopped / "two")
    assert main(["train", "two/recipe.yaml", "--resume"]) == 0
    damaged = stopped / "one" / "checkpoints" / "checkpoint-6" / name
    damaged.write_bytes(os.urandom(damaged.stat().st_size))
    capsys.readouterr()
    assert main(["train", "mine.yaml", "--resume"]) == 0
    shown = capsys.readouterr().out
    assert f"checkpoint-6 is passed over: {name} was damaged" in shown
    assert "continuing from checkpoint-4" in shown
    assert adapter_of(stopped / "one") == adapter_of(stopped / "two")


def test_samples_of_a_step_that_is_measured_again_replace_the_first(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed after its result was measured had the answers of the last step twice."""
    monkeypatch.chdir(tmp_path)
    measure_result = Evaluator.measure_result

    def fail_after(self: Evaluator, ending: Ending) -> None:
        measure_result(self, ending)
        raise ZeroDivisionError

    recipe = write_recipe(parts, tmp_path, evaluation={"every_steps": 3, "samples": 2, "max_new_tokens": 4})
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "measure_result", fail_after)
        assert main(["train", str(recipe)]) == 1
    samples = tmp_path / "one" / "samples.jsonl"
    before = [json.loads(line) for line in samples.read_text().splitlines()]
    assert Counter(record["step"] for record in before) == {0: 2, 3: 2, 6: 2}
    samples.write_text("".join(json.dumps(record) + "\n" for record in before[:-1]))  # killed between two lines
    assert main(["train", str(recipe), "--resume"]) == 0
    assert [json.loads(line) for line in samples.read_text().splitlines()] == before


def test_ctrl_c_after_the_last_step_says_that_training_was_finished(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `outside the training loop`."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(Results, "finish", interrupt)
        assert main(["train", "mine.yaml", "--resume", "--json"]) == ExitCode.INTERRUPTED
    told = json.loads(capsys.readouterr().out)
    assert "result was being written" in told["message"] and "training was finished" in told["message"]
    assert status_of(stopped / "one") == "interrupted"
    assert main(["train", "mine.yaml", "--resume"]) == 0


def limit_files(num_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("num_kib", [20, 60], ids=["the-adapter", "the-optimizer"])
def test_a_limit_of_file_sizes_ends_a_run_as_a_full_disk_does(parts: Path, tmp_path: Path, num_kib: int) -> None:
    """In the middle of a checkpoint torch and safetensors have errors of their own, which were told as tracebacks."""
    write_recipe(parts, tmp_path)
    command = [sys.executable, "-m", "finetune", "train", "mine.yaml", "data.cache=false", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        preexec_fn=limit_files(num_kib << 10), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == ExitCode.ENVIRONMENT, done.stderr
    assert "Traceback" not in done.stderr
    assert "file size limit" in json.loads(done.stdout)["message"]
    assert status_of(tmp_path / "one") == "failed"
