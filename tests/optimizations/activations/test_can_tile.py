"""Which modules may be tiled: what each is made of, and what a probe says."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from mlps import HIDDEN, INTERMEDIATE, make_mlp, with_lora, with_nf4
from tiny import make_config
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from finetune.optimizations.activations.tiled_mlp import can_tile

FP32, BF16 = torch.float32, torch.bfloat16


def int8() -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    mlp = make_mlp()
    mlp.down_proj = Linear8bitLt(INTERMEDIATE, HIDDEN, bias=False, has_fp16_weights=False, threshold=6.0)
    return mlp


def moe(kind: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(make_config(kind)).model.layers[0].mlp


class Looks(nn.Module):
    """An MLP that looks at more than one token."""

    def __init__(self, look: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mlp = make_mlp().gate_proj
        self.down = nn.Linear(INTERMEDIATE, HIDDEN)
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.look(self.down(self.mlp(x)))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "phi3"])
def test_dense_mlps_can(kind: str, dtype: torch.dtype) -> None:
    assert can_tile(make_mlp(kind, dtype=dtype), dtype).reason == ""
    assert can_tile(with_lora(make_mlp(kind, dtype=dtype)), dtype).ok


@pytest.mark.parametrize("activation", sorted(ACT2FN))
def test_every_activation_can(activation: str) -> None:
    made = make_mlp("llama", hidden_act=activation)
    support = can_tile(made, FP32)
    assert support.ok, support.reason


@pytest.mark.parametrize("is_adapted", [False, True], ids=["nf4", "nf4-dora"])
@pytest.mark.parametrize("compute_dtype", [None, BF16], ids=str)
def test_nf4_layers_can_and_stay_as_they_were(compute_dtype: torch.dtype | None, is_adapted: bool) -> None:
    """An NF4 layer without a format takes that of its first input: the probe's must not be that one."""
    mlp = with_nf4(make_mlp(), compute_dtype=compute_dtype).eval()
    if is_adapted:
        with_lora(mlp, use_dora=True)
    before = {name: {k: v for k, v in vars(m).items() if "comput" in k} for name, m in mlp.named_modules()}
    packed = {name: parameter.clone() for name, parameter in mlp.named_parameters()}
    state = torch.get_rng_state()
    assert can_tile(mlp, FP32).reason == ""
    assert before == {name: {k: v for k, v in vars(m).items() if "comput" in k} for name, m in mlp.named_modules()}
    assert all(torch.equal(packed[name], parameter) for name, parameter in mlp.named_parameters())
    assert all(parameter.grad is None for parameter in mlp.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: moe("qwen3_moe"), "`experts` is a Qwen3MoeExperts"),
        (lambda: moe("gpt_oss"), "`router` is a GptOssTopKRouter"),
        (lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1)), r"drops values at random \(p = 0.1\)"),
        (lambda: with_lora(make_mlp(), lora_dropout=0.05), r"lora_dropout.default` drops values at random \(p = 0.05"),
        (int8, "`down_proj` is an int8 layer, whose outlier columns depend on all tokens"),
        (lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Conv1d(3, 3, 1)), "`1` is a Conv1d"),
        (lambda: nn.LayerNorm(HIDDEN), "weights of its own"),
        (lambda: nn.Sequential(nn.SiLU()), "no linear layer"),
        (lambda: Looks(lambda y: y[:, 1:]), r"maps \[1, 7, 64\] to \[1, 6, 64\]"),
        (lambda: make_mlp().to("meta"), "weights are not loaded"),
        (lambda: Looks(lambda y: (y, None)), "returns a tuple"),
        (lambda: Looks(lambda y: y + 0.1 * y.mean(1, keepdim=True)), "depends on other tokens"),
        (lambda: Looks(lambda y: y + 0.1 * y.roll(1, 1)), "depends on other tokens"),
        (lambda: Looks(lambda y: y * torch.arange(1, y.shape[1] + 1)[:, None]), "or on the place"),
        (lambda: Looks(lambda y: y * float("nan")), "depends on other tokens"),
        (lambda: Looks(lambda y: y @ torch.ones(3, 3)), "fails on a probe of 7 tokens: mat1 and mat2"),
        (lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Softmax(dim=1)), "depends on other tokens"),
    ],
)
def test_what_cannot_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    support = can_tile(make(), FP32)
    assert not support.ok
    assert re.search(reason, support.reason), support.reason
