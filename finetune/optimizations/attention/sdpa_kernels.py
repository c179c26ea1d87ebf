"""torch's scaled dot product attention with sinks: its kernels called directly, since the public function keeps the
log-sum-exp to itself.

On CUDA the memory-efficient kernel (any mask, compute capability 5.0 and up), on the CPU its flash kernel.

Legend: B batch, H heads, L queries and keys, E width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from finetune.optimizations.activations.phase import remembered
from finetune.optimizations.activations.types import Group
from finetune.optimizations.attention.sinks import add_sinks, sinks_gradient

_LSE_MULTIPLE = 32
"""The CUDA kernel pads its log-sum-exp to this many queries."""


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[B, H, L, E]` tensors, all with H heads, causal where there is no mask.

    Args:
        mask: additive, in the format of `query`, broadcast to `[B, H, L, L]`.
        sinks: `[H]` or None.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return _SdpaWithSinks.apply(query, key, value, sinks, mask, scale)  # pyright: ignore[reportReturnType]


class _SdpaWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        out, lse, *extra = remembered(Group.ATTENTION, lambda: _forward(query, key, value, sinks, mask, scale))
        ctx.save_for_backward(query, key, value, sinks, mask, out, lse, *extra)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, mask, out, lse, *extra = ctx.saved_tensors
        grad = grads[0].contiguous()
        is_causal = mask is None
        if query.is_cuda:
            bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
            padded = F.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=float("inf"))
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                grad, query, key, value, bias, out, padded, *extra, 0.0, [True, True, True, False], is_causal,
                scale=ctx.scale,
            )  # fmt: skip
        else:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=ctx.scale
            )
        dsinks = None
        if ctx.needs_input_grad[3]:
            dsinks = torch.stack(
                [
                    sinks_gradient(one_grad.transpose(0, 1), one_out.transpose(0, 1), one_lse, sinks)
                    for one_grad, one_out, one_lse in zip(grad, out, lse, strict=True)
                ]
            ).sum(0)
        return dq, dk, dv, dsinks, None, None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Attention, its log-sum-exp, and on CUDA the kernel's seed and offset, which its backward asks for."""
    is_causal = mask is None
    extra: list[torch.Tensor] = []
    if query.is_cuda:
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        out, lse, *extra = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, is_causal, scale=scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    return (*_each_batch(out, lse, sinks), *extra)


def _each_batch(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds sinks to `out` `[B, H, L, E]` and `lse` `[B, H, >= L]`; returns both, `lse` cut to `[B, H, L]`.

    The new `out` lies in memory as `[B, L, H, E]`, as the CUDA kernel's own does: its backward in 16 bits reads it so
    without a look at the strides.
    """
    num_queries = out.shape[2]
    pairs = [
        add_sinks(one_out.transpose(0, 1).contiguous(), one_lse[:, :num_queries], sinks)
        for one_out, one_lse in zip(out, lse, strict=True)
    ]
    return torch.stack([one for one, _ in pairs]).transpose(1, 2), torch.stack([one for _, one in pairs])
