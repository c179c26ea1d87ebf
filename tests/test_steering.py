"""Steering through the command line: best and last weights, early stopping, samples, trackers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from uphill import eval_losses, make_parts, read, write_recipe, write_uphill

from finetune.cli import main
from finetune.errors import ExitCode
from finetune.run.metrics import read_metrics


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("steering"))


@pytest.mark.parametrize("deliver", ["best", "last"])
def test_best_and_last_are_kept_and_named(parts: Path, tmp_path: Path, deliver: str) -> None:
    """P50: one checkpoint is kept, the best evaluation is an early one, and both sets of weights are there."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = write_uphill(parts, tmp_path, training={"max_steps": 6}, evaluation={"every_steps": 1, "samples": 1})
    arguments = ["output.keep_checkpoints=1", "output.save_every_steps=1", f"output.deliver={deliver}"]
    assert main(["train", str(recipe), *arguments]) == 0
    run = tmp_path / "run"
    result, report, losses = read(run / "result.json"), read(run / "report.json"), eval_losses(run)
    assert result["delivered"] == deliver
    best_step = min(losses, key=lambda step: losses[step])
    assert best_step < 6, "the last weights are to be worse than earlier ones"
    assert (result["best"]["step"], result["best"]["eval_loss"]) == (best_step, losses[best_step])
    assert (result["last"]["step"], result["last"]["eval_loss"]) == (6, losses[6])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-6"]
    last = load_file(run / "checkpoints/checkpoint-6/adapter_model.safetensors")
    weights = {name: load_file(Path(result[name]["path"]) / "adapter_model.safetensors") for name in ("best", "last")}
    delivered = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(weights["last"][name], last[name]) for name in last)
    assert all(torch.equal(delivered[name], weights[deliver][name]) for name in last)
    assert any(not torch.equal(weights["best"][name], last[name]) for name in last)
    assert report["summary"]["eval_loss_after"] == result[deliver]["eval_loss"]
    named = [artifact["weights"] for artifact in report["artifacts"]]
    assert named == ([deliver, "best", "last"] if deliver == "best" else [deliver, "best"])
    for part in ("best", "last"):  # each is a folder that stock PEFT and transformers load
        base = AutoModelForCausalLM.from_pretrained(parts / "qwen3")
        PeftModel.from_pretrained(base, result[part]["path"])
        assert AutoTokenizer.from_pretrained(result[part]["path"]).chat_template


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_full_run_delivers_its_best_model(parts: Path, tmp_path: Path, kind: str) -> None:
    """The best weights are read back and give the loss that they were chosen by, or the run would stop."""
    from transformers import AutoModelForCausalLM

    recipe = write_uphill(parts, tmp_path, kind, adapter={"type": "none"}, evaluation={"every_steps": 1})
    assert main(["train", str(recipe), "output.deliver=best"]) == 0
    run = tmp_path / "run"
    result = read(run / "result.json")
    assert result["best"]["step"] < 12
    checks = {check["name"]: check["ok"] for check in read(run / "report.json")["checks"]}
    assert checks["the delivered weights are the ones measured"] is True
    _, info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"]


