"""Activations on the host and their way back: slots of one pinned pool, and one or two buffers on the device.

Forward sends a layer's tensors while the next layer computes. In backward, the moment a layer's recompute begins, the
copy of the layer that comes next is put in line: it waits for an event of the computing stream that lies behind the
last use of the buffer it writes to, and for nothing else. With one buffer the copy waits for the compute and the
compute for the copy.

Every slot is leased by one record of one graph and every buffer is owned by one record, so whatever the order of
forwards and backwards is, a layer reads what it wrote.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetune.optimizations.activations.copies import Copies, Moment
from finetune.optimizations.activations.host_memory import HostPool

if TYPE_CHECKING:
    from finetune.optimizations.activations.record import LayerRecord

ALIGNMENT = 256
"""Bytes that every tensor in a slot or buffer begins at a multiple of."""
_IN_FLIGHT_LAYERS = 2
"""Layers whose copies to the host may be under way before the computing stream waits for them."""


def padded(num_bytes: int) -> int:
    """Returns what a tensor of so many bytes takes of a slot."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass
class HostSlot:
    """A layer's part of the pool."""

    layer: int
    data: torch.Tensor
    """uint8, pinned where the system allows."""
    used: int = 0
    is_leased: bool = False
    written: Moment | None = None
    """When the last copy into it is over."""
    read: Moment | None = None
    """When the last copy out of it is over."""

    def has_room(self, tensor: torch.Tensor) -> bool:
        return self.used + padded(tensor.numel() * tensor.element_size()) <= len(self.data)


@dataclass
class Loaded:
    """A buffer on the device with the contents of a slot."""

    data: torch.Tensor
    """uint8."""
    owner: weakref.ReferenceType[LayerRecord] | None = None
    filled: Moment | None = None
    is_opened: bool = False

    def is_free(self) -> bool:
        """Whether no backward reads from it any more."""
        owner = None if self.owner is None else self.owner()
        return owner is None or owner.is_done or not self.is_opened

    def belongs_to(self, record: LayerRecord) -> bool:
        return self.owner is not None and self.owner() is record


@dataclass
class _Flight:
    """Tensors on their way to the host: they must live, unchanged, until they are there."""

    layer: int
    source: torch.Tensor
    version: int
    arrived: Moment | None


class Reload:
    """See the module.

    Args:
        pool: host memory of at least `sum(slot_bytes)`.
        slot_bytes: for each layer the most that it puts on the host.
        num_buffers: 2, or 1 for copies and compute in turns.
        copies: how bytes get from one to the other.
    """

    def __init__(
        self, pool: HostPool, slot_bytes: Sequence[int], *, num_buffers: int, copies: Copies, device: torch.device
    ) -> None:
        offsets = [sum(slot_bytes[:layer]) for layer in range(len(slot_bytes))]
        self._slots = [
            HostSlot(layer, pool.data[offset : offset + size])
            for layer, (offset, size) in enumerate(zip(offsets, slot_bytes, strict=True))
        ]
        largest = max(slot_bytes, default=0)
        self._buffers = [
            Loaded(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(num_buffers if largest else 0)
        ]
        self._pool = pool  # pinned as long as it is referred to
        self._copies = copies
        self.device = device
        self._flights: deque[_Flight] = deque()
        self.num_refused = 0
        """Tensors that stayed on the device since their slot was another graph's, or too small."""
        self.num_misses = 0
        """Layers whose copy was not under way when their backward began; with one buffer all of them."""

    @property
    def buffer_bytes(self) -> int:
        return sum(len(buffer.data) for buffer in self._buffers)

    # --- forward

    def lease(self, layer: int) -> HostSlot | None:
        """Returns the layer's slot, or None while another graph has it."""
        slot = self._slots[layer]
        if slot.is_leased or len(slot.data) == 0:
            return None
        slot.is_leased, slot.used = True, 0
        return slot

    def give_back(self, slot: HostSlot) -> None:
        """Frees a slot; copies into it that come later wait for those out of it."""
        slot.is_leased = False

    def send(self, slot: HostSlot, source: torch.Tensor) -> int:
        """Starts the copy of `source` (uint8) into the slot and returns its offset there."""
        offset = slot.used
        target = slot.data[offset : offset + len(source)]
        arrived = self._copies.to_host(source, target, after=slot.read)
        slot.written, slot.used = arrived, offset + padded(len(source))
        self._flights.append(_Flight(slot.layer, source, source._version, arrived))
        return offset

    def settle(self, layer: int) -> None:
        """Called where a layer's forward begins: lets go of what left `_IN_FLIGHT_LAYERS` layers ago.

        The computing stream waits for those copies, which bounds the memory they hold whatever the host does.
        """
        while self._flights and not layer - _IN_FLIGHT_LAYERS < self._flights[0].layer <= layer:
            self._land()

    def _land(self) -> None:
        flight = self._flights.popleft()
        self._copies.wait(flight.arrived)
        if flight.source._version != flight.version:
            raise RuntimeError(f"layer {flight.layer}: a stored tensor was changed in place on its way to the host")

    # --- backward

    def open(self, record: LayerRecord) -> None:
        """Makes the record's contents readable on the computing stream, and starts the copy of the next one's."""
        while self._flights:
            self._land()
        now = self._copies.moment()
        if record.has_host:
            loaded = next((buffer for buffer in self._buffers if buffer.belongs_to(record)), None)
            if loaded is None:
                self.num_misses += 1
                loaded = self._load(record, self._free_buffer() or self._extra_buffer(), after=now)
            loaded.is_opened = True
            record.loaded = loaded
            self._copies.wait(loaded.filled)
        if len(self._buffers) > 1:
            self._prefetch(record.next_on_host(), after=now)

    def fetch_first(self, record: LayerRecord) -> None:
        """Called where the forward of the last record with something on the host is over: its backward comes first, so
        its copy back begins now, under the layers and the head that follow."""
        if len(self._buffers) > 1 and record.has_host:
            self._prefetch(record, after=self._copies.moment())

    def _prefetch(self, record: LayerRecord | None, *, after: Moment | None) -> None:
        if record is None or any(buffer.belongs_to(record) for buffer in self._buffers):
            return
        buffer = self._free_buffer()
        if buffer is not None:
            self._load(record, buffer, after=after)

    def _free_buffer(self) -> Loaded | None:
        return next((buffer for buffer in self._buffers if buffer.is_free()), None)

    def _extra_buffer(self) -> Loaded:
        """Memory for one record, when all buffers are being read: backwards that run into each other."""
        return Loaded(torch.empty_like(self._buffers[0].data))

    def _load(self, record: LayerRecord, buffer: Loaded, *, after: Moment | None) -> Loaded:
        slot = record.slot
        assert slot is not None
        target = buffer.data[: slot.used]
        buffer.filled = slot.read = self._copies.to_device(slot.data[: slot.used], target, after=(after, slot.written))
        buffer.owner, buffer.is_opened = weakref.ref(record), False
        return buffer
