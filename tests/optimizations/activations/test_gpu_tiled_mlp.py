"""On a CUDA device: one tile's memory, numbers as near to fp32 as the untiled module's, and no wait for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from mlps import error, make_mlp, results, truth, with_lora, with_nf4
from torch import nn

from finetune.optimizations.activations.tiled_mlp import can_tile, tile_mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"hidden_size": 1024, "intermediate_size": 4096}
TOKENS, TILE = 8192, 1024
MARGIN = 1.25
"""How much farther from fp32 than the untiled module; gradients of weights are rounded once a tile."""
KINDS = ["lora", "nf4-lora", "full"]


def make(kind: str) -> nn.Module:
    mlp = make_mlp(dtype=torch.bfloat16, **SIZES).cuda()
    if kind == "nf4-lora":
        mlp = with_nf4(mlp)
    return mlp if kind == "full" else with_lora(mlp).cuda()


def draw(tokens: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.randn(1, tokens, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16, generator=generator)


def around() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_as_near_to_fp32_as_the_untiled_modules(kind: str) -> None:
    mlp, x = make(kind), draw(1000)
    with around():
        assert can_tile(mlp, torch.bfloat16).reason == ""
    true, plain = truth(mlp, x), results(mlp, x, around=around)
    tile_mlp(mlp, 300)
    tiled = results(mlp, x, around=around)
    far = {name: (error(tiled[name], true[name]), error(plain[name], true[name])) for name in plain}
    assert not {name: errors for name, errors in far.items() if errors[0] > MARGIN * errors[1]}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_holds_the_intermediates_of_one_tile(kind: str) -> None:
    """The peak of an untiled MLP with a tile's tokens, the output and the gradient of x, and fp32 sums of weights'."""
    peaks = {}
    for name, tokens, is_tiled in (("all", TOKENS, False), ("one", TILE, False), ("tiled", TOKENS, True)):
        mlp, x = make(kind), draw(tokens).requires_grad_()
        if is_tiled:
            tile_mlp(mlp, TILE)
        grad = torch.ones_like(x)
        for _ in range(2):  # the first call sets up cuBLAS
            mlp.zero_grad()
            x.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with around():
                y = mlp(x)
            y.backward(grad)
            del y
        peaks[name] = torch.cuda.max_memory_allocated() - before
    weights = 4 * sum(parameter.numel() for parameter in mlp.parameters() if parameter.requires_grad)
    of_row = 2 * 2 * TOKENS * SIZES["hidden_size"]
    assert peaks["all"] >= 4 * 2 * TOKENS * SIZES["intermediate_size"]
    assert peaks["tiled"] <= 1.02 * (peaks["one"] + of_row + weights)
    assert peaks["tiled"] - 2 * weights < 0.35 * peaks["all"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind: str) -> None:
    mlp, x = make(kind), draw(TOKENS).requires_grad_()
    tile_mlp(mlp, TILE)
    copy.deepcopy(mlp)(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with around():
            y = mlp(x)
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
