"""The terms of the activation plan: groups of a layer's tensors, where each lies, what each costs, and the plan.

A layer that is checkpointed always has its input; beside it any of the groups below may be stored, and what is not is
computed again in backward. A layer that is not checkpointed keeps all that autograd saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

GIB = 2**30


class Group(StrEnum):
    """What of a checkpointed layer can be stored for backward."""

    INPUT = "input"
    """The layer's hidden states; always stored."""
    QKV = "qkv"
    """What the query, key and value projections give, before norms and rotary."""
    ATTENTION = "attention"
    """Attention's output and its log-sum-exp."""
    ATTENTION_OUTPUT = "attention_output"
    """What the output projection of attention gives: with it the residual after attention is one addition."""
    GATE_UP = "gate_up"
    """What the gate and up projections of the MLP give."""


class Place(StrEnum):
    """Where a stored group lies between forward and backward."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer's activations."""

    is_whole: bool = False
    """The layer is not checkpointed: nothing is remade, and `places` is empty."""
    places: Mapping[Group, Place] = field(default_factory=lambda: {Group.INPUT: Place.DEVICE})
    """The stored groups; a group that is absent is remade."""

    @property
    def label(self) -> str:
        """Such as `whole`, or `input host, attention device`."""
        if self.is_whole:
            return "whole"
        return ", ".join(f"{group.value} {place.value}" for group, place in self.places.items())


@dataclass(frozen=True)
class GroupCost:
    """One group of one layer."""

    num_bytes: int
    seconds: float
    """What it takes to remake, and so what storing it saves; 0 for the input."""


@dataclass(frozen=True)
class LayerCosts:
    """One kind of layer, measured once with a micro-batch of the run's own shape."""

    groups: Mapping[Group, GroupCost]
    """The groups that can be stored; the input is among them."""
    forward_seconds: float
    """Of a checkpointed layer."""
    backward_seconds: float
    """Backward with its recompute when the input alone is stored."""
    whole_seconds: float
    """Forward and backward of a layer that is not checkpointed."""
    whole_bytes: int | None
    """What such a layer keeps; None where it did not fit."""
    forward_peak_bytes: int
    """Most that forward needs at once beside what it stores."""
    backward_peak_bytes: int
    """Most that backward with its recompute needs at once when the input alone is stored, beside what was stored before
    it."""
    whole_peak_bytes: int = 0
    """The same of a layer that is not checkpointed."""


@dataclass(frozen=True)
class Link:
    """Copies between device and host."""

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    is_shared: bool = False
    """Host and device are one memory: a copy gains nothing."""


@dataclass(frozen=True)
class Budget:
    """What the plan may take."""

    device_bytes: int
    """For everything beside `fixed_bytes`: what is stored, the reload buffers, and the work of a layer or the head."""
    host_bytes: int
    """Pinned memory."""
    activation_bytes: int | None = None
    """The recipe's own limit of what is stored on the device, reload buffers included; None: as much as fits."""


@dataclass(frozen=True)
class ModelCosts:
    """Everything that the planner knows."""

    kinds: tuple[LayerCosts, ...]
    layers: tuple[int, ...]
    """For each layer, in forward order, its kind."""
    fixed_bytes: int
    """Weights, gradients and optimizer."""
    head_seconds: float
    """Forward and backward of embedding, last norm, LM head and loss."""
    head_peak_bytes: int
    optimizer_seconds: float
    num_micro_batches: int
    """A step's."""
    link: Link
    num_buffers: int
    """Reload buffers on the device: 2, or 1 when copies and computing take turns."""


@dataclass(frozen=True)
class ActivationPlan:
    """Where everything goes, and what that is expected to cost."""

    layers: tuple[LayerPlan, ...]
    device_bytes: int
    """Stored on the device between forward and backward, reload buffers included."""
    buffer_bytes: int
    """All reload buffers together: each as large as the most that one layer has on the host."""
    host_bytes: int
    peak_bytes: int
    """Most memory that the run needs on the device."""
    step_seconds: float
    link_fill: float
    """Share of forward's time in which the link to the host is busy."""
    recomputed: float
    """Share of one forward pass of the layers that is computed again."""
    reload_fill: float = 0.0
    """Share of backward's time in which the link to the device is busy."""
    tile_tokens: int | None = None
    """Tokens of a tile, where MLPs, norms and projections run in tiles."""
    stall_seconds: float = 0.0
    """A micro-batch's waits for reloads, part of `step_seconds`."""
