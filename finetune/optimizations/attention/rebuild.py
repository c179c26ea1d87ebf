"""The way without the metadata cache: each layer finds the boundaries again from the positions, on the device.

That is what frameworks do that pass `position_ids` only: each kernel that wants offsets or a maximum waits for the
device, in every layer, and again in the recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch

from finetune.data.packed_metadata import Derived


class RebuildCounter:
    """Counts rebuilds over the batches of a run."""

    def __init__(self) -> None:
        self.num_builds = 0


@dataclass(frozen=True, eq=False)
class RebuildEachLayer:
    """Stands in a model call's arguments where the cached metadata would; each layer asks it anew."""

    position_ids: torch.Tensor
    """int `[R, L]`, on the device."""
    counter: RebuildCounter

    def boundaries(self) -> RebuiltBoundaries:
        """Returns new boundaries of the batch; what is derived from them is used once."""
        self.counter.num_builds += 1
        return RebuiltBoundaries(self.position_ids)


@dataclass(frozen=True, eq=False)
class RebuiltBoundaries:
    """The boundaries that `position_ids` `[R, L]` tell; each is worked out when a backend asks for it."""

    position_ids: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.position_ids.shape[0]

    @property
    def row_length(self) -> int:
        return self.position_ids.shape[1]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 `[D + 1]`; waits for the device."""
        starts = (self.position_ids.flatten() == 0).nonzero().flatten()
        end = starts.new_full((1,), self.position_ids.numel())
        return torch.cat((starts, end)).to(torch.int32)

    @cached_property
    def max_seqlen(self) -> int:
        """Waits for the device."""
        return int(self.cu_seqlens.diff().max().item())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Waits for the device."""
        return tuple(self.cu_seqlens.diff().tolist())

    @cached_property
    def sequence_ids(self) -> torch.Tensor:
        """int32 `[R, L]`."""
        ids = (self.position_ids.flatten() == 0).cumsum(0, dtype=torch.int32) - 1
        return ids.view_as(self.position_ids)

    @property
    def has_one_document_a_row(self) -> bool:
        """Waits for the device."""
        return self.cu_seqlens.shape[0] - 1 == self.num_rows

    def derived(self, key: Hashable, build: Callable[[], Derived]) -> Derived:
        return build()
