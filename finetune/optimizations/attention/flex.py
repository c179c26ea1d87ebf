"""torch's flex attention: the packed mask as a block schedule, made once a batch; compiled once a shape.

For fp16, bf16 and fp32 on CUDA; its CPU version has no backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from finetune.optimizations.attention.chunks import most_slots
from finetune.optimizations.attention.types import AttentionOptions, Boundaries

_MOST_KERNELS = 128


def attend_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """See `Attend`. Rows whose numbers 32 bits cannot count are attended to in groups; rows share nothing."""
    rows = rows_a_call(row_length=query.shape[1], numbers_a_slot=query.shape[2] * query.shape[3])
    if query.shape[0] <= rows:
        return _attend_rows(query, key, value, 0, boundaries, options)
    parts = zip(query.split(rows), key.split(rows), value.split(rows), strict=True)
    outputs = [_attend_rows(q, k, v, number * rows, boundaries, options) for number, (q, k, v) in enumerate(parts)]
    return torch.cat(outputs)


def rows_a_call(*, row_length: int, numbers_a_slot: int) -> int:
    """Returns how many rows the kernel can number at once.

    Args:
        numbers_a_slot: elements of the widest tensor for each slot, H * E.

    Raises:
        ValueError: one row alone is too long.
    """
    if row_length > (limit := most_slots(numbers_a_slot)):
        raise ValueError(
            f"a row of {row_length} slots is beyond the {limit} that the kernel can number; lower data.max_length"
        )
    return limit // row_length


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_row: int,
    boundaries: Boundaries,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of the rows of the batch from `first_row` on."""
    rows = slice(first_row, first_row + query.shape[0])
    block_mask = boundaries.derived(
        ("block_mask", options.window, first_row),
        lambda: make_block_mask(boundaries.sequence_ids[rows], window=options.window),
    )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    result: Any = _compiled()(
        q, k, v,
        score_mod=None if options.softcap is None else _capped(options.softcap),
        block_mask=block_mask,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=options.sinks is not None,
    )  # fmt: skip
    if options.sinks is None:
        return result.transpose(1, 2)
    out, lse = result
    # exp(lse - lse') of sinks.py, written as a sigmoid; flex attention gives the gradient of its log-sum-exp.
    factor = torch.sigmoid(lse.float() - options.sinks.float()[None, :, None])
    return (out * factor[..., None]).to(out.dtype).transpose(1, 2)


def make_block_mask(sequence_ids: torch.Tensor, *, window: int | None) -> BlockMask:
    """Returns the schedule of which blocks of keys each block of queries visits, from `sequence_ids` `[R, L]`."""
    num_rows, row_length = sequence_ids.shape

    def visible(row: Any, head: Any, q: Any, k: Any) -> Any:
        same = sequence_ids[row, q] == sequence_ids[row, k]
        return same & (q >= k) if window is None else same & (q >= k) & (q - k < window)

    return create_block_mask(
        visible, num_rows, None, row_length, row_length, device=str(sequence_ids.device), _compile=True
    )


@cache
def _compiled() -> Any:
    # One kernel for each window, number format, row length, and with or without gradients: more than the 8 after which
    # torch gives up and takes plain operations, in the middle of a run. A whole graph is an error there instead.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_KERNELS)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def _capped(softcap: float) -> Any:
    """One function a value, since a new one would be compiled again."""

    def score_mod(score: Any, row: Any, head: Any, q: Any, k: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return score_mod
