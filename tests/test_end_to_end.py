"""Runs through the command line: what a run folder holds, stopping and continuing, adapters that stock PEFT loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from tiny import CHATML, make_chat_file, make_model_folder, make_recipe, make_tokenizer

from finetune.cli import main
from finetune.errors import ExitCode
from finetune.run.metrics import read_metrics


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("end_to_end")
    for kind in ("qwen3", "qwen3_moe", "gpt_oss"):
        make_model_folder(root / kind, kind)
    make_chat_file(root / "train.jsonl", rows=40)
    make_chat_file(root / "eval.jsonl", rows=6, seed=9)
    return root


def write_recipe(parts: Path, folder: Path, kind: str = "qwen3", **sections: dict) -> Path:
    recipe = make_recipe(parts / kind, parts / "train.jsonl", folder / "run", **sections)
    recipe["data"] |= {"max_length": 128, "packing": kind != "gpt_oss", "eval": [{"path": str(parts / "eval.jsonl")}]}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def test_a_run_folder_is_whole(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"every_steps": 2, "metrics": ["exact_match"], "samples": 2, "max_new_tokens": 8}
    recipe = write_recipe(parts, tmp_path, evaluation=evaluation)
    assert main(["train", str(recipe), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    run = tmp_path / "run"
    assert outcome["status"] == "done"
    assert outcome["run_dir"] == str(run)
    report = json.loads((run / "report.json").read_text())
    assert report["scores"]["exact_match"]["rows"] == 6
    assert report["samples"][0].keys() == {"prompt", "reference", "before", "after", "steps"}
    assert report["checks"][0]["ok"] is True
    assert report["plan"]["total_steps"] == 4
    assert "<html" in (run / "report.html").read_text()
    assert {"recipe.yaml", "environment.json", "metrics.jsonl", "curves.png", "checkpoints"} <= set(os.listdir(run))
    metrics = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2, 3, 4]
    assert [record["step"] for record in metrics if record["kind"] == "eval"] == [0, 2, 4]
    assert (run / "checkpoints" / "checkpoint-4" / "complete.json").is_file()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_stock_peft_loads_the_adapter(parts: Path, tmp_path: Path, kind: str) -> None:
    """The saved folder, through PEFT and transformers alone, gives the held-out loss that the run reported."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    assert main(["train", str(write_recipe(parts, tmp_path, kind))]) == 0
    run = tmp_path / "run"
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    last = load_file(run / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors")
    assert saved.keys() == last.keys()
    assert all(torch.equal(saved[name], last[name]) for name in saved)
    base = AutoModelForCausalLM.from_pretrained(parts / kind, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, run / "adapter").eval()
    assert len([name for name in model.state_dict() if "lora_" in name]) == len(saved)
    reported = json.loads((run / "report.json").read_text())["summary"]["eval_loss_after"]
    assert _chatml_loss(model, parts / "eval.jsonl") == pytest.approx(reported, rel=1e-5)
    with model.disable_adapter():
        assert _chatml_loss(model, parts / "eval.jsonl") != pytest.approx(reported, rel=1e-3)


def _chatml_loss(model: torch.nn.Module, path: Path) -> float:
    """Mean loss over the answers and their end tokens, one conversation at a time, with nothing of ours."""
    total, count = 0.0, 0
    tokenizer = make_tokenizer()
    for line in path.read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(assistant["content"] + "<|im_end|>", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt_ids + answer_ids]), use_cache=False).logits[0].float()
        predicted = logits[len(prompt_ids) - 1 : -1]
        total += torch.nn.functional.cross_entropy(predicted, torch.tensor(answer_ids), reduction="sum").item()
        count += len(answer_ids)
    return total / count


def test_a_full_run_saves_a_model_that_transformers_loads(parts: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["train", str(write_recipe(parts, tmp_path, adapter={"type": "none"}))]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template
    base = AutoModelForCausalLM.from_pretrained(parts / "qwen3")
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)


