"""What the disk damaged, lost or moved is told and made good where it can be, and never keeps a run from going on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from uphill import make_parts, read, write_uphill

from finetune.cli import main
from finetune.errors import ExitCode
from finetune.run.metrics import read_metrics
from finetune.trainer.result import Results

ADAPTER = Path("adapter/adapter_model.safetensors")
LAST_STEP = 6


def fail_at_the_end(recipe: Path, *overrides: str) -> None:
    """Trains all steps, and fails before there is a result."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("finetune.train.check_weights_are_finite", lambda model: 1 / 0)
        assert main(["train", str(recipe), *overrides]) == 1


def write(parts: Path, folder: Path) -> Path:
    """A recipe whose best weights are not the last ones, and are its result."""
    return write_uphill(
        parts,
        folder,
        model={"path": str(parts / "qwen3"), "device": "cpu"},
        adapter={"type": "lora", "rank": 4, "alpha": 8},
        training={"max_steps": LAST_STEP, "learning_rate": 0.1},
        evaluation={"every_steps": 2, "samples": 1, "max_new_tokens": 4, "early_stopping": {"patience": 9}},
        output={"dir": str(folder / "run"), "save_every_steps": 2, "keep_checkpoints": 3, "deliver": "best"},
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def original(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    fail_at_the_end(write(parts, folder))
    assert best_checkpoint(folder / "run").name in ("checkpoint-2", "checkpoint-4")
    return folder / "run"


@pytest.fixture(scope="module")
def whole(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run continued from undamaged files."""
    run = shutil.copytree(original, tmp_path_factory.mktemp("whole") / "run")
    assert resume(run) == 0
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run")


def resume(run: Path, *more: str) -> int:
    return main(["train", str(run / "recipe.yaml"), "--resume", *more])


def best_checkpoint(run: Path) -> Path:
    """The checkpoint of the best step, which the record tells."""
    return run / f"checkpoints/checkpoint-{read(run / 'best/best.json')['step']}"


def junk(path: Path) -> None:
    path.write_bytes(b"\xff" + os.urandom(path.stat().st_size - 1))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "best.json", "complete.json"], ids=["weights", "record", "marker"]
)
@pytest.mark.parametrize("damage", [junk, cut])
def test_damaged_best_weights_come_from_the_checkpoint_of_their_step(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    """Damage of full size was delivered; a damaged record ended in a traceback."""
    source = best_checkpoint(run).name
    damage(run / "best" / name)
    assert resume(run) == 0
    told = flat(capsys.readouterr().err)
    assert f"{run}/best is damaged" in told and f"made again from {source}" in told
    assert (run / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert (run / "last" / ADAPTER.name).read_bytes() == (whole / "last" / ADAPTER.name).read_bytes()
    assert read(run / "result.json")["best"]["eval_loss"] == read(whole / "result.json")["best"]["eval_loss"]


def test_damaged_best_weights_that_no_checkpoint_holds_are_forgotten(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(best_checkpoint(run))
    junk(run / "best/adapter_model.safetensors")
    assert resume(run) == 0
    assert "from here on" in flat(capsys.readouterr().err)
    result = read(run / "result.json")
    assert result["best"]["step"] == LAST_STEP and result["path"] == result["last"]["path"]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_best_weights_damaged_while_training_are_not_delivered(
    run: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_checkpoint: bool
) -> None:
    finish = Results.finish

    def damage_then_finish(self: Results, eval_loss: float | None) -> dict:
        junk(run / "best/adapter_model.safetensors")
        if not has_checkpoint:
            shutil.rmtree(best_checkpoint(run))
        return finish(self, eval_loss)

    monkeypatch.setattr(Results, "finish", damage_then_finish)
    assert resume(run) == 0
    assert "is damaged" in flat(capsys.readouterr().err)
    result = read(run / "result.json")
    if has_checkpoint:
        assert (run / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    else:
        assert (run / ADAPTER).read_bytes() == (whole / "last" / ADAPTER.name).read_bytes()
        assert result["best"]["step"] == result["last"]["step"] == LAST_STEP and not (run / "last").exists()


@pytest.mark.parametrize("damage", [junk, cut, lambda path: path.write_text('{"loss": "x"}')])
def test_a_damaged_measurement_of_before_is_read_from_the_metrics(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    damage(run / "before.json")
    assert resume(run) == 0
    assert "before.json is damaged" in flat(capsys.readouterr().err)
    told, known = read(run / "report.json"), read(whole / "report.json")
    assert told["summary"]["eval_loss_before"] == known["summary"]["eval_loss_before"] is not None
    assert told["samples"][0]["before"] is None and known["samples"][0]["before"] is not None


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_damaged_checkpoint_without_checksums_is_passed_over(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It ended in a traceback of the reader, on every try."""
    checkpoint = run / "checkpoints/checkpoint-6"
    marker = read(checkpoint / "complete.json")
    del marker["checksums"]
    (checkpoint / "complete.json").write_text(json.dumps(marker))
    junk(checkpoint / name)
    assert resume(run) == 0
    told = flat(capsys.readouterr().out)
    assert f"checkpoint-6 is passed over: {name} is damaged" in told and "continuing from checkpoint-4" in told
    assert (run / "last" / ADAPTER.name).read_bytes() == (whole / "last" / ADAPTER.name).read_bytes()


def test_lost_lines_of_the_metrics_are_told_and_written_again(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without some of its lines was taken as it was, and early stopping counted what was left."""
    path = run / "metrics.jsonl"
    before = path.read_text()
    kept = [record for record in read_metrics(path) if record["step"] not in (3, 4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert resume(run) == 0
    assert "metrics.jsonl had lost lines of steps 3, 4" in flat(capsys.readouterr().err)
    assert path.read_text().startswith(before)
    assert resume(whole) == ExitCode.RECIPE and "had lost" not in capsys.readouterr().err


@pytest.fixture
def project(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model, data, recipe and run, which has moved."""
    old = tmp_path / "old"
    shutil.copytree(parts, old)
    fail_at_the_end(write(old, old))
    old.rename(tmp_path / "new")
    recipe = tmp_path / "new/recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(old), str(tmp_path / "new")))
    return tmp_path / "new"


def test_a_project_that_moved_as_a_whole_is_continued(project: Path) -> None:
    """It was another recipe: model.path, data.train[0].path and data.eval[0].path differ."""
    assert main(["train", str(project / "recipe.yaml"), "--resume"]) == 0
    assert read(project / "run/run.json")["status"] == "done"


def test_a_moved_run_is_not_continued_on_another_model_or_other_data(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(project / "recipe.yaml")
    capsys.readouterr()
    assert main(["train", recipe, f"model.path={project / 'qwen3_moe'}", "--resume", "--json"]) == ExitCode.RECIPE
    told = json.loads(capsys.readouterr().out)
    assert told["message"].endswith(": model.path") and "is not what the run began with" in told["remedy"]
    with (project / "train.jsonl").open("a") as stream:
        stream.write((project / "unlike.jsonl").read_text())
    assert main(["train", recipe, "--resume", "--json"]) == ExitCode.DATA


def test_a_run_that_recorded_no_inputs_says_how_to_go_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read(project / "run/run.json")
    del manifest["inputs"]
    (project / "run/run.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["train", str(project / "recipe.yaml"), "--resume", "--json"]) == ExitCode.RECIPE
    remedy = json.loads(capsys.readouterr().out)["remedy"]
    link = remedy.partition("ln -s ")[2].splitlines()[0].split()
    assert link == [str(project / "qwen3"), str(project.parent / "old/qwen3")]
    (project.parent / "old").mkdir()
    os.symlink(*link)
    recipe = project / "recipe.yaml"
    values = yaml.safe_load(recipe.read_text())
    values["model"]["path"] = link[1]
    recipe.write_text(yaml.safe_dump(values))
    assert main(["train", str(recipe), "--resume", "--dry-run"]) == 0


def test_where_a_run_is_continued_is_said_once_nothing_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(run, "training.seed=5") == ExitCode.RECIPE
    assert "is continued" not in capsys.readouterr().out
    assert resume(run, "--dry-run") == 0
    assert f"the run in {run} is continued" in flat(capsys.readouterr().out)
