"""How much host memory is left, and a pool of it that copies reach without a detour."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_NO_LIMIT = 2**60
"""cgroup version 1 writes a number of this size where there is no limit."""
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
_PAGE = 4096


def available_host_bytes() -> int:
    """Returns what this process may still take: what the system calls available, or what its cgroup leaves."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_file, used_file in _CGROUPS:
        limit = _number(limit_file)
        if limit is not None and limit < _NO_LIMIT:
            available = min(available, limit - (_number(used_file) or 0))
    return max(0, available)


def _number(path: Path) -> int | None:
    """Reads a cgroup's figure; None where the file is missing or says `max`."""
    text = path.read_text(encoding="ascii").strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


@dataclass(frozen=True, eq=False)
class HostPool:
    """Host memory for activations, pinned for as long as this object lives."""

    data: torch.Tensor
    """uint8."""
    is_pinned: bool
    refusal: str = ""
    """Why it is not pinned, where it was to be."""


def allocate_pool(num_bytes: int, *, device: torch.device) -> HostPool:
    """Allocates a pool, pinned for a CUDA device; where the system refuses to pin, it stays pageable and slower.

    The memory is registered as it is: torch's own pinned allocator rounds up to a power of two, which for tens of GiB
    can be twice of what was asked for.
    """
    whole = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    data = whole[start : start + num_bytes]
    if device.type != "cuda" or num_bytes == 0:
        return HostPool(data, is_pinned=False)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(data.data_ptr(), num_bytes, 0))
    if code != 0:
        return HostPool(
            data, is_pinned=False, refusal=f"the system refused to pin {num_bytes / 2**30:.1f} GiB ({code})"
        )
    pool = HostPool(data, is_pinned=True)
    # A storage has no Python object that lives as long as it does; the pool has.
    weakref.finalize(pool, _unpin, data, device)
    return pool


def _unpin(data: torch.Tensor, device: torch.device) -> None:
    """Gives memory back to the system's pager, once no copy can be under way."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(data.data_ptr())
