"""The whole-model check at load, measured: right backends stay far below its limits, planted faults far above."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import make_config
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.apply import STOCK_TOLERANCE, _difference_from_stock
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.choose import AttentionChoice
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.layers import attention_layers
from finetune.optimizations.attention.types import Attend, AttentionOptions
from finetune.optimizations.support import probe_hardware

KINDS = ("qwen3", "qwen3_window", "llama", "qwen3_moe", "gpt_oss", "gemma2")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARPER = 5.0
"""Factor of the drawn weights: with those that a config draws, attention hardly tells one token from another."""
ALL, HALF = tuple(NAMES), (torch.bfloat16, torch.float16)


def cases(on_gpu: dict[str, tuple[torch.dtype, ...]]) -> list[Any]:
    """Backends in formats, on the CPU and on the GPU."""
    groups = ((CPU, {"segments": ALL, "sdpa": ALL}, []), (CUDA, on_gpu, ON_GPU))
    return [
        pytest.param(name, dtype, device, id=f"{name}-{NAMES[dtype]}-{device.type}", marks=marks)
        for device, names, marks in groups
        for name, dtypes in names.items()
        for dtype in dtypes
    ]


RIGHT = cases(dict.fromkeys(("flash4", "flash3", "flash2", "varlen", "flex", "sdpa", "segments"), HALF))
# Fewer, since flash4 and flex compile for seconds at each.
SPOILT = cases({"flash4": (torch.bfloat16,), "varlen": HALF, "sdpa": HALF})


def make_model(kind: str, dtype: torch.dtype, device: torch.device) -> Any:
    torch.manual_seed(0)
    if kind == "gemma2":
        sizes = make_config("llama", head_dim=64).to_dict()
        wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        config = AutoConfig.for_model(
            "gemma2", vocab_size=260, intermediate_size=128, sliding_window=3, attn_logit_softcapping=0.5,
            query_pre_attn_scalar=64, pad_token_id=256, **{key: sizes[key] for key in wanted},
        )  # fmt: skip
    else:
        changes: dict[str, Any] = {"sliding_window": 3} if kind in ("qwen3_window", "gpt_oss") else {}
        config = make_config(kind, head_dim=64, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data *= SHARPER
    return model.to(device)


def difference(name: str, model: Any, attend: Attend | None = None) -> float:
    """The check's figure, for the backend or for what stands in its place."""
    model.set_attn_implementation("eager")
    backend = BACKENDS[name] if attend is None else dataclasses.replace(BACKENDS[name], attend=attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, name, backend)
        found = _difference_from_stock(model, AttentionChoice(backend, "eager", tuple(attention_layers(model)), ""))
    register_backends()
    return found


@pytest.mark.parametrize(("name", "dtype", "device"), RIGHT)
def test_a_right_backend_stays_under_half_of_the_limit(
    name: str, dtype: torch.dtype, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    """Prints each figure (`pytest -rP`, or in the XML of `--junitxml`)."""
    found = {}
    for kind in KINDS:
        model = make_model(kind, dtype, device)
        support = BACKENDS[name].supported(probe_hardware(device), dtype, attention_layers(model))
        if support.ok:
            found[kind] = difference(name, model)
            record_property(kind, found[kind])
    if not found:
        pytest.skip(support.reason)
    print(name, NAMES[dtype], device.type, {kind: f"{value:.1e}" for kind, value in found.items()})
    assert max(found.values()) < STOCK_TOLERANCE[dtype] / 2, found


def with_options(attend: Attend, change: Callable[[AttentionOptions], dict[str, object]]) -> Attend:
    """The backend, deaf to one thing that a layer asks."""

    def attend_wrongly(q: Any, k: Any, v: Any, *, boundaries: Any, options: AttentionOptions) -> torch.Tensor:
        return attend(q, k, v, boundaries=boundaries, options=dataclasses.replace(options, **change(options)))

    return attend_wrongly


def mixed(attend: Attend) -> Attend:
    """The backend, deaf to the boundaries."""

    def attend_wrongly(q: Any, k: Any, v: Any, *, boundaries: Any, options: AttentionOptions) -> torch.Tensor:
        whole = build_packed_metadata([(q.shape[1],)] * q.shape[0], row_length=q.shape[1]).to(q.device)
        return attend(q, k, v, boundaries=whole, options=options)

    return attend_wrongly


FAULTS: dict[str, tuple[str, Callable[[Attend], Attend]]] = {
    "a window one too wide": (
        "qwen3_window", lambda attend: with_options(attend, lambda options: {"window": options.window and 4}),
    ),
    "a window one too narrow": (
        "gpt_oss", lambda attend: with_options(attend, lambda options: {"window": options.window and 2}),
    ),
    "softcap ignored": ("gemma2", lambda attend: with_options(attend, lambda options: {"softcap": None})),
    "documents mixed": ("llama", mixed),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize(("name", "dtype", "device"), SPOILT)
def test_a_planted_fault_is_far_above_the_limit(
    name: str, dtype: torch.dtype, device: torch.device, fault: str
) -> None:
    kind, spoil = FAULTS[fault]
    model = make_model(kind, dtype, device)
    support = BACKENDS[name].supported(probe_hardware(device), dtype, attention_layers(model))
    if not support.ok:
        pytest.skip(support.reason)
    found = difference(name, model, spoil(BACKENDS[name].attend))
    print(fault, name, NAMES[dtype], device.type, f"{found:.1e}")
    assert found > 1.5 * STOCK_TOLERANCE[dtype]
