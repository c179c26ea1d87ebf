"""How much memory a plan may count on, and what a run takes of it before the first activation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

FRAGMENTATION = 0.04
"""Share of the device's memory that is left alone: what lies between the allocator's blocks."""
HOST_SHARE = 0.8
"""Share of the free host memory that `auto` takes at most."""
_SMALL_TENSOR = 4096
"""bitsandbytes keeps the state of smaller tensors in 32 bits."""
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}
"""State of one trained weight on the device; `adamw` keeps two numbers in the weight's own format."""


def device_capacity(device: torch.device, *, available_host: int) -> int:
    """Returns the bytes that this process can have on the device, those it has included.

    On a CPU that is half of what the host has free, so that other programs live on.
    """
    if device.type != "cuda":
        return available_host // 2
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(min(free + own, total * fraction) * (1 - FRAGMENTATION))


def fixed_bytes(device: torch.device, parameters: Iterable[nn.Parameter], *, optimizer: str | None) -> int:
    """Returns what weights (what is allocated now), gradients and optimizer will take together; without the latter
    where it is None."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained if parameter.grad is None)
    states = 0 if optimizer is None else sum(_state_bytes(parameter, optimizer) for parameter in trained)
    return allocated + gradients + states


def _state_bytes(parameter: nn.Parameter, optimizer: str) -> int:
    if optimizer == "adamw":
        return 2 * parameter.numel() * parameter.element_size()
    is_small = parameter.numel() < _SMALL_TENSOR
    return parameter.numel() * (8 if is_small else OPTIMIZER_BYTES[optimizer])
