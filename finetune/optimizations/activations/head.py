"""What the model costs outside its layers: embedding, last norm, LM head and loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class HeadCosts:
    """Of one micro-batch, forward and backward."""

    seconds: float
    peak_bytes: int
    """Beside the weights; 0 where the device does not tell."""


def measure_head(
    model: nn.Module,
    layers: Sequence[nn.Module],
    loss: Callable[[], torch.Tensor],
    *,
    device: torch.device,
    repetitions: int = 3,
) -> HeadCosts:
    """Runs the model without its layers; gradients that are there stay as they are.

    Args:
        model: what is trained of it outside the layers gets its gradient too.
        layers: what is left out: each hands its hidden states on.
        loss: computes the loss of a micro-batch, with its graph, without an MoE's auxiliary loss.
    """
    seconds, peak = [], 0
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    trained = [one for one in model.parameters() if one.requires_grad and one not in inside]
    with _left_out(layers) as handed_on:
        for _ in range(repetitions):
            before = _allocated(device)
            begun = time.perf_counter()
            value = loss()
            torch.autograd.grad(value, [handed_on.pop(), *trained], allow_unused=True)
            del value
            peak = max(peak, _allocated(device, peak=True) - before)
            seconds.append(time.perf_counter() - begun)
    return HeadCosts(min(seconds), peak)


@contextmanager
def _left_out(layers: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Lets layers hand on what they get; gives the list in which each forward leaves the states it handed on."""
    handed_on: list[torch.Tensor] = []

    def first(hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        handed_on.append(hidden.detach().requires_grad_())
        return handed_on[-1]

    def other(hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden

    for index, layer in enumerate(layers):
        layer.forward = other if index else first
    try:
        yield handed_on
    finally:
        for layer in layers:
            del layer.forward


def _allocated(device: torch.device, *, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
