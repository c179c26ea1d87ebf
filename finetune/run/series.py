"""Curves out of metrics records, made short enough to draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One curve: `steps`, `values` and, where several records were joined into a point, their `low` and `high`."""

    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    last: float | None
    """The last value itself, which a joined point is not."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def is_joined(self) -> bool:
        return any(low != high for low, high in zip(self.low, self.high, strict=True))


def extract_series(records: Sequence[Mapping[str, Any]], *, kind: str, key: str, scale: float = 1.0) -> Series:
    """Returns the finite values of `key`, times `scale`, over the steps; long runs are joined to 400 points."""
    points = [
        (float(record["step"]), float(record[key]) * scale)
        for record in records
        if record.get("kind") == kind and _is_number(record.get(key)) and _is_number(record.get("step"))
    ]
    num_bins = min(len(points), _MAX_POINTS)
    edges = [index * len(points) // num_bins for index in range(num_bins + 1)] if points else [0]
    bins = [points[start:end] for start, end in itertools.pairwise(edges)]
    return Series(
        steps=tuple(sum(step for step, _ in group) / len(group) for group in bins),
        values=tuple(sum(value for _, value in group) / len(group) for group in bins),
        low=tuple(min(value for _, value in group) for group in bins),
        high=tuple(max(value for _, value in group) for group in bins),
        last=points[-1][1] if points else None,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and its neighbours, a fiftieth of the curve on both sides and fewer at its ends.

    Unlike an exponential mean it does not lag behind a curve that falls.
    """
    reach = max(1, len(values) // 50)
    sums = [0.0, *itertools.accumulate(values)]
    smoothed: list[float] = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        smoothed.append((sums[index + side + 1] - sums[index - side]) / (2 * side + 1))
    return smoothed


def nice_ticks(low: float, high: float, *, count: int) -> list[float]:
    """Returns about `count` round numbers that enclose `low` and `high`."""
    if not high > low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
