"""The trainer's numbers: equal to a plain loop, the same for every split of a step, unchanged by callbacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_bitwise_equal, assert_same_trajectory
from reference_loop import train_plainly
from runs import build, build_model, grad_norms, losses, windows
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.errors import GateStopped, RecipeError
from finetune.trainer.schedule import learning_rate_factor

FULL = {"type": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    for kind in ("qwen3", "llama", "qwen3_moe", "gpt_oss"):
        make_model_folder(root / kind, kind)
    make_chat_file(root / "train.jsonl", rows=43)
    make_chat_file(root / "eval.jsonl", rows=9, seed=5)
    return root


def recipe(folder: Path, out: Path, kind: str = "qwen3", **sections) -> dict:
    made = make_recipe(folder / kind, folder / "train.jsonl", out, **sections)
    made["data"]["max_length"] = 128
    made["data"]["packing"] = sections.get("data", {}).get("packing", True)
    made["training"]["max_steps"] = sections.get("training", {}).get("max_steps", 4)
    return made


@pytest.mark.parametrize("adapter", [{"type": "lora", "rank": 4, "alpha": 8}, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "gpt_oss"])
def test_equals_a_plain_loop(folder: Path, tmp_path: Path, kind: str, adapter: dict) -> None:
    training = {"router_aux_loss": 0.0, "warmup_fraction": 0.25, "learning_rate": 5e-3}
    made = recipe(folder, tmp_path / "run", kind, adapter=adapter, training=training)
    _, _, reference = build_model(made)
    trainer, prepared = build(made)
    steps = windows(trainer)
    trainer.train()
    trace = train_plainly(reference, steps, learning_rate=5e-3, total_steps=4, warmup=prepared.steps.warmup_steps)
    assert_same_trajectory(losses(trainer), trace.losses, relative=2e-5)
    assert_same_trajectory(grad_norms(trainer), trace.grad_norms, relative=2e-4)
    assert trace.losses[-1] < trace.losses[0]


def test_micro_batches_do_not_change_the_step(folder: Path, tmp_path: Path) -> None:
    """8 x 1, 4 x 2, 2 x 4 and 1 x 8, with rows of unequal length and a last window that is not full."""
    runs = {}
    for micro in (8, 4, 2, 1):
        training = {"rows_per_step": 8, "rows_per_micro_batch": micro, "max_steps": 7, "max_grad_norm": 0.0}
        made = recipe(folder, tmp_path / str(micro), data={"packing": False}, adapter=FULL, training=training)
        made["training"]["learning_rate"] = 1e-3
        trainer, prepared = build(made)
        assert prepared.steps.num_rows % 8, "the last window must be a short one"
        assert prepared.steps.steps_per_epoch < 7
        trainer.train()
        runs[micro] = (losses(trainer), grad_norms(trainer))
    for micro in (4, 2, 1):
        assert_same_trajectory(runs[micro][0], runs[8][0], relative=1e-5)
        assert_same_trajectory(runs[micro][1], runs[8][1], relative=1e-4)


def test_packed_loss_and_gradients_equal_unpacked(folder: Path, tmp_path: Path) -> None:
    """P30: all samples in one step: packing changes the rows, not the sum over supervised tokens."""
    results = []
    for packing in (True, False):
        made = recipe(folder, tmp_path / str(packing), data={"packing": packing}, adapter=FULL)
        made["training"] |= {"rows_per_step": 64, "rows_per_micro_batch": 1, "max_steps": 1, "max_grad_norm": 0.0}
        trainer, _ = build(made)
        trainer.train()
        results.append((losses(trainer), grad_norms(trainer)))
    assert_same_trajectory(results[0][0], results[1][0], relative=1e-5)
    assert_same_trajectory(results[0][1], results[1][1], relative=1e-4)


def test_evaluation_loss_depends_neither_on_the_batch_nor_on_packing(folder: Path, tmp_path: Path) -> None:
    """P32: the same number for batches of 1 and 4 rows, packed and unpacked."""
    values = []
    for micro, packing in ((1, True), (4, True), (1, False), (4, False)):
        made = recipe(folder, tmp_path / f"{micro}-{packing}", data={"packing": packing})
        made["data"]["eval"] = [{"path": str(folder / "eval.jsonl")}]
        made["training"]["rows_per_micro_batch"] = micro
        trainer, prepared = build(made)
        metrics = trainer.evaluate()
        assert prepared.dataset.eval is not None
        assert metrics["eval_tokens"] == prepared.dataset.eval.num_supervised_tokens
        values.append(metrics["eval_loss"])
    assert values == pytest.approx([values[0]] * 4, rel=1e-5)


def test_evaluation_is_training_loss_without_the_step(folder: Path, tmp_path: Path) -> None:
    made = recipe(folder, tmp_path / "run", training={"rows_per_step": 64, "rows_per_micro_batch": 1})
    made["data"]["eval"] = [{"path": str(folder / "train.jsonl")}]
    made["training"]["max_steps"] = 1
    trainer, _ = build(made)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(before, rel=1e-5)


def test_the_auxiliary_loss_is_there_once(folder: Path, tmp_path: Path) -> None:
    """Total minus cross entropy is coefficient times auxiliary loss."""
    totals = {}
    for coefficient in (0.0, 0.5):
        training = {"router_aux_loss": coefficient, "rows_per_step": 2, "rows_per_micro_batch": 2, "max_steps": 1}
        trainer, _ = build(recipe(folder, tmp_path / str(coefficient), "qwen3_moe", training=training))
        trainer.train()
        totals[coefficient] = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert "aux_loss" not in totals[0.0]
    difference = totals[0.5]["loss"] - totals[0.0]["loss"]
    assert difference == pytest.approx(0.5 * totals[0.5]["aux_loss"], rel=1e-4)


def test_real_tokens_are_counted(folder: Path, tmp_path: Path) -> None:
    trainer, prepared = build(recipe(folder, tmp_path / "run", training={"epochs": 1.0, "max_steps": None}))
    trainer.train()
    record = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert record["real_tokens"] == prepared.dataset.train.num_tokens
    assert record["slots"] == len(prepared.train_rows) * 128


@pytest.mark.parametrize("packing", [False, True])
def test_planned_steps_are_the_executed_ones(folder: Path, tmp_path: Path, packing: bool) -> None:
    """P33: steps follow the rows that packing leaves, and the learning rate ends where the schedule does."""
    made = recipe(folder, tmp_path / "run", data={"packing": packing}, training={"epochs": 1.5})
    made["training"]["max_steps"] = None
    trainer, prepared = build(made)
    trainer.train()
    num_rows, steps = len(prepared.train_rows), prepared.steps.total_steps
    assert num_rows == 43 if not packing else num_rows < 43
    assert trainer.state.global_step == steps == len(losses(trainer))
    assert steps == 17 if not packing else steps < 17
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    factor = learning_rate_factor(steps - 1, schedule=made["training"].get("schedule", "cosine"), plan=prepared.steps)
    peak = made["training"].get("learning_rate", 2e-4)
    assert rates[-1] == pytest.approx(peak * factor)
    assert rates[-1] < peak / 2


def test_packing_is_on_or_refused(folder: Path, tmp_path: Path) -> None:
    """P29: packing that is asked for is never turned off in silence, and no row is cut to fit."""
    _, prepared = build(recipe(folder, tmp_path / "run"))
    plan = prepared.train_rows.plan
    assert prepared.is_packed and len(plan) < len(plan.sample_indices) == 43
    assert plan.num_tokens == prepared.dataset.ledger.tokens_in
    with pytest.raises(RecipeError, match=r"data\.packing") as caught:
        build(recipe(folder, tmp_path / "other", "gpt_oss", model={"attention": "eager"}))
    assert "model.attention=auto" in caught.value.remedy


def test_adapters_over_a_quantized_base_stay_fp32(folder: Path, tmp_path: Path) -> None:
    """TRL turns them to bf16, where updates below one part in 256 are lost."""
    made = recipe(folder, tmp_path / "run", model={"quantization": "nf4"})
    trainer, prepared = build(made)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert prepared.table.num_trainable == sum(parameter.numel() for parameter in trained)


def test_a_loss_that_is_not_finite_stops_the_run(folder: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Poison(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                next(p for p in model.parameters() if p.requires_grad).data[0] = float("nan")

    trainer, _ = build(recipe(folder, tmp_path / "run"), callbacks=[Poison()])
    with pytest.raises(GateStopped) as caught:
        trainer.train()
    assert trainer.state.global_step == 3
    assert "step 3" in caught.value.message
    saved = np.load(caught.value.place)
    assert saved["rows"].tolist()
    row = trainer.train_dataset[int(saved["rows"][0])]
    assert saved["input_ids"][0, : len(row["input_ids"])].tolist() == row["input_ids"].tolist()
    assert "there is no checkpoint yet" in caught.value.remedy


def test_the_last_good_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from finetune.trainer.callbacks.checkpoints import CheckpointsCallback

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                next(p for p in model.parameters() if p.requires_grad).data[0] = float("nan")

    made = recipe(folder, tmp_path / "run")
    made["output"]["save_every_steps"] = 1
    trainer, _ = build(made, callbacks=[CheckpointsCallback(), Poison()])
    with pytest.raises(GateStopped) as caught:
        trainer.train()
    assert "checkpoint-3" in caught.value.remedy


def test_a_checkpoint_of_the_last_step_is_loaded_and_not_trained_on(folder: Path, tmp_path: Path) -> None:
    """transformers takes a step more, when resumed at its end, before it looks at how many were asked for."""
    straight, _ = build(recipe(folder, tmp_path / "run"))
    straight.train()
    resumed, _ = build(recipe(folder, tmp_path / "other"))
    resumed.train_from(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    assert resumed.state.global_step == 4
    assert resumed.meter.real_tokens == straight.meter.real_tokens
    assert_bitwise_equal(dict(resumed.model.state_dict()), dict(straight.model.state_dict()))


def test_a_full_checkpoint_of_a_mixture_of_experts_is_read_back_whole(folder: Path, tmp_path: Path) -> None:
    """transformers left out the experts, which are saved under other names, and trained on with the base's."""
    straight, _ = build(recipe(folder, tmp_path / "run", "qwen3_moe", adapter=FULL))
    straight.train()
    resumed, _ = build(recipe(folder, tmp_path / "other", "qwen3_moe", adapter=FULL))
    resumed.train_from(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    assert_bitwise_equal(dict(resumed.model.state_dict()), dict(straight.model.state_dict()))


def test_planned_steps_and_rates_are_those_of_the_packed_rows(folder: Path, tmp_path: Path) -> None:
    """P33: steps, warm-up and rates follow the rows that packing leaves, and the last step ends the schedule."""
    training = {"epochs": 2.0, "warmup_fraction": 0.3, "schedule": "linear", "rows_per_step": 4}
    made = recipe(folder, tmp_path / "run", training=training)
    made["training"]["max_steps"] = None
    trainer, prepared = build(made)
    assert prepared.steps.num_rows < len(prepared.dataset.train)
    total = 2 * -(-prepared.steps.num_rows // 4)
    warmup = -(-3 * total // 10)
    assert (prepared.steps.total_steps, prepared.steps.warmup_steps) == (total, warmup)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    rising = [0.01 * (step + 1) / (warmup + 1) for step in range(warmup)]
    falling = [0.01 * (1 - step / (total - warmup)) for step in range(total - warmup)]
    assert rates == pytest.approx(rising + falling)


def test_steps_that_no_regular_log_covers_are_looked_at(folder: Path, tmp_path: Path) -> None:
    """A run that broke in its last steps, between two regular logs, ended as done with a broken adapter."""
    made = recipe(folder, tmp_path / "run", training={"learning_rate": 1e30, "max_grad_norm": 0.0})
    made["output"]["log_every_steps"] = 50
    trainer, _ = build(made)
    with pytest.raises(GateStopped):
        trainer.train()


def test_every_step_is_in_one_measured_window(folder: Path, tmp_path: Path) -> None:
    made = recipe(folder, tmp_path / "run", training={"max_steps": 10})
    made["output"] |= {"log_every_steps": 4, "save_every_steps": 3}
    made["evaluation"]["every_steps"] = 5
    made["data"]["eval"] = [{"path": str(folder / "eval.jsonl")}]
    trainer, _ = build(made)
    trainer.train()
    records = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in records] == [3, 4, 5, 6, 8, 9, 10]
    steps = np.diff([0, *(entry["step"] for entry in records)])
    seconds = sum(entry["step_seconds"] * count for entry, count in zip(records, steps, strict=True))
    assert seconds == pytest.approx(trainer.meter.elapsed_seconds)


def test_resumes_bit_equal(folder: Path, tmp_path: Path) -> None:
    """With dropout, accumulation and a short last window, in the middle of an epoch and in a later one."""
    training = {"rows_per_step": 6, "rows_per_micro_batch": 2, "max_steps": 12}
    adapter = {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.1}

    def make(out: Path) -> dict:
        made = recipe(folder, out, data={"packing": False}, adapter=adapter, training=training)
        made["output"]["save_every_steps"] = 5
        return made

    straight, _ = build(make(tmp_path / "straight"))
    straight.train()
    for step in (5, 10):
        resumed, _ = build(make(tmp_path / f"resumed-{step}"))
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoints" / f"checkpoint-{step}"))
        assert losses(resumed)[-(12 - step) :] == losses(straight)[step:]
        assert resumed.meter.real_tokens == straight.meter.real_tokens
        assert_bitwise_equal(dict(resumed.model.state_dict()), dict(straight.model.state_dict()))


def test_callbacks_change_no_number(folder: Path, tmp_path: Path) -> None:
    """Dashboard, metrics file, checkpoints and a report made in the middle of the run leave each weight as it is."""
    import io

    from rich.console import Console
    from transformers import TrainerCallback

    from finetune.run.folder import create_run_folder
    from finetune.run.metrics import MetricsWriter, read_metrics
    from finetune.run.remake import remake_report
    from finetune.run.samples import LatestSample
    from finetune.trainer.callbacks.checkpoints import CheckpointsCallback
    from finetune.trainer.callbacks.metrics_log import MetricsLogCallback
    from finetune.trainer.callbacks.progress import ProgressCallback

    class Reporting(TrainerCallback):
        def on_log(self, *_: object, **__: object) -> None:
            reported.append(remake_report(run.path).steps)

    reported: list[int] = []

    adapter = {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.1}
    plain, _ = build(recipe(folder, tmp_path / "plain", adapter=adapter))
    plain.train()
    run = create_run_folder(tmp_path / "watched", recipe_text="{}", recipe_hash="", environment={})
    run.samples_path.write_text(json.dumps({"step": 0, "prompt": "say", "reference": None, "answer": "one"}) + "\n")
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, height=24)
    progress = ProgressCallback(terminal, is_live=True, latest_sample=LatestSample(run.samples_path))
    with MetricsWriter(run.metrics_path) as writer, progress:
        callbacks = [CheckpointsCallback(keep=1), MetricsLogCallback(writer), progress, Reporting()]
        watched, _ = build(recipe(folder, run.path, adapter=adapter), callbacks=callbacks)
        watched.train()
    assert_bitwise_equal(dict(watched.model.state_dict()), dict(plain.model.state_dict()))
    records = read_metrics(run.metrics_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["loss"] for record in records] == losses(watched)
    assert reported[:4] == [1, 2, 3, 4] and run.report_html.is_file() and "say" in screen.getvalue()
    assert all(record["host_memory_bytes"] > 2**20 for record in records)


def test_training_leaves_another_model_of_the_process_alone(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = other(tokens).logits
    forward = type(other).forward
    trainer, _ = build(recipe(folder, tmp_path / "run"))
    trainer.train()
    assert type(other).forward is forward
    assert "forward" not in vars(other)
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, before)