@pytest.mark.parametrize(("patience", "said"), [(1, "in 1 evaluation"), (2, "in 2 evaluations")])
def test_a_run_that_gets_no_better_ends_early(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], patience: int, said: str
) -> None:
    evaluation = {"every_steps": 1, "early_stopping": {"patience": patience}}
    recipe = write_uphill(parts, tmp_path, evaluation=evaluation)
    assert main(["train", str(recipe), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    run = tmp_path / "run"
    result, losses = read(run / "result.json"), eval_losses(run)
    assert outcome["status"] == read(run / "run.json")["status"] == "early-stopped"
    assert f"after step {max(losses)} of 12" in outcome["message"] and outcome["message"].endswith(said)
    assert max(losses) == result["last"]["step"] == result["best"]["step"] + patience < 12
    assert result["delivered"] == "best"
    assert (run / "checkpoints" / f"checkpoint-{max(losses)}" / "complete.json").is_file()
    assert main(["train", str(recipe), "--resume"]) == ExitCode.RECIPE


def test_a_run_cut_off_after_its_early_stop_takes_no_step_more(parts: Path, tmp_path: Path) -> None:
    evaluation = {"every_steps": 1, "early_stopping": {"patience": 2}, "metrics": ["./late.py"], "at_start": False}
    recipe = write_uphill(parts, tmp_path, evaluation=evaluation)
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    raise KeyError('late')\n")
    assert main(["train", str(recipe)]) == ExitCode.RECIPE
    run = tmp_path / "run"
    before = read(run / "result.json")
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    return 1.0\n")
    assert main(["train", str(recipe), "--resume"]) == 0
    assert read(run / "result.json") == before
    assert read(run / "run.json")["status"] == "early-stopped"


def test_a_continued_run_has_the_best_and_the_count_of_an_unbroken_one(parts: Path, tmp_path: Path) -> None:
    """The run is killed after the best weights were kept and before it would end early."""
    evaluation = {"every_steps": 1, "early_stopping": {"patience": 3}, "prompts": ["say: red"], "samples": 1}
    straight = write_uphill(parts, tmp_path / "straight", evaluation=evaluation)
    assert main(["train", str(straight)]) == 0
    expected = read(tmp_path / "straight/run/result.json")
    broken = write_uphill(parts, tmp_path / "broken", evaluation=evaluation)
    kill_at = expected["last"]["step"] - 1
    program = (
        "import os, signal, sys\n"
        "from finetune.trainer.evaluation import Evaluator\n"
        "sample = Evaluator.sample\n"
        "def kill(self, step, loss):\n"
        f"    sample(self, step, loss)\n    step == {kill_at} and os.kill(os.getpid(), signal.SIGKILL)\n"
        "Evaluator.sample = kill\n"
        "from finetune.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "train", str(broken), "output.save_every_steps=1"]
    assert subprocess.run(command, capture_output=True).returncode == -9
    assert main(["train", str(broken), "output.save_every_steps=1", "--resume"]) == 0
    result = read(tmp_path / "broken/run/result.json")
    for part in ("best", "last"):
        assert (result[part]["step"], result[part]["eval_loss"]) == (
            expected[part]["step"],
            expected[part]["eval_loss"],
        )
    samples = [read_metrics(tmp_path / name / "run/samples.jsonl") for name in ("straight", "broken")]
    assert samples[0] == samples[1]


def test_samples_are_kept_at_every_evaluation(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"every_steps": 2, "samples": 2, "prompts": ["say: cat dog"], "max_new_tokens": 6}
    assert main(["train", str(write_recipe(parts, tmp_path, evaluation=evaluation))]) == 0
    run = tmp_path / "run"
    records = read_metrics(run / "samples.jsonl")
    assert [record["step"] for record in records] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    assert all(record.keys() == {"step", "prompt", "reference", "answer"} for record in records)
    own = [record for record in records if record["prompt"] == "say: cat dog"]
    assert [record["reference"] for record in own] == [None] * 3
    held_out = [json.loads(line)["messages"][1]["content"] for line in (parts / "eval.jsonl").read_text().splitlines()]
    assert [record["reference"] for record in records[:2]] == held_out[:2]
    samples = read(run / "report.json")["samples"]
    assert samples[2]["steps"] == [{"step": record["step"], "answer": record["answer"]} for record in own]
    assert (samples[2]["before"], samples[2]["after"]) == (own[0]["answer"], own[2]["answer"])
    assert "Answers over the steps" in (run / "report.html").read_text()
    assert "sample at step 2: say: cat dog -> " in capsys.readouterr().out


def test_a_sample_is_told_without_the_marks_of_the_template(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line showed the held-out prompt as it was rendered, from its `<|im_start|>` on."""
    evaluation = {"every_steps": 2, "samples": 1, "max_new_tokens": 6}
    assert main(["train", str(write_recipe(parts, tmp_path, evaluation=evaluation))]) == 0
    asked = json.loads((parts / "eval.jsonl").read_text().splitlines()[0])["messages"][0]["content"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sample at step 2: ")]
    assert line.startswith(f"sample at step 2: {asked} -> ")
    assert "<|" not in line


def test_own_prompts_need_no_held_out_data(parts: Path, tmp_path: Path) -> None:
    recipe = write_recipe(parts, tmp_path, evaluation={"prompts": ["say: cat", "say: dog"], "max_new_tokens": 4})
    assert main(["train", str(recipe), "data.eval=null"]) == 0
    records = read_metrics(tmp_path / "run" / "samples.jsonl")
    assert [(record["step"], record["prompt"]) for record in records] == [
        (0, "say: cat"),
        (0, "say: dog"),
        (4, "say: cat"),
        (4, "say: dog"),
    ]


def test_own_prompts_are_rendered_as_training_data(parts: Path) -> None:
    from tiny import make_tokenizer

    from finetune.data.references import render_prompts

    tokenizer = make_tokenizer()
    (prompt,) = render_prompts(["say: cat"], tokenizer=tokenizer, date=None)
    assert tokenizer.decode(prompt.prompt_ids) == "<|im_start|>user\nsay: cat<|im_end|>\n<|im_start|>assistant\n"
    (plain,) = render_prompts(["say: cat"], tokenizer=make_tokenizer(template=None), date=None)
    assert tokenizer.decode(plain.prompt_ids) == "say: cat"


def test_a_prompt_that_fills_a_row_is_refused(parts: Path, tmp_path: Path) -> None:
    recipe = write_recipe(parts, tmp_path, evaluation={"prompts": ["word " * 200]})
    assert main(["train", str(recipe)]) == ExitCode.RECIPE
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_refused_at_once(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P45: the line to type is in the error, before torch is imported."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = write_recipe(parts, tmp_path)
    assert main(["train", str(recipe), "output.trackers=[trackio]", "--json"]) == ExitCode.ENVIRONMENT
    assert "pip install trackio" in json.loads(capsys.readouterr().out)["remedy"]
    assert not (tmp_path / "run").exists()


def make_trackio(site: Path, *, more: str = "") -> None:
    """A package that notes what trackio's callback of transformers calls in the file that `NOTES` names.

    Args:
        more: lines of the package's `init`.
    """
    package = site / "trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import atexit, os\nfrom types import SimpleNamespace\n__version__ = '1.0'\n"
        "def _note(text):\n    with open(os.environ['NOTES'], 'a') as stream:\n        stream.write(text + '\\n')\n"
        "def init(**options):\n    _note(f\"init {options['name']} in {options['project']}, {options['space_id']}\")\n"
        f"{more}"
        "context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))\n"
        "class Config(dict):\n    def update(self, *_, **__):\n        pass\nconfig = Config()\n"
        "def log(values, *_, **__):\n    _note('log ' + ' '.join(sorted(values)))\n"
        "def finish():\n    _note('finish')\n"
    )


@pytest.mark.parametrize("is_named", [True, False])
def test_a_tracker_gets_the_metrics_only_where_it_is_named(parts: Path, tmp_path: Path, is_named: bool) -> None:
    """P45: with trackio installed and its variables set, only a recipe that names it starts it."""
    make_trackio(tmp_path / "site")
    notes = tmp_path / "notes"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), *filter(None, sys.path))),
        "NOTES": str(notes),
        "TRACKIO_PROJECT": "somewhere",
    }
    command = [sys.executable, "-m", "finetune", "train", str(write_recipe(parts, tmp_path))]
    command += ["output.trackers=[trackio]"] if is_named else []
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    text = notes.read_text() if notes.exists() else ""
    assert ("init run in finetune, None" in text) == is_named
    assert (text.count("train/loss") >= 4) == is_named
    if is_named:  # one session, which holds the evaluation after training too
        lines = text.splitlines()
        assert text.count("init ") == text.count("finish") == 1 and lines[-1] == "finish"
        assert [line for line in lines if "eval/loss" in line or "eval_loss" in line]


def test_what_a_tracker_prints_does_not_mix_with_the_result(parts: Path, tmp_path: Path) -> None:
    """Some trackers print when they begin and when the process ends; `--json` promises one object on stdout."""
    make_trackio(
        tmp_path / "site",
        more="    print('printed in Python')\n    os.write(1, b'written below it\\n')\n"
        "    os.system('echo by a program')\n    atexit.register(print, 'printed at the exit')\n",
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), *filter(None, sys.path))),
        "NOTES": str(tmp_path / "notes"),
    }
    command = [sys.executable, "-m", "finetune", "train", str(write_recipe(parts, tmp_path)), "--json"]
    done = subprocess.run([*command, "output.trackers=[trackio]"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["status"] == "done"
    for printed in ("printed in Python", "written below it", "by a program", "printed at the exit"):
        assert done.stderr.count(printed) == 1, printed
