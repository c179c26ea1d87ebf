"""Logs where a look at the metrics is due beside the regular steps: before checkpoints, evaluations and the end."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class LogOnTimeCallback(TrainerCallback):
    """Has the trainer log before it saves, evaluates or ends.

    The trainer checks at each log that loss and gradient are finite; so no checkpoint is written and no run ends with
    steps that nobody looked at. It also ends the window over which step times are measured, so that evaluations and
    saves do not count as training.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if is_last or control.should_save or control.should_evaluate:
            control.should_log = True
        if state.global_step >= state.max_steps:
            control.should_evaluate = False  # the run measures its result itself, once, with the scores
