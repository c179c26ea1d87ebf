"""Whole models in 16 bits, two rows a batch: every backend gives the logits and gradients of one call a document.

All experts of an MoE are taken, so that no rounding step can send a token to another one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import make_config
from transformers import AutoModelForCausalLM

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.layers import attention_layers
from finetune.optimizations.support import probe_hardware

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PLACES = [
    pytest.param("sdpa", "cpu", id="sdpa-cpu"),
    *[pytest.param(name, "cuda", marks=ON_GPU, id=f"{name}-cuda") for name in ("flash4", "varlen", "flex", "sdpa")],
]
KINDS = ("qwen3", "qwen3_window", "llama", "qwen3_moe", "gpt_oss")
ROWS = ((70, 13, 141, 1), (40, 129, 50))
ROW_LENGTH = 256
LOGITS, GRADIENTS = 2e-2, 5e-2
"""Allowed norm of the difference over the norm: a few rounding steps of bf16."""


def make_model(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    all_experts = {"num_experts_per_tok": 4} if kind in ("qwen3_moe", "gpt_oss") else {}
    config = make_config(kind, head_dim=64, **all_experts)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).to(device)


def logits_and_gradients(
    model: Any, ids: torch.Tensor, name: str, *, rows: tuple[tuple[int, ...], ...] = ROWS
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the real tokens `[tokens, vocabulary]`, and the gradient of a weighted sum of them."""
    metadata = build_packed_metadata(rows, row_length=ROW_LENGTH).to(ids.device)
    model.set_attn_implementation(BACKENDS[name].registered)
    model.zero_grad()
    out = model(input_ids=ids, position_ids=metadata.position_ids, packed_metadata=metadata, use_cache=False).logits
    logits = torch.cat([row[: sum(lengths)] for row, lengths in zip(out, rows, strict=True)])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    (logits * weights).sum().backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().float(), grads


def differences(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of each gradient's difference over its own, which some have next to none of."""
    return {key: ((found[key] - value).norm() / (value.norm() + 2e-2)).item() for key, value in true.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "device"), PLACES)
def test_whole_models_equal_one_call_a_document(name: str, device: str, kind: str) -> None:
    """Against `segments` in the same format, which is checked against separate documents on the CPU."""
    register_backends()
    model = make_model(kind, device)
    support = BACKENDS[name].supported(probe_hardware(torch.device(device, 0)), torch.bfloat16, attention_layers(model))
    if not support.ok:
        pytest.skip(support.reason)
    ids = torch.randint(0, 256, (len(ROWS), ROW_LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    true_logits, true = logits_and_gradients(model, ids, "segments")
    logits, found = logits_and_gradients(model, ids, name)
    off = differences(found, true)
    worst = max(off, key=lambda key: off[key])
    print(name, device, kind, f"{(logits - true_logits).norm() / true_logits.norm():.1e}", worst, f"{off[worst]:.1e}")
    assert (logits - true_logits).norm() <= LOGITS * true_logits.norm()
    assert off[worst] <= GRADIENTS, off

    changed = ids.clone()
    first = ROWS[0][0]
    changed[0, :first] = (changed[0, :first] + 7) % 256
    after, _ = logits_and_gradients(model, changed, name)
    assert (after[first:] - logits[first:]).norm() <= LOGITS * logits[first:].norm()
    assert (after[:first] - logits[:first]).norm() > 0.1 * logits[:first].norm()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_the_limits_are_narrow_enough(kind: str) -> None:
    """The second row read with the first row's boundaries is outside them."""
    register_backends()
    model = make_model(kind, "cpu")
    ids = torch.randint(0, 256, (len(ROWS), ROW_LENGTH), generator=torch.Generator().manual_seed(1))
    _, true = logits_and_gradients(model, ids, "segments")
    wrong = (ROWS[0], (70, 13, 136))  # as many real tokens
    _, found = logits_and_gradients(model, ids, "sdpa", rows=wrong)
    assert max(differences(found, true).values()) > 2 * GRADIENTS
