"""What a run delivers: the best weights of every kind of adapter, read back and measured, whatever fails after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from uphill import eval_losses, make_parts, read, write_uphill

from finetune.cli import main
from finetune.errors import EnvironmentProblem, ExitCode
from finetune.run.best import read_best
from finetune.run.html import render_html
from finetune.run.metrics import read_metrics
from finetune.run.samples import SampleAnswer
from finetune.trainer.callbacks.tracker import TrackerCallback
from finetune.trainer.generate import Generator
from finetune.trainer.sft import SftTrainer

FILE = "adapter_model.safetensors"
NEW = {"new_tokens": ["say"], "new_special_tokens": ["<|tool|>"]}
LORA = {"type": "lora", "rank": 4, "alpha": 8}
READ_BACK = "the delivered weights are read back"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("delivery"))


def write(parts: Path, folder: Path, *, adapter: dict[str, Any], model: dict[str, Any], **evaluation: Any) -> Path:
    """A run of which every step is evaluated."""
    return write_uphill(
        parts,
        folder,
        adapter=adapter,
        model={"path": str(parts / "qwen3"), "device": "cpu", **model},
        evaluation={"every_steps": 1, "samples": 0, **evaluation},
    )


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ({}, {"modules_to_save": ["norm"]}),
        ({}, {"modules_to_save": ["embed_tokens"]}),
        (NEW, {}),
        ({}, {"dora": True}),
        ({"quantization": "int8"}, {}),
        (NEW, {"dora": True, "modules_to_save": ["norm"]}),
    ],
    ids=["norm", "embeddings", "tokens", "dora", "int8", "dora-norm-tokens"],
)
def test_best_and_last_of_each_kind_of_adapter(
    parts: Path, tmp_path: Path, model: dict[str, Any], adapter: dict[str, Any]
) -> None:
    """P50: both are there, of the steps that are told, and stock PEFT loads both."""
    recipe = write(parts, tmp_path, adapter=LORA | adapter, model=model)
    arguments = ["output.keep_checkpoints=12", "output.save_every_steps=1", "output.deliver=best"]
    if adapter == {"dora": True}:
        arguments.append("training.learning_rate=0.2")  # at less, its loss does not rise
    assert main(["train", str(recipe), *arguments]) == 0
    run = tmp_path / "run"
    result, losses = read(run / "result.json"), eval_losses(run)
    best_step = min(losses, key=lambda step: losses[step])
    assert (result["best"]["step"], result["last"]["step"]) == (best_step, 12) and best_step < 12
    assert {check["name"]: check["ok"] for check in read(run / "report.json")["checks"]}[READ_BACK] is True
    delivered = load_file(run / "adapter" / FILE)
    for part in ("best", "last"):
        saved = load_file(Path(result[part]["path"]) / FILE)
        checkpoint = load_file(run / f"checkpoints/checkpoint-{result[part]['step']}" / FILE)
        assert saved.keys() == checkpoint.keys() == delivered.keys()
        assert all(torch.equal(saved[name], checkpoint[name]) for name in saved)
        assert all(torch.equal(saved[name], delivered[name]) for name in saved) == (part == "best")
        load_with_stock_peft(parts / "qwen3", Path(result[part]["path"]), is_int8="quantization" in model)


def load_with_stock_peft(base: Path, adapter: Path, *, is_int8: bool) -> None:
    config = BitsAndBytesConfig(load_in_8bit=True) if is_int8 else None
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map={"": "cpu"})
    rows = len(AutoTokenizer.from_pretrained(adapter))
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    PeftModel.from_pretrained(model, adapter)


@pytest.mark.parametrize(
    ("model", "adapter"),
    [({}, LORA), (NEW, LORA | {"dora": True, "modules_to_save": ["norm"]}), ({}, {"type": "none"})],
    ids=["lora", "dora-norm-tokens", "full"],
)
def test_best_weights_that_are_not_read_back_stop_the_run(
    parts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    adapter: dict[str, Any],
) -> None:
    """At a rate so small that the losses of all steps are alike: the weights have to be compared themselves."""
    monkeypatch.setattr(SftTrainer, "load_weights", lambda self, folder: None)
    recipe = write(parts, tmp_path, adapter=adapter, model=model)
    arguments = ["output.deliver=best", "training.learning_rate=1.0e-6", "training.max_steps=4"]
    # The losses differ by next to nothing; the second is made the lowest.
    evaluated = SftTrainer.held_out_loss

    def second_is_best(self: SftTrainer) -> dict[str, float]:
        figures = evaluated(self)
        return figures | {"loss": figures["loss"] - 0.01 * (self.state.global_step == 2)}

    monkeypatch.setattr(SftTrainer, "held_out_loss", second_is_best)
    assert main(["train", str(recipe), *arguments]) == ExitCode.GATE
    assert "best weights were not read back" in capsys.readouterr().err
    assert read(tmp_path / "run/result.json")["best"]["step"] == 2
    assert read(tmp_path / "run/run.json")["status"] == "stopped"


def test_the_best_weights_are_kept_before_an_answer_fails(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Generator, prompts: Any) -> list[str]:
        raise EnvironmentProblem("no memory", place="generation", remedy="none")

    monkeypatch.setattr(Generator, "answer", fail)
    recipe = write(parts, tmp_path, adapter=LORA, model={}, samples=1, at_start=False)
    assert main(["train", str(recipe)]) == ExitCode.ENVIRONMENT
    best = read_best(tmp_path / "run" / "best")
    assert best is not None and best.step == 1


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == kind]


def test_a_run_continued_at_its_last_step_has_one_evaluation_of_it(parts: Path, tmp_path: Path) -> None:
    """The last step was recorded before the run was cut off, and is not recorded again."""
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    raise KeyError('late')\n")
    evaluation = {"metrics": ["./late.py"], "at_start": False, "samples": 1, "max_new_tokens": 4}
    recipe = write(parts, tmp_path, adapter=LORA, model={}, **evaluation)
    arguments = ["train", str(recipe), "output.deliver=best", "training.max_steps=4"]
    assert main(arguments) == ExitCode.RECIPE
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    return 0.25\n")
    assert main([*arguments, "--resume"]) == 0
    run = tmp_path / "run"
    assert [record["step"] for record in records_of(run, "eval")] == [1, 2, 3, 4]
    assert records_of(run, "scores") == [{"kind": "scores", "step": 4, "eval_late": 0.25}]


def test_an_early_stop_with_scores_has_one_evaluation_a_step(parts: Path, tmp_path: Path) -> None:
    evaluation = {"metrics": ["exact_match"], "early_stopping": {"patience": 2}, "max_new_tokens": 4}
    recipe = write(parts, tmp_path, adapter=LORA, model={}, **evaluation)
    assert main(["train", str(recipe), "output.deliver=last"]) == 0
    steps = [record["step"] for record in records_of(tmp_path / "run", "eval")]
    assert steps == list(range(len(steps))) and len(steps) < 12
    assert [record["step"] for record in records_of(tmp_path / "run", "scores")] == steps[-1:]


def test_time_of_evaluations_in_training_is_counted(parts: Path, tmp_path: Path) -> None:
    recipe = write(parts, tmp_path, adapter=LORA, model={}, at_start=False, samples=0)
    assert main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    expected = sum(record["eval_seconds"] for record in records_of(run, "eval"))
    assert expected <= read(run / "report.json")["timings"]["evaluation_seconds"] < 1.5 * expected


def test_the_page_leaves_out_steps_only_where_all_are_told() -> None:
    sample = {"prompt": "p", "reference": None, "before": "b", "after": "a"}
    parts_of_result = {"best": {"step": 2, "eval_loss": 1.0}, "last": {"step": 4, "eval_loss": 2.0}}
    answers = [SampleAnswer(step, "p", None, "x") for step in (0, 4)]
    for delivered, is_shown in (("best", True), ("last", False)):
        report = {"samples": [sample], "summary": {"steps": 4}, "result": parts_of_result | {"delivered": delivered}}
        assert ("Answers over the steps" in render_html(report, [], answers=answers)) == is_shown


class Session(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_log(self, *arguments: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.events.extend(key for key in ("loss", "eval_loss") if key in logs)

    def on_train_end(self, *arguments: Any, **kwargs: Any) -> None:
        self.events.append("finish")


@pytest.mark.parametrize("fails", [False, True])
def test_a_tracker_is_finished_once_and_last(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """P45: the evaluation of the result is in the session of the training, which ends however the run does."""
    session = Session()
    monkeypatch.setattr(
        "finetune.trainer.watch.make_trackers",
        lambda names, folder, say: [TrackerCallback("fake", session, say=say)],
    )
    recipe = write_uphill(parts, tmp_path, training={"max_steps": 2})
    if fails:
        monkeypatch.setattr("finetune.train.check_weights_are_finite", lambda model: 1 / 0)
    assert (main(["train", str(recipe)]) == 0) != fails
    measured = [] if fails else ["eval_loss"]
    assert session.events == ["eval_loss", "loss", "loss", *measured, "finish"]
