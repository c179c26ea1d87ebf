"""Batches cut at document boundaries, so that kernels which count in 32 bits never count past them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune.optimizations.attention.types import Boundaries

_MAX_OFFSET = 2**31 - 1
_EXTRA_SLOTS_A_DOCUMENT = 128
"""Slots that the backward's fp32 buffer of query gradients adds for each document."""


@dataclass(frozen=True)
class Chunk:
    """Whole documents, next to each other."""

    start: int
    """First slot, in the flattened batch."""
    end: int
    cu_seqlens: torch.Tensor
    """int32, from 0."""
    max_seqlen: int


def most_slots(numbers_a_slot: int) -> int:
    """Returns the longest document, in tokens, that 32-bit offsets number; `numbers_a_slot` is H * E."""
    return _MAX_OFFSET // numbers_a_slot - _EXTRA_SLOTS_A_DOCUMENT


def attend_in_chunks(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Chunk], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    boundaries: Boundaries,
) -> torch.Tensor:
    """Flattens rows, calls `attend` on each chunk (`[T, H, E]`, `[T, K, E]` twice, its offsets) and joins the parts."""
    q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    parts = chunks(boundaries, numbers_a_slot=q.shape[1] * q.shape[2])
    if len(parts) == 1:
        return attend(q, k, v, parts[0]).view(query.shape)
    slices = [slice(part.start, part.end) for part in parts]
    outputs = [attend(q[own], k[own], v[own], part) for own, part in zip(slices, parts, strict=True)]
    return torch.cat(outputs).view(query.shape)


def chunks(boundaries: Boundaries, *, numbers_a_slot: int) -> list[Chunk]:
    """Returns the batch in as few parts as 32-bit offsets allow; nearly always one.

    Args:
        numbers_a_slot: elements of the widest tensor for each slot, H * E.

    Raises:
        ValueError: one document alone is too long.
    """
    limit = _MAX_OFFSET // numbers_a_slot
    whole = boundaries.num_rows * boundaries.row_length
    num_documents = boundaries.cu_seqlens.shape[0] - 1
    if whole + _EXTRA_SLOTS_A_DOCUMENT * num_documents <= limit:
        return [Chunk(0, whole, boundaries.cu_seqlens, boundaries.max_seqlen)]
    return boundaries.derived(("chunks", limit), lambda: _cut(boundaries, limit))


def _cut(boundaries: Boundaries, limit: int) -> list[Chunk]:
    parts: list[list[int]] = [[]]
    used = 0
    for length in boundaries.lengths:
        cost = length + _EXTRA_SLOTS_A_DOCUMENT
        if cost > limit:
            raise ValueError(
                f"a document of {length} tokens is beyond the {limit - _EXTRA_SLOTS_A_DOCUMENT} that the kernel can "
                "number; lower data.max_length"
            )
        if used + cost > limit:
            parts.append([])
            used = 0
        parts[-1].append(length)
        used += cost
    made, document, start = [], 0, 0
    for lengths in parts:
        own = boundaries.cu_seqlens[document : document + len(lengths) + 1]
        made.append(Chunk(start, start + sum(lengths), own - own[0], max(lengths)))
        document, start = document + len(lengths), start + sum(lengths)
    return made
