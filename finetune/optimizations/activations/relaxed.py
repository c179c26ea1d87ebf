"""The plan's linear relaxation: how many layers, in fractions, take each option; and the price of each budget.

A dense two-phase simplex: a handful of rows, a few hundred columns, one or two milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TINY = 1e-9
_MAX_PIVOTS = 2000
_GREEDY_PIVOTS = 200
"""After so many the first column that helps is taken, not the best: slower, but it cannot circle."""


@dataclass(frozen=True)
class Relaxed:
    """The best fractional assignment."""

    counts: np.ndarray
    """float64 `[N]`: layers that take each option."""
    prices: np.ndarray
    """float64 `[M]`: seconds that one more unit of each limit would save; none is negative."""


def solve_relaxed(
    costs: np.ndarray, uses: np.ndarray, limits: np.ndarray, *, members: np.ndarray, sizes: np.ndarray
) -> Relaxed | None:
    """Minimizes `costs @ counts` with `uses @ counts <= limits` and every class's counts summing to its size.

    Args:
        costs: `[N]`, seconds of each option.
        uses: `[M, N]`, what a layer with it takes of each limit; not negative.
        limits: `[M]`, not negative.
        members: int `[N]`, the class of each option.
        sizes: `[K]`, layers of each class.

    Returns:
        None where no assignment keeps to the limits.
    """
    num_limits, num_options = uses.shape
    num_classes = len(sizes)
    scale = np.maximum(limits, uses.max(axis=1, initial=0.0))
    scale[scale == 0] = 1.0
    num_rows, num_slacks = num_limits + num_classes, num_options + num_limits
    table = np.zeros((num_rows, num_slacks + num_classes + 1))
    table[:num_limits, :num_options] = uses / scale[:, None]
    table[num_limits:, :num_options] = members == np.arange(num_classes)[:, None]
    table[:, num_options:-1] = np.eye(num_rows)
    table[:, -1] = np.concatenate([limits / scale, sizes])
    basis = np.arange(num_options, num_options + num_rows)

    missing = np.zeros(table.shape[1])
    missing[num_slacks:-1] = 1.0
    missing -= table[num_limits:].sum(axis=0)
    _pivot(table, missing, basis, num_columns=num_slacks)
    if -missing[-1] > 1e-7:
        return None

    seconds = np.zeros(table.shape[1])
    seconds[:num_options] = costs
    seconds -= seconds[basis] @ table
    _pivot(table, seconds, basis, num_columns=num_slacks)
    counts = np.zeros(table.shape[1])
    counts[basis] = table[:, -1]
    prices = np.maximum(seconds[num_options:num_slacks], 0.0) / scale
    return Relaxed(counts[:num_options], prices)


def _pivot(table: np.ndarray, goal: np.ndarray, basis: np.ndarray, *, num_columns: int) -> None:
    """Exchanges basic columns in place until none lowers the goal."""
    tolerance = _TINY * max(1e-30, float(np.abs(goal[:num_columns]).max(initial=0.0)))
    for step in range(_MAX_PIVOTS):
        own = goal[:num_columns]
        column = int(own.argmin()) if step < _GREEDY_PIVOTS else int((own < -tolerance).argmax())
        if own[column] >= -tolerance:
            return
        entries = table[:, column]
        usable = np.flatnonzero(entries > _TINY)
        if not usable.size:
            return
        ratios = table[usable, -1] / entries[usable]
        smallest = usable[ratios <= ratios.min() + 1e-12]
        row = int(smallest[basis[smallest].argmin()])
        table[row] /= table[row, column]
        factors = table[:, column].copy()
        factors[row] = 0.0
        table -= factors[:, None] * table[row]
        goal -= goal[column] * table[row]
        basis[row] = column
