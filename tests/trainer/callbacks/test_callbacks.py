"""Callbacks, driven by the trainer's own state and control objects in a loop without a model."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from drive import drive, train_logs
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.run.checkpoints import scan_checkpoints
from finetune.run.metrics import MetricsWriter, read_metrics
from finetune.trainer.callbacks.checkpoints import CheckpointsCallback
from finetune.trainer.callbacks.interrupt import InterruptCallback
from finetune.trainer.callbacks.metrics_log import MetricsLogCallback
from finetune.trainer.callbacks.progress import ProgressCallback


def plain_console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=200, force_terminal=False), stream


def test_metrics_lines_hold_the_agreed_fields_and_no_others(arguments: TrainingArguments, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        drive(
            MetricsLogCallback(writer), arguments, num_steps=2, logs=lambda step: {**train_logs(step), "entropy": 1.0}
        )
    first, second, held_out = read_metrics(path)
    assert first == {"kind": "train", "step": 1, **train_logs(1)} and second["step"] == 2
    assert held_out == {
        "kind": "eval",
        "step": 2,
        "eval_loss": 1.25,
        "eval_tokens": 50,
        "eval_seconds": 0.2,
        "eval_exact_match": 0.5,
    }


def test_plain_progress_prints_first_lines_then_few_and_the_last(arguments: TrainingArguments) -> None:
    console, stream = plain_console()
    drive(ProgressCallback(console), arguments, num_steps=200)
    lines = stream.getvalue().splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step")]
    assert steps == ["1/200", "2/200", "3/200", "4/200", "5/200", "200/200"]
    assert "loss 2.9900" in lines[0] and "lr 1.00e-04" in lines[0] and "peak 2.0 GiB" in lines[0]
    assert "tokens/s 12,345" in lines[0]
    assert lines[-1] == "eval at step 200  loss 1.2500  exact_match 0.5000"


def test_plain_progress_prints_the_last_line_of_a_run_that_stops_early(arguments: TrainingArguments) -> None:
    console, stream = plain_console()
    callback = ProgressCallback(console)
    state, control = TrainerState(max_steps=1000), TrainerControl()
    callback.on_train_begin(arguments, state, control)
    for state.global_step in range(1, 31):
        callback.on_log(arguments, state, control, logs=train_logs(state.global_step))
    callback.on_train_end(arguments, state, control)
    assert stream.getvalue().splitlines()[-1].startswith("step 30/1000")
    assert len(stream.getvalue().splitlines()) == 6


@pytest.mark.parametrize("is_live", [True, False])
def test_progress_survives_missing_and_odd_values(arguments: TrainingArguments, is_live: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, height=24, force_terminal=is_live)
    odd: list[dict[str, Any]] = [{"loss": float("nan")}, {"loss": "1.5"}, {"loss": 1, "grad_norm": None}, {}]
    drive(ProgressCallback(console, is_live=is_live), arguments, num_steps=4, logs=lambda step: odd[step - 1])
    assert "1.0000" in stream.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_saves_and_stops_at_the_step_end(arguments: TrainingArguments, number: signal.Signals) -> None:
    told: list[str] = []
    saved: list[int] = []
    before = signal.getsignal(number)

    class Recording(InterruptCallback):
        def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            saved.append(state.global_step)

    callback = Recording(told.append)
    state = drive(
        callback, arguments, num_steps=9, before_step=lambda step: os.kill(os.getpid(), number) if step == 3 else None
    )
    assert (state.global_step, saved, callback.interrupted) == (3, [3], True)
    assert len(told) == 1 and number.name in told[0]
    assert signal.getsignal(number) is before


def test_second_interrupt_quits_at_once_and_handlers_come_back(arguments: TrainingArguments) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    callback = InterruptCallback(lambda message: None)
    with pytest.raises(KeyboardInterrupt), callback:
        callback.on_train_begin(arguments, TrainerState(), TrainerControl())
        os.kill(os.getpid(), signal.SIGINT)
        assert callback.interrupted
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_message_that_cannot_be_printed_in_the_handler_is_printed_at_the_step_end(
    arguments: TrainingArguments,
) -> None:
    """A signal during a write to the same stream makes Python refuse a second one; training must go on."""
    told: list[str] = []
    refusals = [RuntimeError("reentrant call inside <_io.BufferedWriter>")]

    def notify(message: str) -> None:
        if refusals:
            raise refusals.pop()
        told.append(message)

    callback = InterruptCallback(notify)
    drive(callback, arguments, num_steps=3, before_step=lambda step: os.kill(os.getpid(), signal.SIGINT))
    assert len(told) == 1


def test_no_handlers_outside_the_main_thread(arguments: TrainingArguments) -> None:
    before = signal.getsignal(signal.SIGINT)
    callback = InterruptCallback(lambda message: None)
    thread = threading.Thread(target=callback.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    callback.restore()


def test_saved_checkpoints_are_marked_and_old_ones_go_afterwards(arguments: TrainingArguments) -> None:
    folder = Path(str(arguments.output_dir))
    callback = CheckpointsCallback(keep=2)
    state, control = TrainerState(), TrainerControl()
    for state.global_step in (5, 10, 15):
        path = folder / f"checkpoint-{state.global_step}"
        path.mkdir(parents=True)
        (path / "trainer_state.json").write_text(json.dumps({"global_step": state.global_step}))
        callback.on_save(arguments, state, control)
    assert [path.name for path in scan_checkpoints(folder).complete] == ["checkpoint-10", "checkpoint-15"]
    assert not (folder / "checkpoint-5").exists()


class SignalAt(TrainerCallback):
    """Sends SIGTERM to this process in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self._step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_stock_trainer_stops_at_a_signal_and_continues_to_the_same_weights(tmp_path: Path) -> None:
    """Unbroken without callbacks, and interrupted then resumed with them, end in equal weights."""
    import torch
    from transformers import Trainer

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - y).square().mean()}

    rows = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "y": torch.ones(1)} for i in range(16)]

    def run(folder: Path, callbacks: list[TrainerCallback], resume: str | None = None) -> Trainer:
        settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
        settings |= {"per_device_train_batch_size": 2, "num_train_epochs": 1, "save_strategy": "no", "seed": 3}
        arguments = TrainingArguments(output_dir=str(folder), **settings)
        trainer = Trainer(Line(), arguments, train_dataset=rows, callbacks=callbacks)  # pyright: ignore
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    plain = run(tmp_path / "plain", [])
    console, _ = plain_console()
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "watched"
    interrupt = InterruptCallback(console.print)
    with MetricsWriter(path) as writer:
        watching = [ProgressCallback(console), MetricsLogCallback(writer), CheckpointsCallback(keep=1), interrupt]
        stopped = run(folder, [*watching, SignalAt(3)])
    assert interrupt.interrupted and stopped.state.global_step == 3
    checkpoint = scan_checkpoints(folder).latest
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    with MetricsWriter(path, resumed_step=3) as writer:
        resumed = run(folder, [MetricsLogCallback(writer), CheckpointsCallback()], resume=str(checkpoint))
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 9))
    expected, actual = plain.model.state_dict(), resumed.model.state_dict()  # pyright: ignore
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
