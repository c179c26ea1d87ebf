"""Comparisons that several tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def assert_same_trajectory(left: Sequence[float], right: Sequence[float], *, relative: float) -> None:
    """Equal numbers of steps, each within `relative` of the other, without a drift to one side.

    A drift is told by the mean signed difference, which may be at most half of what a single step may be off.
    """
    assert len(left) == len(right), f"{len(left)} steps against {len(right)}"
    differences = [(a - b) / max(abs(b), 1e-12) for a, b in zip(left, right, strict=True)]
    worst = max(range(len(differences)), key=lambda index: abs(differences[index]))
    assert abs(differences[worst]) <= relative, f"step {worst}: {left[worst]} against {right[worst]}"
    assert abs(sum(differences) / len(differences)) <= relative / 2, f"one-sided: {differences}"


def assert_bitwise_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names, and equal bits under each."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{len(different)} tensors differ, such as {different[0]}"


def assert_as_accurate_as(
    found: torch.Tensor, plain: torch.Tensor, true: torch.Tensor, *, margin: float, rounding: float = 1e-6
) -> None:
    """No farther from the truth than plain low-precision torch by more than a factor; norms over the norm of `true`."""
    scale = true.double().norm().clamp(min=1e-30)
    own, other = ((one.double() - true.double()).norm().div(scale).item() for one in (found, plain))
    assert own <= margin * other + rounding, f"{own:.2e} from the truth, against {other:.2e} * {margin}"
