"""Attention with a dense mask, made once a batch (`sdpa`), and one call a document (`segments`).

Both work in any number format and on any device. `sdpa` costs L * L a row and head, whatever the documents; `segments`
costs what the documents cost, and one launch for each.
"""

from __future__ import annotations

import torch

from finetune.optimizations.attention.reference import dense_softmax_attention, visible_keys
from finetune.optimizations.attention.sdpa_kernels import sdpa
from finetune.optimizations.attention.types import AttentionOptions, Boundaries

_MASK_MULTIPLE = 8
"""A mask whose rows are not aligned to so many numbers is copied by the CUDA kernel in each layer."""


def attend_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """See `Attend`. The mask is derived once a batch for each window and number format."""
    if options.softcap is not None:
        visible = boundaries.derived(
            ("visible", options.window), lambda: visible_keys(boundaries.sequence_ids, window=options.window)
        )
        return dense_softmax_attention(query, key, value, visible=visible[:, None], options=options)
    mask = None
    if options.window is not None or not boundaries.has_one_document_a_row:
        mask = boundaries.derived(
            ("dense_mask", options.window, query.dtype, query.device),
            lambda: dense_mask(boundaries.sequence_ids, window=options.window, dtype=query.dtype),
        )
    q, k, v = _heads_first(query, key, value)
    return sdpa(q, k, v, mask=mask, scale=options.scale, sinks=options.sinks).transpose(1, 2)


def attend_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """See `Attend`. One call a document; masks only where a document is longer than the window."""
    shape = query.shape
    lengths = list(boundaries.lengths)
    flat = [tensor.flatten(0, 1).split(lengths) for tensor in (query, key, value)]
    outputs = [_attend_document(q, k, v, boundaries, options) for q, k, v in zip(*flat, strict=True)]
    return torch.cat(outputs).view(shape)


def _attend_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """Attention of one document: `[length, H, E]` and twice `[length, K, E]` to `[length, H, E]`."""
    length, window = len(query), options.window
    if options.softcap is not None:
        visible = boundaries.derived(
            ("visible_band", length, window, query.device), lambda: _band(length, window, query.device)
        )
        out = dense_softmax_attention(query[None], key[None], value[None], visible=visible, options=options)
        return out[0]
    mask = None
    if window is not None and length > window:
        mask = boundaries.derived(
            ("band", length, window, query.dtype, query.device),
            lambda: _additive(_band(length, window, query.device), query.dtype),
        )
    q, k, v = _heads_first(query[None], key[None], value[None])
    return sdpa(q, k, v, mask=mask, scale=options.scale, sinks=options.sinks)[0].transpose(0, 1)


def dense_mask(sequence_ids: torch.Tensor, *, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns 0 where a query may see a key and minus infinity elsewhere: `[R, 1, L, L]` in `dtype`."""
    return _additive(visible_keys(sequence_ids, window=window)[:, None], dtype)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    length = visible.shape[-1]
    stride = -(-length // _MASK_MULTIPLE) * _MASK_MULTIPLE
    padded = torch.zeros(*visible.shape[:-1], stride, dtype=dtype, device=visible.device)
    mask = padded[..., :length]
    return mask.masked_fill_(~visible, float("-inf"))


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    one_document = torch.zeros(1, length, dtype=torch.int32, device=device)
    return visible_keys(one_document, window=window)[:, None]


def _heads_first(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[B, L, heads, E]` to `[B, H, L, E]`, keys and values repeated for the queries that share them: the kernels that
    take a mask know no groups."""
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
