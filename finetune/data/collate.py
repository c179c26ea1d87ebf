"""Rows to a batch: pads, numbers documents and positions, counts real tokens. All on the host.

Shape legend: R rows of the micro-batch, L slots of a row (real tokens and the pad tail).

Where documents begin is in `packed_metadata.py`; the pad tail is a document of its own, so no real token can see it and
its positions stay small. Example, two documents of 3 and 2 tokens in a row of 8:

    input_ids     a0 a1 a2 b0 b1  .  .  .
    position_ids   0  1  2  0  1  0  1  2
    labels         x a1 a2  x b1  x  x  x      (x = not learned)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch

from finetune.data.packed_metadata import PackedMetadata, build_packed_metadata
from finetune.data.rows import RowTokens
from finetune.data.types import IGNORE_INDEX

PAD_MULTIPLE = 8
"""Unpacked rows are padded to a multiple of this many tokens, which tensor cores want."""


class Batch(TypedDict):
    """What one forward pass sees. The figures stay on the host and are taken out before the model is called."""

    input_ids: torch.Tensor  # int64 [R, L]
    labels: torch.Tensor  # int64 [R, L]
    packed_metadata: PackedMetadata  # positions and boundaries, one buffer
    loss_weights: NotRequired[torch.Tensor]  # float32 [R, L], only where a learned token has a weight other than 1
    num_real_tokens: int
    num_supervised_tokens: int
    sum_of_weights: float  # of the supervised tokens; equal to their number where there is no `loss_weights`
    rows: list[int]


@dataclass(frozen=True)
class RowCollator:
    """Makes a `Batch` of the rows of one micro-batch.

    Args:
        row_length: L of every batch (packed rows), or None to pad to the longest row of the batch.
        pad_token_id: any id inside the vocabulary; what it is does not matter, since nothing sees or learns it.
    """

    row_length: int | None
    pad_token_id: int

    def __call__(self, rows: list[RowTokens]) -> Batch:
        length = self.row_length or _round_up(max(len(row["input_ids"]) for row in rows), PAD_MULTIPLE)
        input_ids = np.full((len(rows), length), self.pad_token_id, dtype=np.int64)
        labels = np.full((len(rows), length), IGNORE_INDEX, dtype=np.int64)
        for index, row in enumerate(rows):
            num_tokens = len(row["input_ids"])
            input_ids[index, :num_tokens] = row["input_ids"]
            labels[index, :num_tokens] = row["labels"]
            starts = np.cumsum(row["lengths"]) - row["lengths"]
            labels[index, starts] = IGNORE_INDEX  # nothing precedes a document's first token
        num_supervised_tokens = int((labels != IGNORE_INDEX).sum())
        batch = Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            packed_metadata=build_packed_metadata([row["lengths"].tolist() for row in rows], row_length=length),
            num_real_tokens=sum(len(row["input_ids"]) for row in rows),
            num_supervised_tokens=num_supervised_tokens,
            sum_of_weights=float(num_supervised_tokens),
            rows=[row["row"] for row in rows],
        )
        if any("loss_weights" in row for row in rows):
            weights = _weights(rows, labels)
            batch["loss_weights"] = torch.from_numpy(weights)
            batch["sum_of_weights"] = float(weights.sum(dtype=np.float64))
        return batch


def _weights(rows: list[RowTokens], labels: np.ndarray) -> np.ndarray:
    """Weights of the learned tokens, 0 elsewhere, float32 `[R, L]`."""
    weights = (labels != IGNORE_INDEX).astype(np.float32)
    for index, row in enumerate(rows):
        if "loss_weights" in row:
            weights[index, : len(row["loss_weights"])] *= row["loss_weights"]
    return weights


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
