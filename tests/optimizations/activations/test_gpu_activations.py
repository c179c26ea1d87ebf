"""On a CUDA device: offloaded and stored activations change no bit, whatever the copies' timing; memory comes back."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence

import pytest
import torch
from activation_models import KEPT, ON_HOST, TinyModel, plan_of, tiny_model
from numerics import assert_bitwise_equal
from torch import nn

from finetune.optimizations.activations.copies import CudaCopies, Moment
from finetune.optimizations.activations.host_memory import allocate_pool
from finetune.optimizations.activations.types import Group, Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALL = tuple(group for group in Group if group is not Group.INPUT)
LENGTHS = [(70, 121, 66), (200, 57)]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def nf4(model: nn.Module) -> nn.Module:
    """Replaces the layers' linears by NF4 ones, as loading does."""
    import bitsandbytes as bnb

    for layer in model.model.layers:  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear and name.endswith("_proj"):
                new = bnb.nn.Linear4bit(
                    module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                new.weight = bnb.nn.Params4bit(module.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                parent = layer.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], new.to("cuda"))
    return model


def model_of(kind: str, *, is_nf4: bool = False) -> TinyModel:
    return tiny_model(
        kind,
        device="cuda",
        dtype=torch.bfloat16,
        prepare=nf4 if is_nf4 else None,
        targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        hidden_size=256,
        head_dim=64,
    )


@pytest.mark.parametrize("backend", ["varlen", "flash4", "sdpa"])
@pytest.mark.parametrize("case", ["qwen3", "qwen3-nf4", "qwen3_moe", "gpt_oss"])
def test_loss_and_gradients_are_bitwise_equal(case: str, backend: str) -> None:
    kind, _, fmt = case.partition("-")
    if backend == "flash4":
        pytest.importorskip("flash_attn.cute")
    tiny = model_of(kind, is_nf4=bool(fmt))
    tiny.attend_with(backend, lengths=LENGTHS)
    expected = tiny.step(length=257)
    again = tiny.step(length=257)
    assert torch.equal(again[0], expected[0])
    assert_bitwise_equal(again[1], expected[1])  # else nothing below says anything
    tiny.outputs.fill = float("nan")
    for place in Place:
        for groups in [(), *((group,) for group in ALL), ALL]:
            for num_buffers in (1, 2):
                plan = plan_of(place, *groups)
                tiny.install([plan, plan, plan, KEPT], num_buffers=num_buffers, slot_bytes=2**24)
                for _ in range(2):
                    got = tiny.step(length=257)
                    assert torch.equal(got[0], expected[0]), (place, groups)
                    assert_bitwise_equal(got[1], expected[1])


class LateCopies(CudaCopies):
    """Copies that begin at random moments, up to some milliseconds late."""

    def __init__(self, device: torch.device, *, seed: int) -> None:
        super().__init__(device)
        self._random = random.Random(seed)

    def _delay(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(self._random.choice((0, 1, 1_000_000, 5_000_000)))

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Moment | None) -> Moment:
        self._delay(self._outward)
        return super().to_host(source, target, after=after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Sequence[Moment | None]) -> Moment:
        self._delay(self._inward)
        return super().to_device(source, target, after=after)


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_no_race_whatever_the_delay_of_copies(num_buffers: int) -> None:
    tiny = model_of("qwen3")
    tiny.attend_with("varlen", lengths=LENGTHS)
    expected = [tiny.step(length=257, seed=seed) for seed in range(3)]
    for trial in range(12):
        copies = LateCopies(tiny.device, seed=trial)
        plan = plan_of(Place.HOST, *ALL) if trial % 2 else ON_HOST
        tiny.install([plan, plan, plan, KEPT], num_buffers=num_buffers, slot_bytes=2**24, copies=copies)
        for seed in (trial % 3, (trial + 1) % 3):
            got = tiny.step(length=257, seed=seed)
            assert torch.equal(got[0], expected[seed][0])
            assert_bitwise_equal(got[1], expected[seed][1])


def test_memory_returns_to_its_start() -> None:
    tiny = model_of("qwen3")
    tiny.attend_with("varlen", lengths=LENGTHS)
    tiny.step(length=257)
    tiny.model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    reload = tiny.install([plan_of(Place.HOST, *ALL)] * 3 + [KEPT], slot_bytes=2**24)
    assert torch.cuda.memory_allocated() == before + reload.buffer_bytes
    for _ in range(3):
        tiny.step(length=257)
        tiny.model.zero_grad()
    assert torch.cuda.memory_allocated() == before + reload.buffer_bytes
    del reload
    tiny.reload = None
    tiny.checkpointing.remove()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_pool_is_pinned_as_it_is() -> None:
    """Not rounded up to a power of two; a copy into pageable memory would hold the host up until it is done."""
    size = 600 * 2**20 + 4096
    pool = allocate_pool(size, device=torch.device("cuda"))
    assert pool.is_pinned and len(pool.data) == size
    there = torch.arange(size, device="cuda").to(torch.uint8)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    pool.data.copy_(there, non_blocking=True)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    assert returned - begun < 0.25 * (time.perf_counter() - begun)
    assert torch.equal(pool.data[-4096:], there[-4096:].cpu())


def test_steps_wait_for_nothing() -> None:
    """Neither forward nor backward stops the host."""
    tiny = model_of("qwen3")
    tiny.attend_with("varlen", lengths=LENGTHS)
    tiny.install([plan_of(Place.HOST, *ALL)] * 3 + [KEPT], slot_bytes=2**24)
    tiny.step(length=257)
    ids = torch.randint(0, 250, (2, 257), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        states = tiny.model(input_ids=ids, use_cache=False, **tiny.extra).logits
        states.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
