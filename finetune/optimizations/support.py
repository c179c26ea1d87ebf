"""What an optimization or a backend says of itself before a run: possible here or not, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Support:
    """Whether something works here, with the reason where it does not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Hardware:
    """The device that a run computes on."""

    kind: str
    """`cpu` or `cuda`."""
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device, such as (9, 0)."""
    name: str = ""

    @property
    def label(self) -> str:
        """What messages call it."""
        if self.capability is None:
            return "the CPU"
        return f"{self.name or 'the GPU'} (compute capability {self.capability[0]}.{self.capability[1]})"


def probe_hardware(device: torch.device) -> Hardware:
    """Looks at the device; reads nothing but its name and capability."""
    if device.type != "cuda":
        return Hardware("cpu")
    return Hardware("cuda", torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
