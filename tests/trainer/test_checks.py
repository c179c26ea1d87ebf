"""The check that packed documents do not see each other passes where they do not, and fails where they do."""

from __future__ import annotations

import pytest
import torch
from tiny import make_config
from transformers import AutoModelForCausalLM

from finetune.errors import GateStopped
from finetune.trainer.checks import check_documents_are_separate, check_loss_again, check_weights_are_finite


def model_of(kind: str, attention: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(kind), attn_implementation=attention, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_stock_attention_keeps_documents_apart(kind: str, attention: str, dtype: torch.dtype) -> None:
    """P30: no hidden state of a packed document changes with its neighbour, for each attention and format."""
    model = model_of(kind, attention, dtype).train()
    assert check_documents_are_separate(model, num_rows=260).ok
    assert model.training


def test_gpt_oss_mixes_documents_and_is_caught() -> None:
    """P30: an architecture that builds its mask without the positions is stopped."""
    with pytest.raises(GateStopped, match="see each other"):
        check_documents_are_separate(model_of("gpt_oss", "eager"), num_rows=260)


def test_a_broken_weight_is_named() -> None:
    model = model_of("qwen3", "sdpa")
    assert check_weights_are_finite(model).ok
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("inf")
    with pytest.raises(GateStopped, match=r"1 of \d+ .*layers\.1\.mlp\.up_proj"):
        check_weights_are_finite(model)


def test_a_model_that_ignores_positions_is_caught() -> None:
    """P30: so is a model that loses the positions on the way."""
    model = model_of("qwen3", "sdpa")
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **(kwargs | {"position_ids": None}))
    with pytest.raises(GateStopped):
        check_documents_are_separate(model, num_rows=260)


def test_a_loss_measured_again_is_told_in_short_numbers() -> None:
    """The report showed all 16 digits."""
    check = check_loss_again(0.7253137491203948, expected=0.7253139482731029, folder="adapter")
    assert check.detail == "held-out loss 0.7253 of the best weights read back, 0.7253 when they were saved"
    with pytest.raises(GateStopped, match=r"held-out loss not measured of .*, 0\.5000 when they were saved"):
        check_loss_again(None, expected=0.5, folder="adapter")
