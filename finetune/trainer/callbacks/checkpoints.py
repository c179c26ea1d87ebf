"""Marks each checkpoint complete once all of it is on the disk, and removes old ones after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from finetune.run.checkpoints import keep_newest, mark_complete


class CheckpointsCallback(TrainerCallback):
    """Turns the trainer's checkpoint folders into ones that can be trusted.

    Args:
        keep: complete checkpoints to keep, None for all. The trainer's own `save_total_limit` should then be None: it
            removes the old checkpoint before the new one is marked, so a kill between the two would leave none.
    """

    def __init__(self, *, keep: int | None = None) -> None:
        self._keep = keep

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir))
        mark_complete(folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if self._keep is not None:
            keep_newest(folder, self._keep)
