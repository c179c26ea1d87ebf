"""Batches cut at document boundaries, so that kernels which count in 32 bits never count past them."""

from __future__ import annotations

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
            raise ValueError(f"a document of {length} tokens is beyond the {limit} slots that the kernel can number")
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
