"""The check at load: a backend that is deaf to the model, or fails, is refused before a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny import make_config
from transformers import AutoModelForCausalLM

from finetune.errors import GateStopped
from finetune.optimizations.apply import apply_attention
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.choose import AttentionChoice
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.layers import attention_layers


def model_and_choice(kind: str, *, dtype: torch.dtype = torch.float32) -> tuple[Any, AttentionChoice]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(kind), attn_implementation="eager", dtype=dtype)
    return model, AttentionChoice(BACKENDS["segments"], "eager", tuple(attention_layers(model)), "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_window", "llama", "qwen3_moe", "gpt_oss"])
def test_a_right_backend_is_set(kind: str, dtype: torch.dtype) -> None:
    model, choice = model_and_choice(kind, dtype=dtype)
    checked = apply_attention(model.train(), choice, dtype=dtype)
    assert checked.ok and "each alone under eager" in checked.reason
    assert model.config._attn_implementation == "packed_segments" and model.training


def test_a_backend_that_fails_is_refused() -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of shared memory\nmore")

    model, choice = model_and_choice("qwen3")
    broken = dataclasses.replace(choice, backend=dataclasses.replace(BACKENDS["segments"], attend=fails))
    with pytest.raises(GateStopped, match="it fails: out of shared memory") as caught:
        apply_attention(model, broken, dtype=torch.float32)
    assert "eager" in caught.value.remedy and "more" not in caught.value.message
    register_backends()


def test_a_model_that_drops_the_argument_is_refused() -> None:
    model, choice = model_and_choice("qwen3")
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, packed_metadata=None, **more: forward(*args, **more)
    with pytest.raises(GateStopped, match="called without packed_metadata"):
        apply_attention(model, choice, dtype=torch.float32)


def test_a_tensor_that_attention_does_not_know_is_refused() -> None:
    model, choice = model_and_choice("qwen3")
    forward = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **more: forward(*args, **more, position_bias=torch.zeros(1))
    with pytest.raises(GateStopped, match="`position_bias`, which packed attention does not know"):
        apply_attention(model, choice, dtype=torch.float32)


@pytest.mark.parametrize(("most_documents", "is_refused"), [(256, False), (257, True)])
def test_kernels_for_many_documents_are_checked_where_the_data_has_many(most_documents: int, is_refused: bool) -> None:
    """flash-attn-4 takes other kernels above 256 documents: they are compiled, and can be wrong, by themselves."""
    seen: set[int] = set()

    def attend(q: Any, k: Any, v: Any, *, boundaries: Any, options: Any) -> torch.Tensor:
        out = BACKENDS["segments"].attend(q, k, v, boundaries=boundaries, options=options)
        seen.add(len(boundaries.lengths))
        return out * 1.1 if len(boundaries.lengths) > 256 else out

    model, choice = model_and_choice("qwen3")
    backend = dataclasses.replace(BACKENDS["segments"], attend=attend, many_documents=256)
    choice = dataclasses.replace(choice, backend=backend)
    if is_refused:
        with pytest.raises(GateStopped, match=r"32\d documents: output is off by 1.0e-01"):
            apply_attention(model, choice, dtype=torch.float32, most_documents=most_documents)
    else:
        assert apply_attention(model, choice, dtype=torch.float32, most_documents=most_documents).ok
        assert max(seen) < 256
