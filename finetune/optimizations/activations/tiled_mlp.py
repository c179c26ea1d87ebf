"""The MLP of a decoder layer in tiles of tokens, for rows so long that its intermediates are the peak of backward.

    y = mlp(x)              x, y: [R, L, H]

An MLP works token by token. Plain autograd holds the intermediates of all tokens at once when backward reaches them:
gate, up, the activation, the product and their gradients, 5 * I to 8 * I numbers a token. Here forward computes tile by
tile and keeps x alone; backward remakes one tile, takes its gradients, and goes on, so that one tile's intermediates
live at a time.

Cost: outside of a checkpointed layer the MLP's forward is computed a second time. Inside one, where the recompute would
have run it anyway, nothing is added if `is_output_unread` says so during the recompute. Gradients of trained weights
are summed over tiles in fp32, which takes 4 bytes for each trained weight of this one MLP while its backward runs.

Legend: R rows, L tokens of a row, N = R * L, T tokens of a tile, H hidden width, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.optimizations.support import Support

Undo = Callable[[], None]
Site = tuple[nn.Module, str]
"""Where a parameter hangs: a module and the name in it."""
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Where activations are from; the probe finds those that look at other tokens."""
PROBE_TOKENS = (4, 3)
"""The two tiles of the probe."""
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Norm of the difference over the norm of the output: rounding of the formats, many times over."""


def tiles_for(tokens: int, tile_tokens: int) -> list[slice]:
    """Cuts tokens into the fewest tiles of at most `tile_tokens`, their sizes at most one apart.

    At least one tile, so that no token gives one empty tile. `tiles_for(10, 4)` has sizes 4, 3, 3.
    """
    count = max(1, -(-tokens // tile_tokens))
    size, longer = divmod(tokens, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


def tile_mlp(
    mlp: nn.Module,
    tile_tokens: int,
    *,
    is_output_unread: Callable[[], bool] = lambda: False,
    skip_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Undo:
    """Replaces the forward of this one module, which `can_tile` allows, by the tiled one; returns what takes it back.

    Args:
        mlp: maps a tensor `[..., H]` to one `[..., K]`, each token by itself; a norm or a projection as well.
        tile_tokens: the most tokens of one tile, over all rows together.
        is_output_unread: asked in each forward. Where it is true nobody will read the output (the recompute of a
            checkpoint): x is kept as ever, nothing is computed, and the output holds whatever was in its memory.
        skip_last: entered around the remake of each tile in backward, whose output nobody reads either: room for
            leaving out a last product that no gradient needs.

    Returns:
        A function that puts the module's own forward back.

    Raises:
        ValueError: `tile_tokens` below 1, or a module that is tiled already.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens}: a tile has at least one token")
    if isinstance(getattr(mlp.forward, "__self__", None), TiledMlp):
        raise ValueError(f"this {type(mlp).__name__} is tiled already: undo that first")
    had_own = "forward" in vars(mlp)
    own = mlp.forward
    mlp.forward = replaced = TiledMlp(mlp, own, tile_tokens, is_output_unread, skip_last).forward

    def undo() -> None:
        if vars(mlp).get("forward") != replaced:
            raise RuntimeError(f"the forward of this {type(mlp).__name__} is no longer the tiled one: nothing to undo")
        if had_own:
            mlp.forward = own
        else:
            del mlp.forward

    return undo


