"""The parts of a model's layers that work token by token in tiles or whole, as the plan wants them.

With the MLPs go the norms and the projections of attention: norms hold copies in fp32 and their gradients five more at
once, adapters hold casts of their input, so that beside an MLP in tiles these were the peak of backward. What is left
of a layer that holds all tokens at once is attention itself, rotary and the residual stream.

Legend: H hidden width, E width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from finetune.optimizations.activations.phase import current_phase
from finetune.optimizations.activations.stored_outputs import PROJECTIONS, StoredOutputs
from finetune.optimizations.activations.tiled_mlp import Undo, can_tile, is_norm, tile_mlp
from finetune.optimizations.activations.types import Group

TILE_TOKENS = 2048
"""Tokens of a tile: enough for products to run at their full rate on the fastest cards, and for a 14B model less memory
than attention's backward takes from 4,096 tokens on."""


class LayerTiles:
    """The MLPs of decoder layers, and beside them norms and projections.

    Args:
        outputs: knows which products a remake leaves out.
        others: norms outside of the layers, such as the one before the LM head.
    """

    def __init__(
        self, layers: Sequence[nn.Module], outputs: StoredOutputs, *, others: Sequence[nn.Module] = ()
    ) -> None:
        found = [getattr(layer, "mlp", None) for layer in layers]
        self._mlps = [module for module in found if isinstance(module, nn.Module)]
        self._parts = [*(part for layer in layers for part in _token_wise_parts(layer)), *others]
        self._outputs = outputs
        self._undo: list[Undo] = []
        self._can: dict[nn.Module, str] = {}
        """For each module that was looked at why there can be no tiles; empty where there can be."""

    @property
    def reason(self) -> str:
        """Why there can be no tiles, where that is so."""
        return next((self._can[mlp] for mlp in self._mlps if self._can.get(mlp)), "")

    @property
    def groups_inside(self) -> frozenset[Group]:
        """What cannot be stored now, since each tile remakes it."""
        return frozenset({Group.GATE_UP}) if self._undo else frozenset()

    def set(self, tile_tokens: int | None, *, dtype: torch.dtype = torch.float32) -> bool:
        """Puts the layers into tiles of so many tokens, or makes them whole; returns whether the MLPs are in tiles now.

        A norm or a projection that cannot be cut stays whole.

        Args:
            dtype: of the hidden states, for the look at whether a part works token by token.
        """
        self.undo()
        if tile_tokens is None or not self._mlps or not all(self._can_tile(mlp, dtype) for mlp in self._mlps):
            return False
        parts = [part for part in self._parts if self._can_tile(part, dtype)]
        hidden = max((_width(part) for part in parts if is_norm(part)), default=0)
        with self._outputs.lifted():
            # Under the wrapping of stored results, so that a result is stored and taken in one piece.
            for part in parts:
                # The norm of each head is called with a head's width, H / E times for a token.
                tokens = tile_tokens * max(1, hidden // _width(part)) if is_norm(part) else tile_tokens
                self._undo.append(tile_mlp(part, tokens, skip_last=partial(self._outputs.remaking, part)))
        for mlp in self._mlps:
            skip_last = partial(self._outputs.remaking_mlp, mlp)
            self._undo.append(tile_mlp(mlp, tile_tokens, is_output_unread=self._is_output_unread, skip_last=skip_last))
        return True

    def undo(self) -> None:
        """Makes the layers whole."""
        with self._outputs.lifted():
            while self._undo:
                self._undo.pop()()

    def _can_tile(self, part: nn.Module, dtype: torch.dtype) -> bool:
        if part not in self._can:
            self._can[part] = can_tile(part, dtype).reason
        return not self._can[part]

    def _is_output_unread(self) -> bool:
        """Nothing reads an MLP's output in a recompute, unless the check of that very thing is under way."""
        now = current_phase()
        return now is not None and now.is_recompute and self._outputs.skips_last and self._outputs.fill is None


def last_norm(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the norm beside the list of these layers, after which the LM head comes; none where there is no such."""
    for module in model.modules():
        own, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(own, nn.ModuleList) and len(layers) and own[0] is layers[0] and isinstance(norm, nn.Module):
            return [norm] if is_norm(norm) else []
    return []


def _token_wise_parts(layer: nn.Module) -> Iterator[nn.Module]:
    """Yields a layer's norms and the projections of its attention."""
    mlp = getattr(layer, "mlp", None)
    inside = set() if mlp is None else set(mlp.modules())
    for name, module in layer.named_modules():
        if module in inside:
            continue
        if is_norm(module) or name.rpartition(".")[2] in PROJECTIONS:
            yield module


def _width(norm: nn.Module) -> int:
    return next(norm.parameters()).shape[-1] if is_norm(norm) else 0
