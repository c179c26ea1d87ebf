"""Experiment trackers of a run: those that the recipe names, and no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers.integrations.integration_utils import TensorBoardCallback, get_reporting_integration_callbacks

from finetune.trainer.callbacks.tracker import TrackerCallback

PROJECT = "finetune"
"""Project that runs are filed under, where the tracker's own variables name none."""


def make_trackers(names: Sequence[str], *, folder: Path, say: Callable[[str], None]) -> list[TrackerCallback]:
    """Returns a callback for each tracker, to be closed; nothing is started or sent before the first event.

    What a tracker writes goes into the run folder, unless its own variable (`TENSORBOARD_LOGGING_DIR`, `WANDB_DIR`)
    names another.

    Args:
        folder: the run folder.
        say: prints a warning.
    """
    if "wandb" in names:
        os.environ.setdefault("WANDB_DIR", str(folder))
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
    trackers = [kind() for kind in get_reporting_integration_callbacks(list(names))]
    for tracker in trackers:
        if isinstance(tracker, TensorBoardCallback) and tracker.logging_dir is None:
            tracker.logging_dir = str(folder / "tensorboard")
    return [TrackerCallback(name, tracker, say=say) for name, tracker in zip(names, trackers, strict=True)]