@dataclass(eq=False)
class TiledMlp:
    """One module's tiled forward."""

    mlp: nn.Module
    untiled: Callable[[Tensor], Tensor | tuple[Tensor, ...]]
    """The module's own forward; of several outputs where `after_norm.py` puts modules together."""
    tile_tokens: int
    is_output_unread: Callable[[], bool]
    skip_last: Callable[[], AbstractContextManager[Any]]
    output_kinds: dict[object, list[tuple[int, torch.dtype]]] = field(default_factory=dict)
    """Width and dtype of each output that the module gave for a dtype of x under a state of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps x `[..., H]` to the module's output, `[..., K]`."""
        return self.outputs(x)[0]

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Maps x `[..., H]` to all outputs, each `[..., K]`."""
        sites = _trained_sites(self.mlp)
        return _Tiled.apply(self, list(sites.values()), x, *sites)

    def compute(self, x: Tensor, autocast: _Autocast) -> tuple[Tensor, ...]:
        """The outputs, tile by tile, or memory of their shapes where nobody reads them."""
        key = (x.dtype, autocast)
        if key in self.output_kinds and self.is_output_unread():
            return tuple(x.new_empty((*x.shape[:-1], width), dtype=dtype) for width, dtype in self.output_kinds[key])
        tokens = _as_tokens(x)
        tiles = tiles_for(tokens.shape[-2], self.tile_tokens)
        with autocast.entered():
            found = _several(self.untiled(tokens[..., tiles[0], :] if len(tiles) > 1 else tokens))
            if len(tiles) > 1:
                outputs = tuple(one.new_empty((*tokens.shape[:-1], one.shape[-1])) for one in found)
                for tile in tiles:
                    for output, part in zip(
                        outputs, found or _several(self.untiled(tokens[..., tile, :])), strict=True
                    ):
                        output[..., tile, :] = part
                    found = ()  # the first tile's, which would live on
                found = outputs
        self.output_kinds[key] = [(output.shape[-1], output.dtype) for output in found]
        return tuple(output.reshape(*x.shape[:-1], output.shape[-1]) for output in found)


class _Tiled(torch.autograd.Function):
    """Keeps x. The trained parameters are inputs, so that their gradients arrive once, as from any operation."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledMlp, sites: list[list[Site]], x: Tensor, *trained: nn.Parameter) -> Any:
        ctx.tiled, ctx.sites, ctx.trained = tiled, sites, trained
        ctx.autocast = _Autocast.of(x.device.type)
        if any(ctx.needs_input_grad):
            ctx.versions = _versions(tiled.mlp)
        ctx.save_for_backward(x)
        return tiled.compute(x, ctx.autocast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - its base has no name for ctx
        (x,) = ctx.saved_tensors
        tiled: TiledMlp = ctx.tiled
        if ctx.versions != _versions(tiled.mlp):
            raise RuntimeError(
                f"a weight of the tiled {type(tiled.mlp).__name__} was changed in place between forward and backward, "
                "which remakes its intermediates from it: change weights after backward"
            )
        needs_x = ctx.needs_input_grad[2]
        # Gradients are asked of stand-ins: a hook on a parameter would else be called for each tile.
        stand_ins = [nn.Parameter(parameter.detach()) for parameter in ctx.trained]
        tokens, grads = _as_tokens(x), [_as_tokens(grad) for grad in grad_outputs]
        grad_x = torch.empty_like(tokens, memory_format=torch.contiguous_format) if needs_x else None
        sums: list[Tensor | None] = [None] * len(stand_ins)
        with _substituted(ctx.sites, stand_ins):
            for tile in tiles_for(tokens.shape[-2], tiled.tile_tokens):
                part = tokens[..., tile, :].detach().requires_grad_(needs_x)
                own = [grad[..., tile, :] for grad in grads]
                of_tile = _tile_gradients(tiled, ctx.autocast, [part, *stand_ins], own)
                if grad_x is not None:
                    grad_x[..., tile, :] = 0 if of_tile[0] is None else of_tile[0]
                _add(sums, of_tile[1:])
                del part, of_tile  # else they would live while the next tile is remade
        for index, parameter in enumerate(ctx.trained):
            total = sums[index]
            sums[index] = None if total is None else total.to(parameter.dtype)
        return None, None, None if grad_x is None else grad_x.view(x.shape), *sums


def _tile_gradients(
    tiled: TiledMlp, autocast: _Autocast, inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Remakes one tile, from the first input, and returns the gradients of those inputs that want one; all else that
    the tile held is free on return."""
    with torch.enable_grad(), autocast.entered(), tiled.skip_last():
        outputs = _several(tiled.untiled(inputs[0]))
    found: list[Tensor | None] = [None] * len(inputs)
    wanted = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
    pairs = [pair for pair in zip(outputs, grad_outputs, strict=True) if pair[0].requires_grad]
    if pairs:
        asked = [inputs[index] for index in wanted]
        gradients = torch.autograd.grad(
            [pair[0] for pair in pairs], asked, [pair[1] for pair in pairs], allow_unused=True
        )
        for index, gradient in zip(wanted, gradients, strict=True):
            found[index] = gradient
    return found


def _several(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


def _add(sums: list[Tensor | None], of_tile: Sequence[Tensor | None]) -> None:
    """Adds a tile's gradients to their sums, in fp32 or better."""
    for index, gradient in enumerate(of_tile):
        if gradient is None:
            continue
        total = sums[index]
        if total is None:
            # A copy, since what autograd returns may share memory with the gradient of the output.
            sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            total.add_(gradient)


def _as_tokens(x: Tensor) -> Tensor:
    """All rows as one: `[R, L, H]` to `[1, N, H]`; what has no rows stays as it is."""
    return x.flatten(0, -2)[(None,) * (x.dim() - 2)]


def _trained_sites(mlp: nn.Module) -> dict[nn.Parameter, list[Site]]:
    """Each trained parameter with all places where it hangs; more than one where it is tied."""
    sites: dict[nn.Parameter, list[Site]] = {}
    for module in mlp.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                sites.setdefault(parameter, []).append((module, name))
    return sites


def _versions(mlp: nn.Module) -> list[int]:
    """Autograd's counters of changes in place. Saving the weights would count them too, but hand them to whatever
    moves saved tensors about."""
    return [parameter._version for parameter in mlp.parameters()]


@contextmanager
def _substituted(sites: Sequence[Sequence[Site]], stand_ins: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hangs the stand-ins where the parameters hang, and the parameters back."""
    hung = [(module, name, module._parameters[name]) for places in sites for module, name in places]
    try:
        for places, stand_in in zip(sites, stand_ins, strict=True):
            for module, name in places:
                module._parameters[name] = stand_in
        yield
    finally:
        for module, name, parameter in hung:
            module._parameters[name] = parameter


@dataclass(frozen=True)
class _Autocast:
    """The state of autocast in forward, for backward, which runs outside of it."""

    device_type: str
    is_available: bool
    is_enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def of(cls, device_type: str) -> _Autocast:
        if not torch.amp.is_autocast_available(device_type):
            return cls(device_type, False, False, None)
        is_enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, True, is_enabled, torch.get_autocast_dtype(device_type))

    def entered(self) -> AbstractContextManager[Any]:
        """The same state, without its cache of cast weights: casts of a backward's stand-ins would stay in it until the
        caller's autocast ends."""
        if not self.is_available:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.is_enabled, cache_enabled=False)


def can_tile(mlp: nn.Module, dtype: torch.dtype) -> Support:
    """Says whether an MLP, a linear layer or a norm maps each token by itself: by what it is made of, then by a probe
    of seven tokens.

    Dropout is refused, since a tile's mask would not be the one of the whole row.

    Args:
        mlp: on its device, with its weights; unchanged afterwards.
        dtype: of the hidden states in the run. Autocast, where the run uses it, is entered by the caller.
    """
    fault = _structural_fault(mlp) or _probe_fault(mlp, dtype)
    return Support(fault is None, "" if fault is None else f"{type(mlp).__name__}: {fault}")


def _structural_fault(mlp: nn.Module) -> str | None:
    from bitsandbytes.nn.modules import Linear8bitLt

    if is_norm(mlp):
        return None
    if (mlp._parameters or mlp._buffers) and not isinstance(mlp, nn.Linear):
        return "it has weights of its own beside its linear layers"
    known = _known_modules()
    for name, module in mlp.named_modules():
        is_known = isinstance(module, known) or type(module).__module__ in ACTIVATIONS
        if module is not mlp and not is_known:
            return f"`{name}` is a {type(module).__name__}, not known to map each token by itself"
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"`{name}` drops values at random (p = {module.p}): a tile's mask would be another"
        if isinstance(module, Linear8bitLt) and module.state.threshold > 0:
            return f"`{name}` is an int8 layer, whose outlier columns depend on all tokens together"
        variants = [type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()]
        unknown = [variant for variant in variants if variant != "DoraLinearVariant"]
        if unknown:
            return f"`{name}` has an adapter of kind {unknown[0]}, not known to map each token by itself"
    if _first_linear(mlp) is None:
        return "it has no linear layer"
    if any(parameter.is_meta for parameter in mlp.parameters()):
        return "its weights are not loaded"
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether it looks like a norm over the last dimension: a vector of weights, nothing inside."""
    own = list(module.parameters())
    return "Norm" in type(module).__name__ and not any(module.children()) and [weight.dim() for weight in own] == [1]


def _known_modules() -> tuple[type, ...]:
    """Linear layers (those of bitsandbytes are among them), PEFT's wrappers and what these are made of."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.utils.other import ModulesToSaveWrapper

    containers = (nn.ModuleDict, nn.ModuleList, nn.Sequential, nn.ParameterDict)
    return (nn.Linear, nn.Dropout, nn.Identity, *containers, LoraLayer, DoraLinearLayer, ModulesToSaveWrapper)


def _first_linear(mlp: nn.Module) -> nn.Linear | None:
    return next((module for module in mlp.modules() if isinstance(module, nn.Linear)), None)


def _probe_fault(mlp: nn.Module, dtype: torch.dtype) -> str | None:
    """Compares the output of a few tokens with that of the same tokens in another order and cut in two.

    With gradients on, since an NF4 layer may rearrange itself for good at its first input without.
    """
    linear = mlp if is_norm(mlp) else _first_linear(mlp)
    assert linear is not None
    weight: Any = linear.weight
    width: Any = weight.shape[0] if is_norm(mlp) else linear.in_features
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, sum(PROBE_TOKENS), width, generator=generator)
    order = torch.randperm(sum(PROBE_TOKENS), generator=generator)
    x = values.to(weight.device, dtype).requires_grad_()
    try:
        with torch.enable_grad(), _format_kept(mlp):
            whole = mlp(x)
            if not isinstance(whole, Tensor):
                return f"it returns a {type(whole).__name__}, not one tensor"
            if whole.shape[:-1] != x.shape[:-1]:
                return f"it maps {list(x.shape)} to {list(whole.shape)}, which are not as many tokens"
            tiles = torch.cat([mlp(part) for part in x[:, order].split(PROBE_TOKENS, dim=1)], dim=1)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"it fails on a probe of {sum(PROBE_TOKENS)} tokens: {str(error).strip().splitlines()[0]}"
    expected = whole.detach()[:, order].double()
    difference = (tiles.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30)
    if not difference <= PROBE_TOLERANCE.get(dtype, 3e-2):
        return f"its output for a token depends on other tokens or on the place ({difference:.1e} of it)"
    return None


@contextmanager
def _format_kept(mlp: nn.Module) -> Iterator[None]:
    """Puts back what an NF4 layer settles at its first input: the format that it computes in."""
    names = ("compute_dtype", "compute_type_is_set")
    kept = [(module, name, vars(module)[name]) for module in mlp.modules() for name in names if name in vars(module)]
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
