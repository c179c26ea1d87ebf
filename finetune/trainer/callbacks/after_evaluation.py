"""Hands the held-out loss of each evaluation to a function, such as one that keeps the best weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class AfterEvaluationCallback(TrainerCallback):
    """Calls `action` with the step and its held-out loss, after each evaluation but the one before the first step."""

    def __init__(self, action: Callable[[int, float], None]) -> None:
        self._action = action

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics and state.global_step > 0 and state.is_world_process_zero:
            self._action(state.global_step, metrics["eval_loss"])
