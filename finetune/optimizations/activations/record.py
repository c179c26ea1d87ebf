"""What one run through one layer stored for its backward."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from finetune.optimizations.activations.reload import HostSlot, Loaded, Reload
from finetune.optimizations.activations.strided import Strided
from finetune.optimizations.activations.types import Group, LayerPlan, Place


class ChangedInPlace(RuntimeError):
    """A stored tensor was written to after it was stored, so that backward would read something else."""


@dataclass
class _Kept:
    """A tensor that stays on the device."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass
class _Away:
    """A tensor that lies on the host, at an offset of its record's slot."""

    offset: int
    layout: Strided
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes


class LayerRecord:
    """The stored tensors of a layer in one graph, in the order of their calls. It lives as long as that graph holds its
    checkpoint, so nothing has to be given back by hand: two graphs at once, or one that is given up in the middle of a
    forward, keep apart.

    Args:
        layer: index in forward order.
        previous: record of the layer before, whose backward comes next.
    """

    def __init__(
        self, layer: int, plan: LayerPlan, *, reload: Reload, previous: weakref.ReferenceType[LayerRecord] | None
    ) -> None:
        self.layer, self.plan = layer, plan
        self.is_started = False
        self.is_done = False
        """Its backward is over, as far as the layer's own gradient tells."""
        self._reload = reload
        self._previous = previous
        self._stored: dict[Group, list[list[_Kept | _Away]]] = defaultdict(list)
        """For each group its calls, in order."""
        self._num_taken: Counter[Group] = Counter()
        self.slot: HostSlot | None = None
        self._is_slot_refused = False
        self.loaded: Loaded | None = None

    @property
    def has_host(self) -> bool:
        """Whether anything of it lies on the host."""
        return self.slot is not None

    def before(self) -> LayerRecord | None:
        """Returns the record whose backward follows this one's, if it is still alive."""
        return None if self._previous is None else self._previous()

    def next_on_host(self) -> LayerRecord | None:
        """Returns the nearest earlier record with something on the host."""
        record = self.before()
        while record is not None and not record.has_host:
            record = record.before()
        return record

    # --- forward

    def put(self, group: Group, tensors: tuple[torch.Tensor, ...]) -> None:
        """Stores the result of one call, where the plan says."""
        self._stored[group].append(
            [self._away(tensor) if self._goes_away(group, tensor) else _kept(tensor) for tensor in tensors]
        )

    def _goes_away(self, group: Group, tensor: torch.Tensor) -> bool:
        is_here = tensor.device.type == self._reload.device.type  # a kernel's seed can lie on the host already
        if self.plan.places[group] is not Place.HOST or self._is_slot_refused or not is_here or tensor.numel() == 0:
            return False
        if self.slot is None:
            self.slot = self._reload.lease(self.layer)
        if self.slot is None or not self.slot.has_room(tensor):
            # Another graph has the slot, or the row is longer than planned: right, if not as small.
            self._is_slot_refused = True
            self._reload.num_refused += 1
            return False
        return True

    def _away(self, tensor: torch.Tensor) -> _Away:
        assert self.slot is not None
        layout = Strided.of(tensor)
        offset = self._reload.send(self.slot, layout.flat(tensor))
        return _Away(offset, layout, tensor.requires_grad)

    # --- backward

    def open(self) -> None:
        """Begins the recompute: everything on the host is on its way to the device, or there."""
        self._num_taken.clear()
        self.is_done = False  # a graph that is kept goes through here again
        self._reload.open(self)

    def take(self, group: Group) -> tuple[torch.Tensor, ...]:
        """Returns the result of the group's next call; its tensors ask for a gradient as they did in forward."""
        stored = self._stored[group][self._num_taken[group]]
        self._num_taken[group] += 1
        return tuple(self._tensor(one) for one in stored)

    def _tensor(self, stored: _Kept | _Away) -> torch.Tensor:
        if isinstance(stored, _Kept):
            if stored.tensor._version != stored.version:
                raise ChangedInPlace(f"layer {self.layer}: a stored {tuple(stored.tensor.shape)} was changed in place")
            return stored.tensor.detach().requires_grad_(stored.requires_grad)
        assert self.loaded is not None
        return stored.layout.view(self.loaded.data[stored.offset :]).requires_grad_(stored.requires_grad)

    def num_bytes(self, group: Group) -> int:
        """Bytes of a group, wherever they lie."""
        return sum(stored.num_bytes for call in self._stored[group] for stored in call)

    def __del__(self) -> None:
        if self.slot is not None:
            self._reload.give_back(self.slot)


def _kept(tensor: torch.Tensor) -> _Kept:
    return _Kept(tensor.detach(), tensor._version, tensor.requires_grad)
