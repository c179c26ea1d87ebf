"""A tiled MLP holds one tile, goes as it came, touches no other module, and trains a model as the untiled one does."""

from __future__ import annotations

import copy

import pytest
import torch
from mlps import HIDDEN, INTERMEDIATE, LiveBytes, draw, error, make_mlp, trained, with_lora
from numerics import assert_same_trajectory
from tiny import make_config
from torch import nn
from transformers import AutoModelForCausalLM

from finetune.optimizations.activations.tiled_mlp import TiledMlp, tile_mlp

ROUNDING = 2e-6
"""Relative, in fp32: sums of a few hundred numbers in another order."""
TILE = 5


# --- memory


@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "lora"])
def test_backward_holds_the_intermediates_of_one_tile(is_adapted: bool) -> None:
    """The peak over what is there anyway (x, output, gradient of x) is that of an untiled MLP with a tile's tokens,
    and sums of the weights' gradients."""
    tokens, tile = 512, 32
    peaks = {}
    for name, width, is_tiled in (("all", tokens, False), ("one", tile, False), ("tiled", tokens, True)):
        mlp = make_mlp()
        if is_adapted:
            with_lora(mlp)
        if is_tiled:
            tile_mlp(mlp, tile)
        x, grad = draw(1, width, HIDDEN).requires_grad_(), torch.ones(1, width, HIDDEN)
        with LiveBytes() as memory:
            mlp(x).backward(grad)
        peaks[name] = memory.peak
    weights = 4 * sum(parameter.numel() for parameter in trained(make_mlp() if not is_adapted else mlp).values())
    of_row = 2 * 4 * tokens * HIDDEN
    assert peaks["all"] >= 4 * 4 * tokens * INTERMEDIATE, "the count misses something"
    assert peaks["tiled"] <= peaks["one"] + of_row + weights
    assert peaks["tiled"] - of_row - 2 * weights < 0.25 * (peaks["all"] - weights)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_only_the_input_is_saved(is_tiled: bool) -> None:
    mlp, x = with_lora(make_mlp()), draw(1, 13, HIDDEN).requires_grad_()
    if is_tiled:
        tile_mlp(mlp, TILE)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        mlp(x)
    assert (len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()) == is_tiled


# --- one module, and back


def test_undo_restores_it_and_no_other_module_is_touched() -> None:
    model = AutoModelForCausalLM.from_config(make_config("qwen3"))
    first, second = (layer.mlp for layer in model.model.layers)
    attributes, names, forward = dict(vars(first)), list(model.state_dict()), type(first).forward
    undo = tile_mlp(first, TILE)
    assert isinstance(first.forward.__self__, TiledMlp) and "forward" not in vars(second)
    assert list(model.state_dict()) == names and type(first).forward is forward
    undo()
    assert vars(first) == attributes
    with pytest.raises(RuntimeError, match="nothing to undo"):
        undo()


def test_a_forward_of_its_own_is_kept_and_comes_back() -> None:
    """accelerate, among others, hangs a forward on the instance."""
    mlp = make_mlp()
    plain = mlp.forward
    mlp.forward = own = lambda x: 2 * plain(x)
    x = draw(1, 13, HIDDEN)
    expected = mlp(x)
    undo = tile_mlp(mlp, TILE)
    assert error(mlp(x), expected) <= ROUNDING
    undo()
    assert mlp.forward is own


def test_a_copy_of_the_model_is_tiled_over_its_own_weights() -> None:
    mlp, x = make_mlp(), draw(1, 13, HIDDEN)
    tile_mlp(mlp, TILE)
    other = copy.deepcopy(mlp)
    nn.init.zeros_(other.down_proj.weight)
    assert other(x).abs().sum() == 0 and mlp(x).abs().sum() > 0


def test_wrong_use_is_refused() -> None:
    mlp = make_mlp()
    with pytest.raises(ValueError, match="tile_tokens is 0"):
        tile_mlp(mlp, 0)
    tile_mlp(mlp, TILE)
    with pytest.raises(ValueError, match="tiled already"):
        tile_mlp(mlp, TILE)


# --- training


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "lora"])
def test_training_with_it_is_training_without_it(is_adapted: bool, is_checkpointed: bool) -> None:
    traces = []
    for is_tiled in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config("qwen3"), dtype=torch.float32).train()
        if is_adapted:
            model.requires_grad_(False)
            model.enable_input_require_grads()
        for layer in model.model.layers:
            if is_adapted:
                with_lora(layer.mlp)
            if is_tiled:
                tile_mlp(layer.mlp, 11)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        traces.append(_train(model, steps=20))
    assert traces[0][0] - traces[0][-1] > 0.05, "nothing was learned"
    assert_same_trajectory(traces[1], traces[0], relative=1e-5)


def _train(model: nn.Module, *, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    ids = torch.randint(0, 256, (steps, 2, 37), generator=torch.Generator().manual_seed(1)) % 16
    losses = []
    for batch in ids:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
