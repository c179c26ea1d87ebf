"""Checkpointed layers whose inputs, and whatever else the plan stores, go where the plan says.

torch's non-reentrant checkpointing does the rest: it keeps random states, autocast and the auxiliary losses of an MoE,
whose gradient a reentrant one would drop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.optimizations.activations.phase import phase
from finetune.optimizations.activations.record import LayerRecord
from finetune.optimizations.activations.reload import Reload
from finetune.optimizations.activations.types import Group, LayerPlan, Place

LayerFunction = Callable[..., Any]


class Checkpointing:
    """Runs the decoder layers of one model by a plan.

    Args:
        layers: the model's decoder layers, in forward order: transformers' `GradientCheckpointingLayer`s.
        device: of the layers.
    """

    def __init__(self, layers: Sequence[nn.Module], *, device: torch.device) -> None:
        self._layers = list(layers)
        self._plans: list[LayerPlan] = []
        self._reload: Reload | None = None
        self._last_on_host = -1
        self._last: weakref.ReferenceType[LayerRecord] | None = None
        # Tells checkpoint on which device random states are to be kept; the inputs are not handed to it.
        self._anchor = torch.empty(0, device=device)
        self._keeps_random_states = any(_draws(layer) for layer in self._layers)
        self.on_record: Callable[[LayerRecord], None] | None = None
        """Called with each record when its layer's forward is over; measuring looks at them."""

    def install(self, plans: Sequence[LayerPlan], reload: Reload) -> None:
        """Lets the layers run by these plans from now on."""
        self._plans, self._reload = list(plans), reload
        on_host = [index for index, plan in enumerate(plans) if Place.HOST in plan.places.values()]
        self._last_on_host = max(on_host, default=-1)
        for index, (layer, plan) in enumerate(zip(self._layers, plans, strict=True)):
            set_checkpoint_function(layer, None if plan.is_whole else partial(self._run, index))

    def remove(self) -> None:
        """Lets the layers run without checkpoints, and lets go of pool and buffers."""
        self._reload = None
        for layer in self._layers:
            set_checkpoint_function(layer, None)

    def _run(self, index: int, function: LayerFunction, hidden: torch.Tensor, *args: Any) -> Any:
        assert self._reload is not None
        self._reload.settle(index)
        record = LayerRecord(index, self._plans[index], reload=self._reload, previous=self._last)
        self._last = weakref.ref(record)
        if hidden.requires_grad:
            hidden.register_hook(partial(_note_done, weakref.ref(record)))
        # The box, and not the closure, holds the input, so that it goes when the plan has put it elsewhere.
        box = [hidden]

        def run(_anchor: torch.Tensor) -> Any:
            if box:
                own = box.pop()
                record.put(Group.INPUT, (own,))
                with phase(record):
                    return function(own, *args)
            record.open()
            with phase(record, is_recompute=True):
                return function(*record.take(Group.INPUT), *args)

        del hidden
        output = checkpoint(run, self._anchor, use_reentrant=False, preserve_rng_state=self._keeps_random_states)
        if index == self._last_on_host:
            self._reload.fetch_first(record)
        if self.on_record is not None:
            self.on_record(record)
        return output


def set_checkpoint_function(layer: nn.Module, function: LayerFunction | None) -> None:
    """Sets what a `GradientCheckpointingLayer` runs itself with in training; None: nothing but itself.

    The attributes are what transformers' own `_set_gradient_checkpointing` sets (5.17 to 5.24).
    """
    attributes: Any = layer
    attributes.gradient_checkpointing = function is not None
    attributes._gradient_checkpointing_func = function


def _note_done(record: weakref.ReferenceType[LayerRecord], grad: torch.Tensor) -> None:
    """The gradient of a layer's input is there, and with it the layer's backward is over."""
    alive = record()
    if alive is not None:
        alive.is_done = True


NOISE = ("attention_dropout", "jitter_noise", "router_jitter_noise", "input_jitter_noise")
"""Attributes by which transformers' layers draw random numbers without a module for it."""


def _draws(layer: nn.Module) -> bool:
    """Whether a layer draws random numbers: dropout, or the noise of an MoE's router."""
    for module in layer.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        noise = [getattr(module, name, 0) for name in NOISE]
        if any(isinstance(value, float) and value > 0 for value in noise):
            return True
    return False
