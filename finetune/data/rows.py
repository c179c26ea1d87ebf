"""The dataset that the trainer iterates over: row r of a pack plan, with the tokens of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from finetune.data.loss_weights import equal_weights
from finetune.data.pack import PackPlan
from finetune.data.store import SampleStore


class RowTokens(TypedDict):
    """One row before padding; T is its number of real tokens, D its number of samples.

    The type is a dict because the trainer's data loader and its checks expect one.
    """

    row: int
    input_ids: NDArray[np.int32]  # [T]
    labels: NDArray[np.int32]  # [T]
    lengths: NDArray[np.int64]  # [D], in the order in which the samples stand in the row
    loss_weights: NotRequired[NDArray[np.float32]]  # [T], only where some learned token has a weight other than 1


@dataclass(frozen=True)
class RowDataset(Dataset[RowTokens]):
    """Rows of a plan over a store; reading a row copies its tokens and nothing else."""

    store: SampleStore
    plan: PackPlan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, row: int) -> RowTokens:
        samples = [self.store[index] for index in self.plan[row].sample_indices]
        tokens = RowTokens(
            row=row,
            input_ids=np.concatenate([sample.input_ids for sample in samples]),
            labels=np.concatenate([sample.labels for sample in samples]),
            lengths=np.array([len(sample) for sample in samples], dtype=np.int64),
        )
        if any(sample.loss_weights is not None for sample in samples):
            weights = [
                equal_weights(sample.labels) if sample.loss_weights is None else sample.loss_weights
                for sample in samples
            ]
            tokens["loss_weights"] = np.concatenate(weights)
        return tokens
