"""On a CUDA device: every backend that it has is as accurate as plain torch, packs exactly, and waits for nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny import make_config
from torch import library
from transformers import AutoModelForCausalLM

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.layers import attention_layers
from finetune.optimizations.attention.probe import probe_backend
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
        layers = layers[:: max(1, len(layers) // 5)]
    if not layers:
        pytest.skip(BACKENDS[name].supported(probe_hardware(torch.device("cuda", 0)), dtype, LAYERS[:1]).reason)
    faults = {}
    for layer in layers:
        result = probe_backend(BACKENDS[name], layer, dtype=dtype, device=torch.device("cuda", 0))
        if result.faults:
            faults[layer.label] = result.faults
    assert not faults


def logits_and_gradients(model: Any, ids: torch.Tensor, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    metadata = build_packed_metadata([LENGTHS], row_length=ROW).to("cuda")
    model.set_attn_implementation(BACKENDS[name].registered)
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=metadata.position_ids, packed_metadata=metadata, use_cache=False).logits[
        0, : sum(LENGTHS)
    ]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to("cuda", logits.dtype)
    (logits * weights).sum().backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().float(), grads


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_window", "llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("name", ["flash4", "varlen", "flex", "sdpa"])
def test_whole_models_equal_one_call_a_document(name: str, kind: str) -> None:
    """Against `segments` in the same format, which is checked against separate documents on the CPU."""
    register_backends()
    torch.manual_seed(0)
    config = make_config(kind, head_dim=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).to("cuda")
    usable(name, attention_layers(model), torch.bfloat16)
    ids = torch.randint(0, 256, (1, ROW), generator=torch.Generator().manual_seed(1)).to("cuda")
    true_logits, true = logits_and_gradients(model, ids, "segments")
    logits, found = logits_and_gradients(model, ids, name)
    if kind not in ("qwen3_moe", "gpt_oss"):  # a rounding step can route a token to another expert
        assert (logits - true_logits).norm() <= 2e-2 * true_logits.norm()
        for key, gradient in true.items():
            assert (found[key] - gradient).norm() <= 5e-2 * gradient.norm() + 1e-3, key
    changed = ids.clone()
    changed[0, : LENGTHS[0]] = (changed[0, : LENGTHS[0]] + 7) % 256
    after, _ = logits_and_gradients(model, changed, name)
    assert torch.equal(after[LENGTHS[0] :], logits[LENGTHS[0] :]) or (
        (after[LENGTHS[0] :] - logits[LENGTHS[0] :]).norm() <= 2e-2 * logits.norm()
    )


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
        operation, more = torch.ops.finetune.flash_attn_varlen_sinks.default, (-1,)
    else:
        operation, more = torch.ops.finetune.flash_attn_4_varlen.default, (None, None)
    library.opcheck(
        operation, (q, k, v, sinks, metadata.cu_seqlens, *numbers, *more),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
