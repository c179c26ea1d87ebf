"""A tiled MLP gives what the untiled one gives, under everything that training lays around it."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from mlps import HIDDEN, LiveBytes, draw, error, make_mlp, results, truth, with_lora, with_nf4
from numerics import assert_bitwise_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.optimizations.activations.tiled_mlp import tile_mlp, tiles_for

ROUNDING = 2e-6
"""Relative, in fp32: sums of a few hundred numbers in another order."""
MARGIN = 1.25
"""How much farther from fp32 than the untiled module, in 16 bits; gradients of weights are rounded once a tile."""
SHAPES = [(1, 13, HIDDEN), (1, 3, HIDDEN), (1, 1, HIDDEN), (3, 7, HIDDEN), (2, 1, HIDDEN), (1, 15, HIDDEN), (9, HIDDEN)]
TILE = 5
KINDS = ["qwen3", "llama", "gemma3_text", "phi3"]


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("tile_tokens", [1, 2, 5, 7, 64])
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 6, 13, 64, 65])
def test_tiles_cover_every_token_once_and_are_near_equal(tokens: int, tile_tokens: int) -> None:
    tiles = tiles_for(tokens, tile_tokens)
    assert [token for tile in tiles for token in range(tile.start, tile.stop)] == list(range(tokens))
    sizes = [tile.stop - tile.start for tile in tiles]
    assert max(sizes) <= tile_tokens and max(sizes) - min(sizes) <= 1
    assert len(tiles) == max(1, -(-tokens // tile_tokens))


# --- the same numbers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_equals_the_untiled_module(kind: str, is_adapted: bool, shape: tuple[int, ...]) -> None:
    mlp = make_mlp(kind)
    if is_adapted:
        with_lora(mlp)
    x = draw(*shape)
    expected = results(mlp, x)
    tile_mlp(mlp, TILE)
    found = results(mlp, x)
    assert found.keys() == expected.keys() and len(found) > 2
    assert {name: error(found[name], expected[name]) for name in found if name != "y"} == pytest.approx(
        dict.fromkeys(found.keys() - {"y"}, 0.0), abs=ROUNDING
    )
    assert error(found["y"], expected["y"]) <= ROUNDING


def test_one_tile_changes_no_bit() -> None:
    mlp = with_lora(make_mlp())
    x = draw(2, 8, HIDDEN)
    expected = results(mlp, x)
    tile_mlp(mlp, 16)
    assert_bitwise_equal(results(mlp, x), expected)


CASES = {
    "full-bf16": (lambda: make_mlp(dtype=torch.bfloat16), torch.bfloat16, nullcontext),
    "full-fp32-autocast": (make_mlp, torch.float32, bf16),
    "lora-bf16": (lambda: with_lora(make_mlp(dtype=torch.bfloat16), dtype=torch.bfloat16), torch.bfloat16, nullcontext),
    "lora-fp32-autocast": (lambda: with_lora(make_mlp(dtype=torch.bfloat16)), torch.bfloat16, bf16),
    "lora-fp32-no-autocast": (lambda: with_lora(make_mlp(dtype=torch.bfloat16)), torch.bfloat16, nullcontext),
    "dora-fp32-autocast": (lambda: with_lora(make_mlp(dtype=torch.bfloat16), use_dora=True), torch.bfloat16, bf16),
    "nf4-lora-autocast": (lambda: with_lora(with_nf4(make_mlp())), torch.bfloat16, bf16),
    "nf4-lora": (lambda: with_lora(with_nf4(make_mlp())), torch.bfloat16, nullcontext),
}


@pytest.mark.parametrize("tokens", [13, 160])
@pytest.mark.parametrize("case", CASES)
def test_16_bits_are_as_near_to_fp32_as_the_untiled_module(case: str, tokens: int) -> None:
    make, dtype, around = CASES[case]
    mlp, x = make(), draw(1, tokens, HIDDEN, dtype=dtype)
    true, plain = truth(mlp, x), results(mlp, x, around=around)
    tile_mlp(mlp, TILE)
    tiled = results(mlp, x, around=around)
    assert {name: tensor.dtype for name, tensor in tiled.items()} == {n: tensor.dtype for n, tensor in plain.items()}
    far = {name: (error(tiled[name], true[name]), error(plain[name], true[name])) for name in plain}
    assert not {name: errors for name, errors in far.items() if errors[0] > MARGIN * errors[1] + ROUNDING}


def test_gradients_of_weights_are_summed_in_fp32() -> None:
    """In bf16, a sum over many tiles would stop to grow: 4,096 tiles of one token, each adding the same."""
    mlp = make_mlp(dtype=torch.bfloat16)
    x = draw(1, 1, HIDDEN, dtype=torch.bfloat16)
    tile_mlp(mlp, 1)
    once = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    many = torch.autograd.grad(mlp(x.expand(1, 4096, HIDDEN)).sum(), list(mlp.parameters()))
    for one, total in zip(once, many, strict=True):
        assert torch.equal(total, one * 4096)


def test_gradcheck() -> None:
    mlp = make_mlp(dtype=torch.float64, hidden_size=4, intermediate_size=6)
    tile_mlp(mlp, 2)
    x = draw(1, 5, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()))


# --- what is laid around it


@pytest.mark.parametrize("is_unread", [False, True], ids=["computed", "unread"])
@pytest.mark.parametrize("around", [nullcontext, bf16], ids=["fp32", "autocast"])
def test_inside_a_checkpoint(around, is_unread: bool) -> None:
    """Recompute and forward save the same; an output that nobody reads is not computed again."""
    mlp = with_lora(make_mlp())
    norm = nn.RMSNorm(HIDDEN)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: x + self.mlp(norm(x)), x, use_reentrant=False)

    layer, x = Layer(), draw(2, 13, HIDDEN)
    expected = results(layer, x, around=around)
    tokens: list[int] = []
    mlp.gate_proj.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].numel() // HIDDEN))
    tile_mlp(mlp, TILE, is_output_unread=lambda: is_unread and torch._C._current_graph_task_id() != -1)
    found = results(layer, x, around=around)
    limit = ROUNDING if around is nullcontext else 1e-2
    assert max(error(found[name], expected[name]) for name in expected) <= limit
    assert sum(tokens) == 26 * (2 if is_unread else 3)


def test_an_unread_output_has_shape_and_dtype_of_the_real_one() -> None:
    mlp, x = make_mlp(), draw(2, 13, HIDDEN)
    tile_mlp(mlp, TILE, is_output_unread=lambda: True)
    expected = results(copy.deepcopy(mlp), x)["y"]
    first = mlp(x)
    assert torch.equal(first, expected), "what was never computed has no known dtype: it is computed"
    with bf16():
        mlp(x)
        unread = mlp(x)
    assert (unread.shape, unread.dtype, mlp(x).dtype) == (x.shape, torch.bfloat16, torch.float32)


def test_each_remake_is_wrapped() -> None:
    mlp, entered = make_mlp(), []

    @contextmanager
    def skip_last():
        entered.append("in")
        yield
        entered.append("out")

    tile_mlp(mlp, TILE, skip_last=skip_last)
    y = mlp(draw(1, 13, HIDDEN).requires_grad_())
    assert entered == []
    y.sum().backward()
    assert entered == ["in", "out"] * 3


def test_backward_inside_autocast_keeps_every_gradient() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN).requires_grad_()
    wanted = [x, *mlp.parameters()]
    with bf16():
        y = mlp(x)
    expected = torch.autograd.grad(y.float().square().sum(), wanted)
    tile_mlp(mlp, TILE)
    with bf16():
        found = torch.autograd.grad(mlp(x).float().square().sum(), wanted)
    assert max(error(found, true) for found, true in zip(found, expected, strict=True)) <= 2e-2


def test_no_cast_of_a_weight_stays_in_the_cache_of_autocast() -> None:
    """Nobody asks for those of a backward again, and they would stay until autocast ends."""
    mlp, x = make_mlp(), draw(1, 13, HIDDEN).requires_grad_()
    tile_mlp(mlp, TILE)
    with bf16(), LiveBytes() as memory:
        gradients = torch.autograd.grad(mlp(x).float().sum(), list(mlp.parameters()))
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
        del gradients
        assert memory.live == 0


def test_forward_without_autocast_is_remade_without_it() -> None:
    """The products of backward themselves follow the caller's autocast, as everywhere in torch."""
    mlp, x = make_mlp(), draw(1, 13, HIDDEN).requires_grad_()
    seen: list[torch.dtype] = []
    mlp.down_proj.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))

    def gradient() -> torch.Tensor:
        y = mlp(x).sum()
        with bf16():
            return torch.autograd.grad(y, [x])[0]

    expected = gradient()
    tile_mlp(mlp, TILE)
    assert error(gradient(), expected) <= ROUNDING
    assert set(seen) == {torch.float32} and len(seen) == 1 + 3 + 3


