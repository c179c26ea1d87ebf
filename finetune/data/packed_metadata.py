"""Where the documents of a batch begin and end: made once, on the host, and carried to the device once.

Legend: R rows, L slots a row, T = R * L slots of the batch, D documents of the batch. A row's pad tail counts as one of
its documents, so the documents of a batch fill it without a gap. Example, R = 1, L = 8, documents of 3 and 2 tokens:

    position_ids   0  1  2  0  1  0  1  2
    sequence_ids   0  0  0  1  1  2  2  2
    cu_seqlens     0  3  5  8
    lengths        3, 2, 3        pad_documents  2
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

MAX_SLOTS = 2**31 - 1
"""Slots of one batch at most, since kernels count them in 32 bits."""

Derived = TypeVar("Derived")


@dataclass(frozen=True, eq=False)
class PackedMetadata:
    """The boundaries of one batch, and what attention backends derive from them.

    All three tensors are views of one buffer, so that one copy takes them to the device, and nothing has to be read
    back: lengths and counts stay here as Python numbers. The views are made once, since each layer asks for them. What
    a backend derives (a mask, a block schedule) is made at its first use, serves all layers and their recompute, and
    goes with this object.
    """

    num_rows: int
    row_length: int
    lengths: tuple[int, ...]
    """Tokens of each document, in the order of the slots; D numbers."""
    pad_documents: frozenset[int]
    """Which documents are pad tails."""
    buffer: torch.Tensor
    """int32 `[2 * T + D + 1]`: positions, sequence ids, cumulated lengths."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def num_slots(self) -> int:
        return self.num_rows * self.row_length

    @cached_property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """int32 `[R, L]`: each slot's place in its document, from 0."""
        return self.buffer[: self.num_slots].view(self.num_rows, self.row_length)

    @cached_property
    def sequence_ids(self) -> torch.Tensor:
        """int32 `[R, L]`: the number of each slot's document in the batch."""
        return self.buffer[self.num_slots : 2 * self.num_slots].view(self.num_rows, self.row_length)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 `[D + 1]`: where each document begins in the flattened batch, and its end."""
        return self.buffer[2 * self.num_slots :]

    @property
    def has_one_document_a_row(self) -> bool:
        """Says whether each row is one document from end to end; then a plain causal mask is exact."""
        return len(self.lengths) == self.num_rows

    def derived(self, key: Hashable, build: Callable[[], Derived]) -> Derived:
        """Returns what `build` made under `key`, calling it at the first use only."""
        if key not in self._derived:
            self._derived[key] = build()
        return self._derived[key]

    @property
    def num_derived(self) -> int:
        """How many structures were derived so far."""
        return len(self._derived)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedMetadata:
        """Returns the same boundaries on `device`, without what was derived elsewhere."""
        buffer = self.buffer.to(device, non_blocking=non_blocking)
        return PackedMetadata(self.num_rows, self.row_length, self.lengths, self.pad_documents, buffer)

    def pin_memory(self, device: str | torch.device | None = None) -> PackedMetadata:
        """Returns a copy in pinned host memory; torch's data loader calls this (`device` is an argument of its own)."""
        buffer = self.buffer.pin_memory()
        return PackedMetadata(self.num_rows, self.row_length, self.lengths, self.pad_documents, buffer)


def build_packed_metadata(rows: Sequence[Sequence[int]], *, row_length: int) -> PackedMetadata:
    """Makes the boundaries of a batch from the lengths of its documents.

    Args:
        rows: for each row the tokens of its documents, in order; what is left of the row becomes its pad tail.
        row_length: L.

    Raises:
        ValueError: no row, a document without tokens, a row that overflows, or more slots than 32 bits count.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    if len(rows) * row_length > MAX_SLOTS:
        raise ValueError(
            f"{len(rows)} rows of {row_length} slots are more than the {MAX_SLOTS} that a batch can number; "
            "lower training.rows_per_micro_batch or data.max_length"
        )
    lengths: list[int] = []
    pad_documents: set[int] = set()
    for number, documents in enumerate(rows):
        _require_fitting(number, documents, row_length)
        lengths += map(int, documents)
        if tail := row_length - sum(documents):
            pad_documents.add(len(lengths))
            lengths.append(int(tail))
    counts = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(counts)
    buffer = np.empty(2 * len(rows) * row_length + len(lengths) + 1, dtype=np.int32)
    slots = len(rows) * row_length
    buffer[:slots] = np.arange(slots) - np.repeat(ends - counts, counts)
    buffer[slots : 2 * slots] = np.repeat(np.arange(len(lengths)), counts)
    buffer[2 * slots] = 0
    buffer[2 * slots + 1 :] = ends
    return PackedMetadata(len(rows), row_length, tuple(lengths), frozenset(pad_documents), torch.from_numpy(buffer))


def _require_fitting(number: int, documents: Sequence[int], row_length: int) -> None:
    if any(length < 1 for length in documents):
        raise ValueError(f"row {number}: a document of {min(documents)} tokens; each needs at least one")
    if (total := sum(documents)) > row_length:
        raise ValueError(f"row {number}: documents of {total} tokens in a row of {row_length}")
