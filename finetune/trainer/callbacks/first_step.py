"""Notes when the first step was done, for the report."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class FirstStepCallback(TrainerCallback):
    """Holds the clock (`time.perf_counter`) at the end of the first step, or None before it."""

    def __init__(self) -> None:
        self.finished_at: float | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.finished_at is None:
            self.finished_at = time.perf_counter()
