"""Drives a callback through the events of a training, without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def train_logs(step: int) -> dict[str, Any]:
    return {
        "loss": 3.0 - 0.01 * step,
        "learning_rate": 1e-4,
        "grad_norm": 0.5,
        "epoch": step / 100,
        "real_tokens": 100 * step,
        "slots": 128 * step,
        "real_tokens_per_second": 12345.0,
        "step_seconds": 0.1,
        "peak_memory_bytes": 2**31,
        "elapsed_seconds": 0.1 * step,
    }


EVAL_LOGS = {"eval_loss": 1.25, "eval_tokens": 50, "eval_seconds": 0.2, "eval_runtime": 9.9, "eval_exact_match": 0.5}


def drive(
    callback: TrainerCallback,
    arguments: TrainingArguments,
    *,
    num_steps: int,
    logs: Callable[[int], dict[str, Any]] = train_logs,
    before_step: Callable[[int], None] = lambda step: None,
) -> TrainerState:
    """Runs the events of a training in the trainer's order and stops where the control says so."""
    state, control = TrainerState(max_steps=num_steps), TrainerControl()
    callback.on_train_begin(arguments, state, control)
    for step in range(1, num_steps + 1):
        before_step(step)
        callback.on_step_begin(arguments, state, control)
        state.global_step = step
        callback.on_step_end(arguments, state, control)
        callback.on_log(arguments, state, control, logs=logs(step))
        if control.should_save:
            callback.on_save(arguments, state, control)
        if control.should_training_stop:
            break
    callback.on_log(arguments, state, control, logs=dict(EVAL_LOGS))
    callback.on_log(arguments, state, control, logs={"train_runtime": 1.0, "train_loss": 2.0, "total_flos": 3.0})
    callback.on_train_end(arguments, state, control)
    return state
