"""What each micro-batch hands to the model as its boundaries: the cached object, or the order to rebuild them."""

from __future__ import annotations

from finetune.data.packed_metadata import PackedMetadata
from finetune.optimizations.attention.rebuild import RebuildCounter, RebuildEachLayer


class MetadataFeed:
    """Gives the argument `packed_metadata` of a forward pass and counts the builds.

    Args:
        is_cached: hand on what the collator built; otherwise each layer builds its own from the positions.
    """

    def __init__(self, *, is_cached: bool) -> None:
        self._counter = None if is_cached else RebuildCounter()
        self._num_cached = 0

    @property
    def num_builds(self) -> int:
        """Builds of boundaries so far: one a batch, or one a layer and pass."""
        return self._num_cached if self._counter is None else self._counter.num_builds

    def argument(self, metadata: PackedMetadata) -> PackedMetadata | RebuildEachLayer:
        """Returns what stands for `metadata` in the model's arguments."""
        if self._counter is not None:
            return RebuildEachLayer(metadata.position_ids, self._counter)
        self._num_cached += 1
        return metadata
