"""Attention over packed rows in plain torch, with every score written out: what all backends are compared with.

With s_ij = scale * q_i . k_j (capped where a model caps), over the keys j that query i may see:
out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink)).  Memory: R * H * L * L scores, so for short rows only.
"""

from __future__ import annotations

import torch

from finetune.optimizations.attention.types import AttentionOptions, Boundaries


def attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    boundaries: Boundaries,
    options: AttentionOptions,
) -> torch.Tensor:
    """Computes attention in the format of its inputs (`[R, L, H, E]`, `[R, L, K, E]` twice); see `Attend`."""
    visible = visible_keys(boundaries.sequence_ids, window=options.window)[:, None]  # [R, 1, L, L]
    return dense_softmax_attention(query, key, value, visible=visible, options=options)


def dense_softmax_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, visible: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attention with a mask `visible` (bool, broadcast to `[R, H, L, L]`); sinks and caps as in the module's text."""
    groups = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2)
    k = key.transpose(1, 2).repeat_interleave(groups, dim=1)
    v = value.transpose(1, 2).repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores.float() if scores.dtype != torch.float64 else scores, dim=-1).to(query.dtype)
    if options.sinks is not None:
        weights = weights[..., :-1]
    return (weights @ v).transpose(1, 2)


def visible_keys(sequence_ids: torch.Tensor, *, window: int | None) -> torch.Tensor:
    """Returns which keys each query may see, bool `[R, L, L]`: of its own document, not later, inside the window."""
    place = torch.arange(sequence_ids.shape[1], device=sequence_ids.device, dtype=torch.int32)
    distance = place[:, None] - place[None, :]
    visible = (sequence_ids[:, :, None] == sequence_ids[:, None, :]) & (distance >= 0)
    return visible if window is None else visible & (distance < window)