def test_a_base_model_trained_on_chat_stops_at_its_turns_end(parts: Path, tmp_path: Path) -> None:
    """P18: tokenizer and config of the base end with <|endoftext|>, turns end with <|im_end|>."""
    base = make_model_folder(tmp_path / "base", "llama", eos_token_id=256)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(base)
    recipe = write_recipe(parts, tmp_path, adapter={"type": "none"})
    for loss_on in ("assistant", "all"):  # with all, the last learned token is the line break after the turn
        arguments = [f"model.path={base}", f"data.loss_on={loss_on}", f"output.dir={tmp_path / loss_on}"]
        assert main(["train", str(recipe), *arguments]) == 0
        saved = json.loads((tmp_path / loss_on / "model" / "generation_config.json").read_text())
        assert saved["eos_token_id"] == [256, 258]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_full_run_saves_the_config_that_it_loaded(parts: Path, tmp_path: Path, kind: str) -> None:
    """A config left as in training makes a plain batched `generate` of the saved mixture of experts fail."""
    from transformers import AutoModelForCausalLM

    assert main(["train", str(write_recipe(parts, tmp_path, kind, adapter={"type": "none"}))]) == 0
    base = json.loads((parts / kind / "config.json").read_text())
    for folder in ("model", "checkpoints/checkpoint-4"):
        saved = json.loads((tmp_path / "run" / folder / "config.json").read_text())
        names = ("use_cache", "output_router_logits", "router_aux_loss_coef")
        assert {name: saved.get(name) for name in names} == {name: base.get(name) for name in names}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokens = torch.arange(24).view(2, 12)
    assert model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3).shape[0] == 2


