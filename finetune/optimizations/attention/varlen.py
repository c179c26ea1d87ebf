"""torch's own variable-length flash attention (`torch.nn.attention.varlen`), with sinks where a model has them.

In every torch from 2.11 on, for fp16 and bf16 on compute capability 8.0 and up. Without sinks the public function is
called; with sinks its kernels, since the public function ignores gradients of the log-sum-exp (see `sinks.py`).

Legend: T slots of the batch, H query heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import library

from finetune.optimizations.attention.chunks import Chunk, attend_in_chunks
from finetune.optimizations.attention.sinks import add_sinks, sinks_gradient
from finetune.optimizations.attention.types import AttentionOptions, Boundaries


def attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """See `Attend`."""
    return attend_in_chunks(partial(_attend, options=options), query, key, value, boundaries=boundaries)


def _attend(
    q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, part: Chunk, *, options: AttentionOptions
) -> torch.Tensor:
    left = -1 if options.window is None else options.window - 1
    if options.sinks is None:
        function, takes_groups = _public_function()
        more = {"enable_gqa": q_THE.shape[1] != k_TKE.shape[1]} if takes_groups else {}
        return function(
            q_THE, k_TKE, v_TKE, part.cu_seqlens, part.cu_seqlens, part.max_seqlen, part.max_seqlen,
            scale=options.scale, window_size=(left, 0), **more,
        )  # fmt: skip
    out, _ = torch.ops.finetune.flash_attn_varlen_sinks(
        q_THE, k_TKE, v_TKE, options.sinks, part.cu_seqlens, part.max_seqlen, options.scale, left
    )
    return out


@cache
def _public_function() -> tuple[Any, bool]:
    """torch's function, and whether it wants to be told of grouped heads (2.13 does, 2.11 does not know the word)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


@library.custom_op("finetune::flash_attn_varlen_sinks", mutates_args=())
def _forward_op(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with sinks and its lse' (see `sinks.py`)."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_THE, k_TKE, v_TKE, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False, False,
        scale=scale, window_size_left=window_left, window_size_right=0,
    )  # fmt: skip
    return add_sinks(out, lse, sinks_H)


@_forward_op.register_fake
def _(q_THE, *rest):
    return torch.empty_like(q_THE), q_THE.new_empty((q_THE.shape[1], q_THE.shape[0]), dtype=torch.float32)


@library.custom_op("finetune::flash_attn_varlen_sinks_backward", mutates_args=())
def _backward_op(
    grad_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and sinks."""
    # The kernel's state of dropout, which there is none of.
    seed = torch.zeros(2, dtype=torch.uint64, device=q_THE.device)
    unused = torch.empty(0, device=q_THE.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_THE.contiguous(), q_THE, k_TKE, v_TKE, out_THE, lse_HT, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        0.0, False, seed, unused, scale=scale, window_size_left=window_left, window_size_right=0,
    )  # fmt: skip
    return dq, dk, dv, sinks_gradient(grad_THE, out_THE, lse_HT, sinks_H)


@_backward_op.register_fake
def _(grad_THE, q_THE, k_TKE, v_TKE, sinks_H, *rest):
    return tuple(torch.empty_like(tensor) for tensor in (q_THE, k_TKE, v_TKE, sinks_H))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, cu_seqlens)


def _backward(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.finetune.flash_attn_varlen_sinks_backward(grad_out, *ctx.saved_tensors, *ctx.numbers)
    return (*grads, None, None, None, None)


_forward_op.register_autograd(_backward, setup_context=_save)
