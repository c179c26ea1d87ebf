"""A loss or gradient that is no number: the batch is saved, and the run stopped with what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from finetune.data.collate import Batch
from finetune.errors import GateStopped
from finetune.run.checkpoints import what_is_left


def not_finite(what: str, *, step: int, figures: str, rows: list[int], saved: Path, checkpoints: Path) -> GateStopped:
    """Returns the error of a step whose loss or gradient (`what`) is NaN or infinite."""
    return GateStopped(
        f"{what} is not finite at step {step} ({figures}); the batch (rows {rows}) was saved",
        place=str(saved),
        remedy="Lower training.learning_rate, look at these rows, or use model.dtype=bf16 in place of fp16. "
        + what_is_left(checkpoints),
    )


def held_out_not_finite(loss: float, step: int, *, checkpoints: Path) -> GateStopped:
    """Returns the error of an evaluation whose loss is NaN or infinite."""
    return GateStopped(
        f"the held-out loss is {loss} after step {step}",
        place=str(checkpoints.parent),
        remedy="Lower training.learning_rate, or use bf16 in place of fp16. " + what_is_left(checkpoints),
    )


def save_failed_batch(folder: Path, batch: Batch, *, rows: list[int], step: int) -> Path:
    """Saves a micro-batch as `failed_batch_step_<n>.npz` (`rows` [R]; the batch's tensors [R, L])."""
    path = folder / f"failed_batch_step_{step}.npz"
    arrays = {name: value.numpy() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    arrays["position_ids"] = batch["packed_metadata"].position_ids.numpy()
    np.savez_compressed(path, allow_pickle=False, rows=np.array(rows), **arrays)
    return path
