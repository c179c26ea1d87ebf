"""On a CUDA device: every backend that it has is as accurate as plain torch, packs exactly, and waits for nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import library

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.attention import head_groups
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.probe import probe_backend, probed_documents
from finetune.optimizations.attention.types import AttentionLayer, AttentionOptions
from finetune.optimizations.support import probe_hardware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = [
    AttentionLayer(heads, groups, width, window, None, has_sinks)
    for (heads, groups), width, window, has_sinks in itertools.product(
        ((4, 4), (8, 2), (5, 1)), (64, 128), (None, 7, 128), (False, True)
    )
] + [
    AttentionLayer(4, 2, 96),
    AttentionLayer(4, 2, 80),
    AttentionLayer(4, 2, 256),
    AttentionLayer(4, 2, 64, None, 30.0),
]
LENGTHS = (70, 13, 141, 1)
ROW = 256


def usable(name: str, layers: list[AttentionLayer], dtype: torch.dtype) -> None:
    support = BACKENDS[name].supported(probe_hardware(torch.device("cuda", 0)), dtype, layers)
    if not support.ok:
        pytest.skip(support.reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_as_accurate_as_plain_torch(name: str, dtype: torch.dtype) -> None:
    layers = [
        layer
        for layer in LAYERS
        if BACKENDS[name].supported(probe_hardware(torch.device("cuda", 0)), dtype, [layer]).ok
    ]
    if name in ("flash4", "flex"):  # seconds of compilation for each kind
        capped = [layer for layer in layers if layer.softcap]
        layers = list(dict.fromkeys(layers[:: max(1, len(layers) // 5)] + capped))
    if not layers:
        pytest.skip(BACKENDS[name].supported(probe_hardware(torch.device("cuda", 0)), dtype, LAYERS[:1]).reason)
    faults = {}
    for layer in layers:
        result = probe_backend(BACKENDS[name], layer, dtype=dtype, device=torch.device("cuda", 0))
        if result.faults:
            faults[layer.label] = result.faults
    assert not faults


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", ["flash4", "varlen", "flex", "sdpa", "segments"])
def test_nothing_waits_for_the_device(name: str, has_sinks: bool) -> None:
    layer = AttentionLayer(4, 2, 64, 16, None, has_sinks)
    usable(name, [layer], torch.bfloat16)
    host = build_packed_metadata([LENGTHS], row_length=ROW).pin_memory()
    shapes = ((1, ROW, 4, 64), (1, ROW, 2, 64), (1, ROW, 2, 64))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, device="cuda", requires_grad=True) if has_sinks else None
    options = AttentionOptions(0.125, layer.window, None, sinks)

    def step() -> None:
        metadata = host.to("cuda", non_blocking=True)
        BACKENDS[name].attend(*tensors, boundaries=metadata, options=options).sum().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["varlen", "flash4"])
def test_operations_are_registered_soundly(name: str) -> None:
    layer = AttentionLayer(4, 2, 64, None, None, True)
    usable(name, [layer], torch.bfloat16)
    metadata = build_packed_metadata([LENGTHS], row_length=ROW).to("cuda")
    shapes = ((ROW, 4, 64), (ROW, 2, 64), (ROW, 2, 64))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    numbers: tuple[object, ...] = (metadata.max_seqlen, 0.125)
    if name == "varlen":
        operation, more = torch.ops.finetune.flash_attn_varlen.default, (-1,)
    else:
        operation, more = torch.ops.finetune.flash_attn_4_varlen.default, (None, None)
    library.opcheck(
        operation, (q, k, v, sinks, metadata.cu_seqlens, *numbers, *more),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "layer", [AttentionLayer(8, 2, 64), AttentionLayer(8, 2, 64, 16, None, True)], ids=["plain", "sinks"]
)
def test_flash4_is_right_with_many_documents(layer: AttentionLayer) -> None:
    """Above 256 documents it takes other kernels."""
    usable("flash4", [layer], torch.bfloat16)
    several, many = probed_documents(BACKENDS["flash4"], most_documents=300)
    assert len(several) < 256 < len(many)
    device = torch.device("cuda", 0)
    assert not probe_backend(BACKENDS["flash4"], layer, dtype=torch.bfloat16, device=device, documents=many).faults


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_heads_in_groups_are_heads_at_once(monkeypatch: pytest.MonkeyPatch, has_sinks: bool) -> None:
    """The kernel takes heads out of the middle of its tensors. Sums of query gradients are added in no fixed order."""
    usable("varlen", [AttentionLayer(8, 4, 64)], torch.bfloat16)
    metadata = build_packed_metadata([LENGTHS], row_length=sum(LENGTHS)).to("cuda")
    tensors = [
        torch.randn(1, sum(LENGTHS), heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 4, 4)
    ]
    sinks = torch.randn(8, device="cuda", requires_grad=True) if has_sinks else None
    options = AttentionOptions(0.125, None, None, sinks)
    found = {}
    for least in (2**17, 1):
        monkeypatch.setattr(head_groups, "MIN_SLOTS", least)
        out = BACKENDS["varlen"].attend(*tensors, boundaries=metadata, options=options)
        wanted = tensors if sinks is None else [*tensors, sinks]
        found[least] = torch.autograd.grad(out, wanted, torch.ones_like(out) + out.detach())
    for one, other in zip(found[1], found[2**17], strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()
