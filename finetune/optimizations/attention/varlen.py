"""torch's own variable-length flash attention, with sinks where a model has them.

In every torch from 2.11 on, for fp16 and bf16 on compute capability 8.0 and up. The kernels behind
`torch.nn.attention.varlen` are called as an operation of ours: the public function ignores gradients of the
log-sum-exp, which sinks need (see `sinks.py`), and cannot be told in a recompute that its result is stored.

Legend: T slots of the batch, H query heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from finetune.optimizations.attention.chunks import Chunk, attend_in_chunks
from finetune.optimizations.attention.head_groups import backward_in_groups
from finetune.optimizations.attention.operation import register_operation
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


_NUMBERS = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt window_left"
_FORWARD: Any = register_operation("flash_attn_varlen", _NUMBERS, forward=_forward, backward=_backward)
