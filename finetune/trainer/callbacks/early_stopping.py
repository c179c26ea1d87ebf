"""Ends a run whose held-out loss no longer falls.

transformers' own callback keeps its count in the trainer's state, which a resumed run puts back into a new callback of
its own making. This one counts again from the evaluations that the run has recorded, so there is no second state that
could differ from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class EarlyStoppingCallback(TrainerCallback):
    """Asks the trainer to save and stop after `patience` evaluations in a row without an improvement.

    Args:
        patience: evaluations in a row.
        min_improvement: how far a loss has to fall below that of the last improvement to be one; the first is one.
        past: `(step, held-out loss)` of the evaluations that a continued run has behind it, in order.
    """

    def __init__(self, *, patience: int, min_improvement: float = 0.0, past: Iterable[tuple[int, float]] = ()) -> None:
        self._patience = patience
        self._min_improvement = min_improvement
        self._last_improvement: float | None = None
        self._step = 0
        self.num_without_improvement = 0
        for step, loss in past:
            self._count(step, loss)

    @property
    def is_over(self) -> bool:
        """Whether the run has been long enough without an improvement."""
        return self.num_without_improvement >= self._patience

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not metrics:
            return
        self._count(state.global_step, metrics["eval_loss"])
        if self.is_over:
            control.should_save = True  # a run that is cut off before its end can then be continued from here
            control.should_training_stop = True

    def _count(self, step: int, loss: float) -> None:
        if step <= self._step:  # before the first step, or a second look at the same weights
            return
        self._step = step
        if self._last_improvement is None or loss < self._last_improvement - self._min_improvement:
            self._last_improvement = loss
            self.num_without_improvement = 0
        else:
            self.num_without_improvement += 1
