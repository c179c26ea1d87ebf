"""Packing: which samples share a row. Lengths in, plan out; no torch, no tokens.

The plan is best-fit decreasing: samples from the longest to the shortest, each into the fullest row that takes it.
Done sample by sample that is slow in Python, so it is done by counts: all samples of one length at once, all open rows
of one free space at once. The rows are the ones that the sample-by-sample rule gives; the work grows with the number of
distinct lengths, not of samples.

Example, `max_length=10`, lengths `[7, 3, 5, 4, 1]`: the rows hold samples `{0, 1}`, `{2, 3, 4}`; both are full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.data.types import Row


@dataclass(frozen=True)
class PackPlan:
    """Rows as one flat list of sample indices.

    Row r holds `sample_indices[row_starts[r]:row_starts[r + 1]]`, in the order in which they stand in the row.

    Args:
        sample_indices: int64 `[num_samples]`; every sample exactly once.
        row_starts: int64 `[num_rows + 1]`.
        row_tokens: int64 `[num_rows]`; real tokens of each row.
        max_length: length of a row in tokens.
    """

    sample_indices: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    row_tokens: NDArray[np.int64]
    max_length: int

    def __len__(self) -> int:
        return len(self.row_tokens)

    def __getitem__(self, row: int) -> Row:
        start, end = self.row_starts[row], self.row_starts[row + 1]
        return Row(tuple(self.sample_indices[start:end].tolist()), int(self.row_tokens[row]))

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Real tokens of all rows."""
        return int(self.row_tokens.sum())

    @property
    def num_pad_tokens(self) -> int:
        """Slots that no sample fills when every row is `max_length` long."""
        return len(self) * self.max_length - self.num_tokens

    @property
    def fill(self) -> float:
        """Share of the slots that hold real tokens, 0 to 1."""
        return self.num_tokens / (len(self) * self.max_length) if len(self) else 0.0

    def most_documents(self, num_rows: int) -> int:
        """Documents of a batch of `num_rows` rows at most; a row's pad tail counts as one."""
        documents = np.diff(self.row_starts) + (self.row_tokens < self.max_length)
        return int(np.sort(documents)[-num_rows:].sum())


def pack(lengths: NDArray[np.int64], *, max_length: int, seed: int) -> PackPlan:
    """Packs samples into rows of `max_length` tokens by best-fit decreasing.

    The seed decides which of equally long samples goes where, the order of samples in a row and the order of rows;
    the number of rows does not depend on it.

    Args:
        lengths: int64 `[num_samples]`, each from 1 to `max_length`.

    Raises:
        ValueError: a length is outside 1 to `max_length`.
    """
    _check_lengths(lengths, max_length)
    rng = np.random.default_rng(seed)
    num_samples = len(lengths)
    shuffled = rng.permutation(num_samples)
    by_length = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows_of_sorted, num_rows = _best_fit_decreasing(lengths[by_length], max_length)
    row_rank = rng.permutation(num_rows)
    order = np.lexsort((rng.random(num_samples), row_rank[rows_of_sorted]))
    return _plan(by_length[order], row_rank[rows_of_sorted][order], lengths, num_rows, max_length)


def one_sample_a_row(lengths: NDArray[np.int64], *, max_length: int) -> PackPlan:
    """The plan of `packing: false`: sample i is row i.

    Raises:
        ValueError: a length is outside 1 to `max_length`.
    """
    _check_lengths(lengths, max_length)
    indices = np.arange(len(lengths), dtype=np.int64)
    return _plan(indices, indices, lengths, len(lengths), max_length)


def _check_lengths(lengths: NDArray[np.int64], max_length: int) -> None:
    if len(lengths) and (lengths.min() < 1 or lengths.max() > max_length):
        worst = int(lengths.max() if lengths.max() > max_length else lengths.min())
        raise ValueError(f"a sample of {worst} tokens does not go into rows of 1 to {max_length} tokens")


def _plan(
    sample_indices: NDArray[np.int64],
    row_of: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_rows: int,
    max_length: int,
) -> PackPlan:
    """Makes the plan from samples sorted by row and the row of each."""
    row_starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=row_starts[1:])
    ends = np.concatenate(([0], np.cumsum(lengths[sample_indices])))
    row_tokens = ends[row_starts[1:]] - ends[row_starts[:-1]]
    return PackPlan(sample_indices.astype(np.int64), row_starts, row_tokens.astype(np.int64), max_length)


class _OpenRows:
    """Rows that still have room, by free space, with the smallest sufficient space found by bit operations."""

    def __init__(self) -> None:
        self._rows: dict[int, list[NDArray[np.int64]]] = {}
        self._spaces = 0

    def add(self, space: int, rows: NDArray[np.int64]) -> None:
        if space and len(rows):
            self._rows.setdefault(space, []).append(rows)
            self._spaces |= 1 << space

    def take_tightest(self, at_least: int) -> tuple[int, NDArray[np.int64]] | None:
        """Removes and returns the rows with the smallest free space of at least `at_least`."""
        candidates = self._spaces >> at_least
        if not candidates:
            return None
        space = at_least + (candidates & -candidates).bit_length() - 1
        self._spaces &= ~(1 << space)
        return space, np.concatenate(self._rows.pop(space))


def _best_fit_decreasing(lengths: NDArray[np.int64], max_length: int) -> tuple[NDArray[np.int64], int]:
    """Returns the row of each sample, lengths being sorted from long to short, and the number of rows.

    One row of free space f takes `f // length` samples of a length before best fit turns to the next row: after the
    first, this row is the tightest that still fits.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    distinct, firsts = np.unique(-lengths, return_index=True)
    ends = np.append(firsts, len(lengths))[1:]
    open_rows = _OpenRows()
    num_rows = 0
    for length, start, end in zip((-distinct).tolist(), firsts.tolist(), ends.tolist(), strict=True):
        while start < end:
            tightest = open_rows.take_tightest(length)
            if tightest is None:
                needed = -(-(end - start) // (max_length // length))
                tightest = max_length, np.arange(num_rows, num_rows + needed)
                num_rows += needed
            space, rows = tightest
            start += _fill(row_of[start:end], rows, space, length, open_rows)
    return row_of, num_rows


def _fill(row_of: NDArray[np.int64], rows: NDArray[np.int64], space: int, length: int, open_rows: _OpenRows) -> int:
    """Puts samples of one length into rows of one free space; returns how many went in."""
    each = space // length
    full = min(len(rows), len(row_of) // each)
    row_of[: full * each] = np.repeat(rows[:full], each)
    open_rows.add(space - each * length, rows[:full])
    placed, rest = full * each, len(row_of) - full * each
    if full < len(rows):
        if rest:  # fewer than `each`: they share one row
            row_of[placed:] = rows[full]
            placed += rest
            open_rows.add(space - rest * length, rows[full : full + 1])
            full += 1
        open_rows.add(space, rows[full:])
    return placed