def test_a_frozen_mlp_hands_its_gradient_on() -> None:
    mlp, x = make_mlp().requires_grad_(False), draw(1, 13, HIDDEN)
    expected = results(mlp, x)
    tile_mlp(mlp, TILE)
    found = results(mlp, x)
    assert found.keys() == {"y", "x"} and error(found["x"], expected["x"]) <= ROUNDING


def test_an_input_without_gradient_still_trains_the_weights() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN)
    expected = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    tile_mlp(mlp, TILE)
    found = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    assert max(error(a, b) for a, b in zip(found, expected, strict=True)) <= ROUNDING


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_a_forward_alone(mode) -> None:
    mlp, x = make_mlp().eval(), draw(2, 13, HIDDEN)
    expected = mlp(x)
    tile_mlp(mlp, TILE)
    with mode():
        found = mlp(x)
    assert not found.requires_grad and error(found, expected) <= ROUNDING


def test_nothing_to_train_makes_no_graph() -> None:
    mlp = make_mlp().requires_grad_(False)
    tile_mlp(mlp, TILE)
    assert mlp(draw(1, 13, HIDDEN)).grad_fn is None


def test_some_gradients_alone() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN).requires_grad_()
    wanted = [mlp.up_proj.weight]
    expected = torch.autograd.grad(mlp(x).sum(), wanted)
    tile_mlp(mlp, TILE)
    y = mlp(x).sum()
    (found,) = torch.autograd.grad(y, wanted, retain_graph=True)
    assert error(found, expected[0]) <= ROUNDING
    assert torch.equal(torch.autograd.grad(y, wanted)[0], found), "a second backward over a graph that was kept"
    assert mlp.up_proj.weight.grad is None and x.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, wanted)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN).requires_grad_()
    tile_mlp(mlp, TILE)
    (first,) = torch.autograd.grad(mlp(x).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_hooks_on_parameters_see_the_sum_once_and_grad_accumulates() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN)
    weight = mlp.down_proj.weight
    tile_mlp(mlp, TILE)
    seen: list[str] = []
    weight.register_hook(lambda grad: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    mlp(x).sum().backward()
    assert seen == ["gradient", "accumulated"]
    assert weight.grad is not None
    once = weight.grad.clone()
    mlp(x).sum().backward()
    assert torch.equal(weight.grad, 2 * once)


def test_a_tied_weight_gets_the_sum_of_both_places() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN)
    mlp.up_proj.weight = mlp.gate_proj.weight
    expected = results(mlp, x)
    tile_mlp(mlp, TILE)
    found = results(mlp, x)
    assert error(found["gate_proj.weight"], expected["gate_proj.weight"]) <= ROUNDING
    assert mlp.up_proj.weight is mlp.gate_proj.weight


def test_weights_changed_between_forward_and_backward_are_an_error() -> None:
    mlp = make_mlp()
    tile_mlp(mlp, TILE)
    y = mlp(draw(1, 13, HIDDEN)).sum()
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.backward()


@pytest.mark.parametrize("failing_call", [2, 5], ids=["forward", "backward"])
def test_an_exception_in_a_tile_leaves_everything_as_it_was(failing_call: int) -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN)
    before = dict(mlp.named_parameters())
    tile_mlp(mlp, TILE)
    expected = results(mlp, x)
    mlp.zero_grad()
    calls = []

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == failing_call:
            raise MemoryError("a tile too many")

    hook = mlp.up_proj.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="a tile too many"):
        mlp(x).sum().backward()
    hook.remove()
    assert all(parameter is before[name] and parameter.grad is None for name, parameter in mlp.named_parameters())
    assert_bitwise_equal(results(mlp, x), expected)
