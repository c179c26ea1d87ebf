"""The product with a frozen weight of which the gradient alone is wanted.

    y = x W^T        forward: not computed, y holds whatever was in its memory
    dx = dy W        backward: as ever

For a remake whose result nobody reads and whose graph goes backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def of_gradient_alone(base: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns memory of the shape and format of `compute(x)`, with its gradient.

    Args:
        base: a frozen `nn.Linear` or bitsandbytes `Linear4bit`.
        compute: its forward; called with no rows, for the format of the result.
        x: `[..., in]`.
    """
    with torch.no_grad():
        kind = compute(x[..., :0, :])
    return _GradientAlone.apply(x, base, kind)


class _GradientAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Module, kind: Tensor) -> Tensor:
        ctx.base, ctx.x_dtype = base, x.dtype
        ctx.compute_dtype = getattr(base, "compute_dtype", None) or kind.dtype
        return kind.new_empty((*x.shape[:-1], kind.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        weight = _dense_weight(ctx.base).to(ctx.compute_dtype)
        return (grad_output.to(ctx.compute_dtype) @ weight).to(ctx.x_dtype), None, None


def _dense_weight(base: nn.Module) -> Tensor:
    """The weight `[out, in]`; one of four bits is unpacked."""
    weight: Any = base.weight
    if not hasattr(weight, "quant_state"):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)
