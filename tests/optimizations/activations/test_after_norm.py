"""A norm within what reads it: the same numbers, its output never there as a whole, and right for any other reader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from mlps import HIDDEN, LiveBytes, draw, error, results
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from finetune.optimizations.activations.after_norm import AfterNorm, can_stand_in
from finetune.optimizations.activations.tiled_mlp import tile_mlp

TILE = 5
ROUNDING = 2e-6


class Layer(nn.Module):
    """A norm, three projections of its output, and what else is made of that."""

    def __init__(self, other: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = LlamaRMSNorm(HIDDEN)
        self.q, self.k, self.v = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 16)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        assert (hidden.shape, hidden.dtype, hidden.device, hidden.size(-1), hidden.dim()) == (
            x.shape, x.dtype, x.device, HIDDEN, 3,
        )  # fmt: skip
        q, k, v = self.q(hidden), self.k(hidden), self.v(hidden)
        y = x + q * torch.sigmoid((k * v).sum(-1, keepdim=True))
        return y if self.other is None else y + self.other(hidden)


def put_together(layer: Layer, *, is_unread: bool = False) -> Callable[[], None]:
    modules = [layer.norm, layer.q, layer.k, layer.v]
    undo = [tile_mlp(module, TILE) for module in modules]
    joint = AfterNorm(
        layer.norm, modules[1:], tile_tokens=TILE, is_output_unread=lambda: is_unread, skip_last=nullcontext
    )
    undo.append(joint.undo)
    return lambda: [one() for one in reversed(undo)] and None


@pytest.mark.parametrize("shape", [(1, 13, HIDDEN), (2, 7, HIDDEN), (1, 1, HIDDEN), (2, 0, HIDDEN)], ids=str)
@pytest.mark.parametrize(
    "other", [None, lambda h: 2 * h, lambda h: torch.tanh(h).flip(-1), lambda h: h[..., :1]],
    ids=["readers alone", "operator", "function", "slice"],
)  # fmt: skip
def test_the_same_numbers_whoever_reads(other: Callable[[Tensor], Tensor] | None, shape: tuple[int, ...]) -> None:
    layer, x = Layer(other), draw(*shape)
    expected = results(layer, x)
    undo = put_together(layer)
    found = results(layer, x)
    assert {name: gradient.shape for name, gradient in found.items()} == {n: g.shape for n, g in expected.items()}
    assert max(error(found[name], expected[name]) for name in expected) <= ROUNDING
    undo()
    assert not any("forward" in vars(module) for module in layer.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], torch.no_grad]) -> None:
    layer, x = Layer(torch.tanh), draw(2, 7, HIDDEN)
    expected = layer(x)
    put_together(layer)
    with mode():
        assert error(layer(x), expected) <= ROUNDING


def test_a_forward_that_fails_leaves_nothing_to_the_next() -> None:
    layer, x = Layer(), draw(1, 13, HIDDEN)
    expected = results(layer, x)
    put_together(layer)
    fail = layer.k.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(2 * x)
    fail.remove()
    assert max(error(tensor, expected[name]) for name, tensor in results(layer, x).items()) <= ROUNDING


def test_the_output_of_the_norm_is_never_whole() -> None:
    """Autograd keeps x, which lives anyway, and the projections' results."""
    tokens, saved = 500, {}
    for is_joint in (False, True):
        layer, x = Layer().requires_grad_(False), draw(1, tokens, HIDDEN).requires_grad_()
        undo = [tile_mlp(module, TILE) for module in (layer.norm, layer.q, layer.k, layer.v)]
        assert can_stand_in(layer.norm, [layer.q, layer.k, layer.v]) and len(undo) == 4
        if is_joint:
            AfterNorm(
                layer.norm, [layer.q, layer.k, layer.v],
                tile_tokens=TILE, is_output_unread=lambda: False, skip_last=nullcontext,
            )  # fmt: skip
        with LiveBytes() as memory:
            y = layer(x)
            saved[is_joint] = memory.live
        del y
    assert saved[False] - saved[True] == 4 * tokens * HIDDEN


def test_outputs_that_nobody_reads_are_not_computed() -> None:
    layer, x = Layer(), draw(1, 13, HIDDEN)
    computed: list[int] = []
    own = layer.q.forward
    layer.q.forward = lambda hidden: computed.append(hidden.shape[-2]) or own(hidden)
    put_together(layer, is_unread=True)
    layer(x)
    assert sum(computed) == 13, "what was never computed has no known shape"
    assert layer(x).shape == x.shape and sum(computed) == 13


def test_modules_that_are_whole_are_left_alone() -> None:
    layer = Layer()
    tile_mlp(layer.norm, TILE)
    assert not can_stand_in(layer.norm, [layer.q]) and not can_stand_in(layer.norm, [])
