"""Copies between device and host beside the computing stream, ordered by events; on a CPU plain copies in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Moment = torch.Event
"""A point of a stream that others can wait for."""


class Copies(Protocol):
    """Ways between one device and the host. Moments are None where everything happens at once."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Moment | None) -> Moment | None:
        """Copies what the computing stream has made by now; not before `after`."""
        ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Moment | None]) -> Moment | None:
        """Copies once all moments in `after` are past; looks at nothing else."""
        ...

    def moment(self) -> Moment | None:
        """Returns where the computing stream is now."""
        ...

    def wait(self, moment: Moment | None) -> None:
        """Lets the computing stream wait; the host goes on."""
        ...


class CpuCopies:
    """The same on one memory: each copy is done when its call returns."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Moment | None) -> None:
        target.copy_(source)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Moment | None]) -> None:
        target.copy_(source)

    def moment(self) -> None:
        return None

    def wait(self, moment: Moment | None) -> None:
        return None


class CudaCopies:
    """Two streams of one device, one for each direction.

    Args:
        device: whose streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Moment | None) -> Moment:
        self._outward.wait_event(self.moment())
        return _copy(self._outward, source, target, after=[after])

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Moment | None]) -> Moment:
        return _copy(self._inward, source, target, after=after)

    def moment(self) -> Moment:
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, moment: Moment | None) -> None:
        if moment is not None:
            torch.cuda.current_stream(self._device).wait_event(moment)


def _copy(
    stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Moment | None]
) -> Moment:
    for moment in after:
        if moment is not None:
            stream.wait_event(moment)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def copies_for(device: torch.device) -> Copies:
    """Returns the ways between a device and the host."""
    return CudaCopies(device) if device.type == "cuda" else CpuCopies()
