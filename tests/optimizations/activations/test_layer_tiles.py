"""Layers in tiles give what whole layers give, under a plan, and hold less."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from activation_models import KEPT, ON_HOST, TinyModel, plan_of, tiny_model
from mlps import HIDDEN, LiveBytes, draw, error, make_mlp, results, with_lora, with_nf4
from numerics import assert_same_trajectory
from torch import nn

from finetune.optimizations.activations.stored_outputs import StoredOutputs
from finetune.optimizations.activations.tiled_mlp import TiledMlp
from finetune.optimizations.activations.tiles import LayerTiles, last_norm
from finetune.optimizations.activations.types import Group, Place

ROUNDING = 1e-5
"""Relative, in fp32: gradients of the projections are added in another order."""
TILE = 11
STORED = (Group.QKV, Group.ATTENTION, Group.ATTENTION_OUTPUT)
KINDS = ["qwen3", "llama"]


def tiles_of(tiny: TinyModel) -> LayerTiles:
    return LayerTiles(tiny.layers, tiny.outputs, others=last_norm(tiny.model, tiny.layers))


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def nf4(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        with_nf4(layer.mlp)
        with_nf4(layer.self_attn)
    return model


def farthest(found: tuple, true: tuple) -> float:
    assert found[1].keys() == true[1].keys()
    return max(error(found[0], true[0]), *(error(found[1][name], true[1][name]) for name in true[1]))


@pytest.mark.parametrize("groups", [(), *((group,) for group in STORED), STORED], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_whole_layers(kind: str, groups: tuple[Group, ...]) -> None:
    """Wherever results are stored, and with what a recompute leaves out filled with NaN."""
    tiny = tiny_model(kind)
    expected = tiny.step()
    tiles = tiles_of(tiny)
    assert tiles.set(TILE), tiles.reason
    for place, fill in ((Place.DEVICE, None), (Place.HOST, float("nan"))):
        tiny.outputs.fill = fill
        tiny.install([*[plan_of(place, *groups)] * 3, KEPT])
        assert farthest(tiny.step(), expected) <= ROUNDING
        assert tiny.leased() == []


@pytest.mark.parametrize("prepare", [None, nf4], ids=["bf16", "nf4"])
def test_16_bits_are_as_near_to_fp32_as_whole_layers(prepare) -> None:
    """Adapters in fp32 over a frozen 16-bit or NF4 base, under autocast, as training has it."""

    def step(*, is_tiled: bool, dtype: torch.dtype = torch.bfloat16) -> tuple:
        tiny = tiny_model("qwen3", dtype=torch.bfloat16, prepare=prepare)
        if dtype is torch.float32:
            tiny.model.float()
            for module in tiny.model.modules():
                if hasattr(module, "compute_dtype"):
                    module.compute_dtype = torch.float32
        tiny.install([ON_HOST] * 3 + [KEPT])
        with nullcontext() if dtype is torch.float32 else bf16():
            assert tiles_of(tiny).set(TILE, dtype=dtype) if is_tiled else True
            return tiny.step()

    true, plain, tiled = step(is_tiled=False, dtype=torch.float32), step(is_tiled=False), step(is_tiled=True)
    assert plain[1].keys() == tiled[1].keys()
    far = {name: (error(tiled[1][name], true[1][name]), error(plain[1][name], true[1][name])) for name in true[1]}
    assert not {name: errors for name, errors in far.items() if errors[0] > 1.25 * errors[1] + 1e-4}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_training_with_tiles_is_training_without(kind: str) -> None:
    traces = []
    for is_tiled in (False, True):
        tiny = tiny_model(kind)
        tiny.install([ON_HOST] * 3 + [KEPT])
        assert tiles_of(tiny).set(TILE) if is_tiled else True
        optimizer = torch.optim.AdamW([p for p in tiny.model.parameters() if p.requires_grad], lr=3e-4)
        losses = []
        for _ in range(20):
            loss, _ = tiny.step()
            optimizer.step()
            losses.append(loss.item())
        traces.append(losses)
    assert traces[0][0] - traces[0][-1] > 0.05, "nothing was learned"
    assert_same_trajectory(traces[1], traces[0], relative=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_backward_holds_less_than_half(kind: str) -> None:
    """The most of a step beside its weights, for adapters in fp32 under autocast, with every MLP in tiles before."""
    length, peaks = 2048, {}
    for is_tiled in (False, True):
        tiny = tiny_model(kind, dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
        tiny.attend_with("segments", lengths=[[length]] * 2)
        tiny.extra["logits_to_keep"] = 1
        tiny.install([ON_HOST] * 3 + [KEPT], slot_bytes=2**22)
        ids = torch.randint(0, 250, (2, length))
        with bf16():
            tiles = tiles_of(tiny)
            if not is_tiled:
                tiles._parts.clear()
            assert tiles.set(128, dtype=torch.bfloat16)
            with LiveBytes() as memory:
                tiny.model(input_ids=ids, use_cache=False, **tiny.extra).logits.float().sum().backward()
        peaks[is_tiled] = memory.peak / ids.numel() / 128
    assert peaks[True] < 0.42 * peaks[False], peaks


def test_undo_leaves_everything_as_it_was() -> None:
    tiny = tiny_model("qwen3")
    tiny.install([ON_HOST] * 3 + [KEPT])
    expected = tiny.step()
    own = {name: "forward" in vars(module) for name, module in tiny.model.named_modules()}
    tiles = tiles_of(tiny)
    tiles.set(TILE)
    changed = {name for name, module in tiny.layers[1].named_modules() if "forward" in vars(module)}
    parts = {"mlp", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    assert parts | {f"self_attn.{name}_proj" for name in "qkvo"} <= changed
    tiles.undo()
    assert {name: "forward" in vars(module) for name, module in tiny.model.named_modules()} == own
    found = tiny.step()
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())
    tiny.outputs.undo()
    assert not any("forward" in vars(module) for layer in tiny.layers for module in layer.modules())


def test_what_cannot_be_cut_stays_whole() -> None:
    """A norm that looks at other tokens, such as one over the row."""
    tiny = tiny_model("llama")
    norm = tiny.layers[1].input_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) + 0.1 * x.mean(1, keepdim=True)
    expected = tiny.step()
    tiles = tiles_of(tiny)
    assert tiles.set(TILE) and tiles.reason == ""
    assert not isinstance(getattr(norm.forward, "__self__", None), TiledMlp)
    assert farthest(tiny.step(), expected) <= ROUNDING


# --- the frozen product that only its gradient is wanted of


@pytest.mark.parametrize("make", [make_mlp, lambda: with_nf4(make_mlp())], ids=["linear", "nf4"])
@pytest.mark.parametrize("around", [nullcontext, bf16], ids=["plain", "autocast"])
def test_a_product_left_out_of_a_remake_hands_its_gradient_on(make, around) -> None:
    """It once handed nothing on, so that the gradients of everything before `down` were wrong."""
    layer = nn.Module()
    layer.mlp = with_lora(make())
    for name, parameter in layer.mlp.named_parameters():
        parameter.requires_grad_("lora_" in name)
    x, plain = draw(1, 13, HIDDEN), layer.mlp.down_proj.base_layer.forward
    expected = results(layer.mlp, x, around=around)
    outputs = StoredOutputs([layer])
    rows: list[int] = []
    layer.mlp.down_proj.base_layer.register_forward_hook(lambda _, inputs, output: rows.append(output.isnan().sum()))

    def remake(x: torch.Tensor) -> torch.Tensor:
        with outputs.remaking_mlp(layer.mlp):
            return layer.mlp(x)

    outputs.fill = None
    x = x.detach().requires_grad_()
    wanted = {name: parameter for name, parameter in layer.mlp.named_parameters() if parameter.requires_grad}
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    with around():
        y = remake(x)
    found = torch.autograd.grad((y * weights.to(y)).sum(), [x, *wanted.values()])
    for name, gradient in zip(["x", *wanted], found, strict=True):
        assert error(gradient, expected[name]) <= 1e-6, name
    assert plain is not None and len(rows) == 1


def test_without_a_frozen_product_a_remake_is_whole() -> None:
    layer = nn.Module()
    layer.mlp = make_mlp()
    outputs = StoredOutputs([layer])
    x = draw(1, 13, HIDDEN)
    expected = layer.mlp(x)
    for remaking in (partial(outputs.remaking_mlp, layer.mlp), partial(outputs.remaking, layer.mlp.up_proj)):
        with remaking():
            assert torch.equal(layer.mlp(x), expected)
