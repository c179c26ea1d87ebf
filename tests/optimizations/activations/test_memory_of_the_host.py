"""Host memory: what is left of it, within a control group too, and the pool; and what a run takes of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from finetune.optimizations.activations import host_memory
from finetune.optimizations.activations.capacity import device_capacity, fixed_bytes
from finetune.optimizations.activations.host_memory import allocate_pool, available_host_bytes


def test_the_systems_word_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_CGROUPS", ())
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_host_bytes() <= total


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("1000000", "400000", 600_000), ("1000000", "2000000", 0), ("max", "5", None), (str(2**62), "5", None)],
    ids=["room", "over", "no-limit", "v1-no-limit"],
)
def test_a_control_groups_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, expected: int | None
) -> None:
    (tmp_path / "max").write_text(limit + "\n")
    (tmp_path / "current").write_text(used + "\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    found = available_host_bytes()
    assert found == expected if expected is not None else found > 10**7


def test_a_pool_for_a_cpu_is_plain_memory_of_the_size_asked_for() -> None:
    pool = allocate_pool(12_345, device=torch.device("cpu"))
    assert len(pool.data) == 12_345 and not pool.is_pinned and pool.refusal == ""
    assert pool.data.data_ptr() % 4096 == 0
    assert len(allocate_pool(0, device=torch.device("cpu")).data) == 0


def test_half_of_the_free_memory_is_a_cpus_capacity() -> None:
    assert device_capacity(torch.device("cpu"), available_host=1000) == 500


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("adamw", 2 * 4 * 10_000 + 2 * 2 * 100), ("adamw_8bit", 2 * 10_000 + 8 * 100), ("paged_adamw_8bit", 8 * 100)],
)
def test_gradients_and_optimizer_are_counted(optimizer: str, state: int) -> None:
    """Small tensors keep a state of 32 bits in bitsandbytes; a gradient that is there is among the allocated memory."""
    large = nn.Parameter(torch.zeros(100, 100))
    small = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    cpu = torch.device("cpu")
    gradients = 4 * 10_000 + 2 * 100
    assert fixed_bytes(cpu, [large, small, frozen], optimizer=optimizer) == gradients + state
    assert fixed_bytes(cpu, [large, small, frozen], optimizer=None) == gradients
    large.grad = torch.zeros_like(large)
    assert fixed_bytes(cpu, [large, small, frozen], optimizer=None) == 2 * 100
