"""Writes what the trainer logs to the run's metrics file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_TRAIN_FIELDS = (
    "epoch",
    "loss",
    "learning_rate",
    "learning_rate_lora_b",
    "grad_norm",
    "real_tokens",
    "slots",
    "real_tokens_per_second",
    "step_seconds",
    "memory_bytes",
    "peak_memory_bytes",
    "host_memory_bytes",
    "elapsed_seconds",
    "aux_loss",
    "skipped_steps",
)
_EVAL_FIELDS = ("eval_loss", "eval_tokens", "eval_seconds")
# The stock trainer's timing of an evaluation: its rates count rows, which packing makes meaningless.
_STOCK_EVAL_FIELDS = frozenset(
    {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}
)


class RecordWriter(Protocol):
    """Anything that stores one metrics record."""

    def write(self, record: Mapping[str, object]) -> None: ...


def log_kind(logs: Mapping[str, object]) -> Literal["train", "eval", "scores"] | None:
    """Tells a training line from an evaluation line, and from one of scores whose loss is on a line before it; None for
    others, such as the stock summary at the end."""
    if "loss" in logs:
        return "train"
    if "eval_loss" in logs:
        return "eval"
    return "scores" if any(key.startswith("eval_") for key in logs) else None


def metrics_record(logs: Mapping[str, Any], *, step: int) -> dict[str, Any] | None:
    """Returns the line of `metrics.jsonl` for one call of the trainer's log, or None where it makes no line."""
    kind = log_kind(logs)
    if kind is None:
        return None
    if kind == "train":
        return {"kind": kind, "step": step, **{key: logs[key] for key in _TRAIN_FIELDS if key in logs}}
    scores = [key for key in logs if key.startswith("eval_") and key not in (*_EVAL_FIELDS, *_STOCK_EVAL_FIELDS)]
    return {"kind": kind, "step": step, **{key: logs[key] for key in (*_EVAL_FIELDS, *scores) if key in logs}}


class MetricsLogCallback(TrainerCallback):
    """Hands each training and evaluation line to `writer`, on the main process only."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        record = metrics_record(logs, step=state.global_step)
        if record is not None:
            self._writer.write(record)