def test_a_dry_run_writes_nothing(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(parts, tmp_path)
    assert main(["train", str(recipe), "--dry-run", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["status"] == "dry-run"
    assert outcome["plan"]["total_steps"] == 4
    assert outcome["trained"]["trainable_parameters"] > 0
    assert not (tmp_path / "run").exists()


def test_random_weights_need_only_a_config(parts: Path, tmp_path: Path) -> None:
    make_model_folder(tmp_path / "bare", "llama", weights=False)
    recipe = write_recipe(parts, tmp_path)
    arguments = [f"model.path={tmp_path / 'bare'}", "model.init=random", "model.quantization=nf4"]
    assert main(["train", str(recipe), *arguments]) == 0
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    assert losses[-1] < losses[0]


def test_a_users_metric_is_scored(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def score(prediction, reference):\n    return float(len(reference) > 0)\n")
    evaluation = {"metrics": ["./length.py"], "max_new_tokens": 2}
    assert main(["train", str(write_recipe(parts, tmp_path, evaluation=evaluation))]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["scores"]["length"] == {"before": 1.0, "after": 1.0, "rows": 6}


def test_nothing_touches_the_network(parts: Path, tmp_path: Path) -> None:
    """P44: a run from local folders, in a process where opening any connection raises."""
    recipe = write_recipe(parts, tmp_path)
    program = (
        "import socket, sys\n"
        "def refuse(*arguments):\n    raise AssertionError(f'connect to {arguments[1:]}')\n"
        "socket.socket.connect = socket.socket.connect_ex = refuse\n"
        "socket.getaddrinfo = refuse\n"
        "from finetune.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(recipe)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_tracker_starts_by_itself(parts: Path, tmp_path: Path) -> None:
    """P45: trackers are installed, the recipe names none, so none is used."""
    for name in ("wandb", "trackio", "tensorboard", "mlflow", "comet_ml"):
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise AssertionError('{name} was imported')\n")
    # transformers imports wandb to see whether it is there; nothing of it may be used.
    started = (
        "def init(*arguments, **options):\n    raise AssertionError('wandb was started')\n\nlogin = setup = init\n"
    )
    (tmp_path / "site" / "wandb" / "__init__.py").write_text(f"run = None\n\n{started}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), *filter(None, sys.path)))}
    command = [sys.executable, "-m", "finetune", "train", str(write_recipe(parts, tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_scores_without_a_prompt_are_refused(parts: Path, tmp_path: Path) -> None:
    """A score over no prompts was reported as 0 %."""
    (tmp_path / "text.txt").write_text("a plain text, which has no prompt and no answer")
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["exact_match"]})
    changed = f"data.eval=[{{path: {tmp_path / 'text.txt'}}}]"
    assert main(["train", str(recipe), changed]) == ExitCode.DATA
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_stopped_runs_continue_bit_equal(parts: Path, tmp_path: Path, how: str) -> None:
    """Ctrl-C in the middle, and kill -9 in the middle: the continued run ends as the unbroken one, line for line."""
    from safetensors.torch import load_file

    training = {"max_steps": 30, "rows_per_step": 2, "rows_per_micro_batch": 1}
    straight = write_recipe(parts, tmp_path / "straight", training=training)
    assert main(["train", str(straight), "output.save_every_steps=4"]) == 0
    broken = write_recipe(parts, tmp_path / "broken", training=training)
    command = [sys.executable, "-m", "finetune", "train", str(broken), "output.save_every_steps=4"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "broken" / "run"
    _wait_for(lambda: (run / "checkpoints" / "checkpoint-8" / "complete.json").exists(), process)
    process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    code = process.wait(timeout=120)
    assert code == (ExitCode.INTERRUPTED if how == "interrupt" else -signal.SIGKILL)
    if how == "interrupt":
        assert json.loads((run / "report.json").read_text())["status"] == "interrupted"
    assert main(["train", str(broken), "output.save_every_steps=4", "--resume"]) == 0
    pairs = [
        [(record["step"], record["loss"], record["real_tokens"]) for record in _training(folder / "run")]
        for folder in (tmp_path / "straight", tmp_path / "broken")
    ]
    assert pairs[0] == pairs[1]
    ends = [load_file(tmp_path / name / "run/adapter/adapter_model.safetensors") for name in ("straight", "broken")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_run_is_not_continued_on_other_data(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file under the same path was replaced: steps would go on at a meaningless place in other data."""
    data = make_chat_file(tmp_path / "own.jsonl", rows=30)
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["./late.py"], "at_start": False})
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    raise KeyError('late')\n")
    arguments = ["train", str(recipe), f"data.train=[{{path: {data}}}]"]
    assert main(arguments) == ExitCode.RECIPE
    make_chat_file(data, rows=30, seed=7)
    capsys.readouterr()
    assert main([*arguments, "--resume", "--json"]) == ExitCode.DATA
    assert "data differ" in json.loads(capsys.readouterr().out)["message"]


def test_a_run_is_not_continued_on_other_labels(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same tokens, as many of them learned in each record, but others: only the labels tell."""

    def write(*, learned: int) -> None:
        lines = []
        for number in range(30):
            turns = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "yes"}] * 2
            answers = [dict(turn, weight=int(index // 2 == learned)) for index, turn in enumerate(turns) if index % 2]
            turns[1::2] = answers
            lines.append(json.dumps({"messages": turns}) + "\n")
        data.write_text("".join(lines), encoding="utf-8")

    data = tmp_path / "own.jsonl"
    write(learned=0)
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["./late.py"], "at_start": False})
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    raise KeyError('late')\n")
    arguments = ["train", str(recipe), f"data.train=[{{path: {data}}}]"]
    assert main(arguments) == ExitCode.RECIPE
    write(learned=1)
    capsys.readouterr()
    assert main([*arguments, "--resume", "--json"]) == ExitCode.DATA
    assert "data differ" in json.loads(capsys.readouterr().out)["message"]


def test_a_run_goes_on_with_the_day_that_it_began_on(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that prints today's date gives other tokens tomorrow; --resume refused them as changed data."""
    import datetime

    import finetune.data.build as build

    base = make_model_folder(tmp_path / "base", "llama")
    tokenizer = make_tokenizer(template="{{ strftime_now('%Y-%m-%d') }}\n" + CHATML)
    tokenizer.save_pretrained(base)
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    raise KeyError('late')\n")
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["./late.py"], "at_start": False})
    arguments = ["train", str(recipe), f"model.path={base}"]
    assert main(arguments) == ExitCode.RECIPE
    (tmp_path / "late.py").write_text("def score(prediction, reference):\n    return 1.0\n")

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return super().today() + datetime.timedelta(days=1)

    monkeypatch.setattr(build, "date", Tomorrow)
    assert main([*arguments, "--resume"]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["plan"]["date_in_template"] == datetime.date.today().isoformat()


def test_a_score_that_fails_at_the_end_costs_no_training(parts: Path, tmp_path: Path) -> None:
    """The adapter is saved before it is scored, and --resume scores it without training on."""
    metric = tmp_path / "late.py"
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["./late.py"], "at_start": False})
    metric.write_text("def score(prediction, reference):\n    return float('nan')\n")
    assert main(["train", str(recipe)]) == ExitCode.RECIPE
    run = tmp_path / "run"
    saved = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert json.loads((run / "report.json").read_text())["status"] == "failed"
    metric.write_text("def score(prediction, reference):\n    return 0.25\n")
    assert main(["train", str(recipe), "--resume"]) == 0
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == saved
    report = json.loads((run / "report.json").read_text())
    assert report["scores"]["late"]["after"] == 0.25
    assert report["summary"]["steps"] == 4
    assert sorted(os.listdir(run / "checkpoints")) == ["checkpoint-4"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_does_not_end_the_run(parts: Path, tmp_path: Path, stream: str) -> None:
    """`finetune train ... | head -1` ended in the middle without a word."""
    command = [sys.executable, "-m", "finetune", "train", str(write_recipe(parts, tmp_path))]
    command += ["--json"] if stream == "stderr" else []
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: writing}
    done = subprocess.run(command, **streams)
    os.close(writing)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["status"] == "done"


def test_sigterm_outside_the_steps_ends_with_a_report(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef score(prediction, reference):\n    time.sleep(60)\n")
    recipe = write_recipe(parts, tmp_path, evaluation={"metrics": ["./slow.py"], "at_start": False})
    command = [sys.executable, "-m", "finetune", "train", str(recipe), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    _wait_for(lambda: (tmp_path / "run" / "adapter" / "tokenizer.json").exists(), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert json.loads(out)["exit_code"] == ExitCode.INTERRUPTED
    assert json.loads((tmp_path / "run" / "report.json").read_text())["status"] == "interrupted"


def test_a_finished_run_is_not_continued(parts: Path, tmp_path: Path) -> None:
    recipe = write_recipe(parts, tmp_path)
    assert main(["train", str(recipe)]) == 0
    assert main(["train", str(recipe), "--resume"]) == ExitCode.RECIPE


def test_a_last_step_that_breaks_the_weights_leaves_no_adapter(parts: Path, tmp_path: Path) -> None:
    """Loss and gradient of the last step are finite; the weights that it leaves are not."""
    training = {"learning_rate": 3e38, "max_steps": 1, "schedule": "constant"}
    recipe = write_recipe(parts, tmp_path, training=training)
    assert main(["train", str(recipe), "data.eval=null"]) == ExitCode.GATE
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_stopped_run_exits_6_and_leaves_no_adapter(parts: Path, tmp_path: Path) -> None:
    recipe = write_recipe(parts, tmp_path, training={"learning_rate": 1e30, "max_grad_norm": 0.0})
    assert main(["train", str(recipe)]) == ExitCode.GATE
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["status"] == "stopped"
    assert "not finite" in report["message"]
    assert not (tmp_path / "run" / "adapter").exists()
    assert list((tmp_path / "run").glob("failed_batch_step_*.npz"))


def _training(run: Path) -> list[dict]:
    return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]


def _wait_for(condition, process: subprocess.Popen, *, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline, "the run did not get so far"
        time.sleep(0.01)
