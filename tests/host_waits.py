"""Looks on the CPU for operations that would wait for a GPU."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class NoHostWait(TorchDispatchMode):
    """Fails on operations that read from the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "bincount", "equal.default")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert not any(word in str(func) for word in self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))
