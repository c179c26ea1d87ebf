"""torch's own variable-length flash attention, with sinks where a model has them.

In every torch from 2.11 on, for fp16 and bf16 on compute capability 8.0 and up. The kernels behind
`torch.nn.attention.varlen` are called as an operation of ours: the public function ignores gradients of the
log-sum-exp, which sinks need (see `sinks.py`), and cannot be told in a recompute that its result is stored.

Legend: T slots of the batch, H query heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library, register_fake

from finetune.optimizations.activations.phase import remembered
from finetune.optimizations.activations.types import Group
from finetune.optimizations.attention.chunks import Chunk, attend_in_chunks
from finetune.optimizations.attention.head_groups import backward_in_groups
from finetune.optimizations.attention.sinks import add_sinks, sinks_gradient
from finetune.optimizations.attention.types import AttentionOptions, Boundaries


def attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """See `Attend`."""
    left = -1 if options.window is None else options.window - 1

    def attend(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, part: Chunk) -> torch.Tensor:
        return _FORWARD(q_THE, k_TKE, v_TKE, options.sinks, part.cu_seqlens, part.max_seqlen, options.scale, left)[0]

    return attend_in_chunks(attend, query, key, value, boundaries=boundaries)


def _forward(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp `[H, T]` (fp32); with sinks that of `sinks.py`."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_THE, k_TKE, v_TKE, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False, False,
        scale=scale, window_size_left=window_left, window_size_right=0,
    )  # fmt: skip
    return (out, lse) if sinks_H is None else add_sinks(out, lse, sinks_H)


def _backward(
    grad_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window_left: int,
) -> list[torch.Tensor]:
    """Gradients of query, key and value, and of the sinks where there are some."""
    # The kernel's state of dropout, which there is none of.
    seed = torch.zeros(2, dtype=torch.uint64, device=q_THE.device)
    unused = torch.empty(0, device=q_THE.device)

    def kernel(grad: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *tensors, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            0.0, False, seed, unused, scale=scale, window_size_left=window_left, window_size_right=0,
        )  # fmt: skip

    grads = backward_in_groups(kernel, grad_THE, q_THE, k_TKE, v_TKE, out_THE, lse_HT)
    return grads if sinks_H is None else [*grads, sinks_gradient(grad_THE, out_THE, lse_HT, sinks_H)]


class _Differentiable(torch.autograd.Function):
    """The forward operation with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = remembered(Group.ATTENTION, lambda: _FORWARD(*inputs))
        q, k, v, sinks, cu_seqlens, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, sinks, out, lse, cu_seqlens)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 8
        dq, dk, dv, *dsinks = _BACKWARD(grads[0], *ctx.saved_tensors, *ctx.numbers)
        return (dq, dk, dv, dsinks[0] if dsinks else None, None, None, None, None)


def _fake_forward(q_THE: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_THE), q_THE.new_empty((q_THE.shape[1], q_THE.shape[0]), dtype=torch.float32)


def _fake_backward(
    grad_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *_: Any,
) -> list[torch.Tensor]:
    tensors = (q_THE, k_TKE, v_TKE) if sinks_H is None else (q_THE, k_TKE, v_TKE, sinks_H)
    return [torch.empty_like(tensor) for tensor in tensors]


_NAME = "flash_attn_varlen"
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_NUMBERS = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt window_left"
_LIBRARY = Library("finetune", "FRAGMENT")
_LIBRARY.define(f"{_NAME}({_INPUTS}, {_NUMBERS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"{_NAME}_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor lse, {_NUMBERS}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl(_NAME, _forward, "CompositeExplicitAutograd")
_LIBRARY.impl(_NAME, _Differentiable.apply, "Autograd")
_LIBRARY.impl(f"{_NAME}_backward", _backward, "CompositeExplicitAutograd")
register_fake(f"finetune::{_NAME}", _fake_forward, lib=_LIBRARY)
register_fake(f"finetune::{_NAME}_backward", _fake_backward, lib=_LIBRARY)
_FORWARD: Any = torch.ops.finetune.flash_attn_varlen.default
_BACKWARD: Any = torch.ops.finetune.flash_attn_varlen_backward.default
