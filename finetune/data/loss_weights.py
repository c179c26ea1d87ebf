"""How much each learned token counts in the loss. Mostly each counts 1, and then there is no array of weights at all.

Weights stand beside the labels of T tokens as float32 `[T]`: 0 where a token is not learned, else its weight. Among
many samples only the runs of equal weights other than 1 are kept:

    labels     x   x   a   b    c    x   d     (x = not learned)
    weights    0   0   1   0.5  0.5  0   1
    runs       [3, 5) of weight 0.5

A run lies within one sample, as the first token of a sample is never learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.data.types import IGNORE_INDEX

SMALLEST_WEIGHT = 1e-6
"""Below it a weight would leave nothing of a token but rounding."""
LARGEST_WEIGHT = 100.0


def weights_beside(labels: NDArray[np.int32], weights: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Returns weights with 0 where nothing is learned [T]; None where each learned token has the weight 1."""
    fitted = np.where(labels != IGNORE_INDEX, weights, 0).astype(np.float32)
    return fitted if _is_other(fitted).any() else None


def equal_weights(labels: NDArray[np.int32]) -> NDArray[np.float32]:
    """Returns the weights of tokens that count alike: 1 where one is learned, else 0 [T]."""
    return (labels != IGNORE_INDEX).astype(np.float32)


def num_weighted(weights: NDArray[np.float32] | None) -> int:
    """Returns how many learned tokens have a weight other than 1."""
    return 0 if weights is None else int(_is_other(weights).sum())


def _is_other(weights: NDArray[np.float32]) -> NDArray[np.bool_]:
    return (weights != 0) & (weights != 1)


@dataclass(frozen=True, eq=False)
class WeightRuns:
    """The W runs of equal weights other than 1 among some tokens, in order, none over another.

    Args:
        starts: int64 `[W]`, first token of each run.
        ends: int64 `[W]`, the token after its last.
        values: float32 `[W]`.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def none(cls) -> WeightRuns:
        """Returns no runs: each learned token has the weight 1."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))

    @classmethod
    def of(cls, weights: NDArray[np.float32]) -> WeightRuns:
        """Returns the runs of some weights [T]."""
        others = np.where(_is_other(weights), weights, 0)
        padded = np.concatenate(([0], others, [0]))
        borders = np.flatnonzero(padded[1:] != padded[:-1]).astype(np.int64)
        starts, ends = borders[:-1], borders[1:]
        is_run = others[starts] != 0 if len(starts) else np.zeros(0, dtype=np.bool_)
        return cls(starts[is_run], ends[is_run], others[starts[is_run]].astype(np.float32))

    def within(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns for each sample, tokens [start, end), its first run and the one after its last (int64 [N] both)."""
        return np.searchsorted(self.starts, starts), np.searchsorted(self.starts, ends)

    def of_samples(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], WeightRuns]:
        """Returns the runs of some samples, tokens [start, end), as int64 [R] the sample of each, and the R runs.

        The runs' borders are counted from the start of their sample, so that they are the same wherever it lies.
        """
        firsts, lasts = self.within(starts, ends)
        counts = lasts - firsts
        samples = np.repeat(np.arange(len(counts)), counts)
        chosen = np.repeat(lasts - np.cumsum(counts), counts) + np.arange(counts.sum())
        offsets = starts[samples]
        return samples, WeightRuns(self.starts[chosen] - offsets, self.ends[chosen] - offsets, self.values[chosen])

    def num_tokens(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many tokens of each sample have a weight other than 1, int64 [N]."""
        before = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        firsts, lasts = self.within(starts, ends)
        return before[lasts] - before[firsts]

    def beside(self, labels: NDArray[np.int32], *, start: int) -> NDArray[np.float32] | None:
        """Returns the weights of a sample whose first token is `start` [T]; None where each is 1."""
        first, last = np.searchsorted(self.starts, (start, start + len(labels)))
        if first == last:
            return None
        weights = equal_weights(labels)
        for run in range(first, last):
            weights[self.starts[run] - start : self.ends[run] - start] = self.values[run]
        return weights

    def require_within(self, num_tokens: int) -> None:
        """Raises ValueError where these cannot be the runs of so many tokens."""
        borders = np.stack((self.starts, self.ends), axis=1).ravel()
        is_ordered = bool((np.diff(borders) >= 0).all()) and bool((self.ends > self.starts).all())
        if len(borders) and not (is_ordered and borders[0] >= 0 and borders[-1] <= num_tokens):
            raise ValueError("the runs of loss weights do not lie within the tokens")
