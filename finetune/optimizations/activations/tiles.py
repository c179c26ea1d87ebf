"""The MLPs of a model in tiles or whole, as the plan wants them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from finetune.optimizations.activations.phase import current_phase
from finetune.optimizations.activations.stored_outputs import StoredOutputs
from finetune.optimizations.activations.tiled_mlp import Undo, can_tile, tile_mlp
from finetune.optimizations.activations.types import Group

LONG_ROW, TILE_OF_LONG_ROW, TILE = 8192, 4096, 2048
"""Tokens. A tile is to be large enough for products to run at their rate, since each tile unpacks quantized weights
anew: a step of Qwen3-14B at 16,384 was a quarter slower in tiles of 2,048 than in whole rows (H200)."""


def tile_tokens_for(tokens: int) -> int:
    """Returns the tokens of a tile for micro-batches of so many."""
    return TILE_OF_LONG_ROW if tokens > LONG_ROW else TILE


class MlpTiles:
    """The MLPs of decoder layers.

    Args:
        outputs: knows which products a recompute leaves out.
    """

    def __init__(self, layers: Sequence[nn.Module], outputs: StoredOutputs) -> None:
        found = [getattr(layer, "mlp", None) for layer in layers]
        self._mlps = [module for module in found if isinstance(module, nn.Module)]
        self._outputs = outputs
        self._undo: list[Undo] = []
        self._can: bool | None = None
        self.reason = ""
        """Why there can be no tiles, where that is so."""

    @property
    def groups_inside(self) -> frozenset[Group]:
        """What cannot be stored now, since each tile remakes it."""
        return frozenset({Group.GATE_UP}) if self._undo else frozenset()

    def set(self, tile_tokens: int | None, *, dtype: torch.dtype = torch.float32) -> bool:
        """Puts the MLPs into tiles of so many tokens, or makes them whole; returns whether they are in tiles now.

        Args:
            dtype: of the hidden states, for the look at whether an MLP works token by token.
        """
        self.undo()
        if tile_tokens is None or not self._can_tile(dtype):
            return False
        for mlp in self._mlps:
            self._undo.append(
                tile_mlp(
                    mlp,
                    tile_tokens,
                    is_output_unread=self._is_output_unread,
                    skip_last=partial(self._outputs.leaving_out_last, mlp),
                )
            )
        return True

    def undo(self) -> None:
        """Makes the MLPs whole."""
        while self._undo:
            self._undo.pop()()

    def _can_tile(self, dtype: torch.dtype) -> bool:
        if self._can is None:
            answers = [can_tile(mlp, dtype) for mlp in self._mlps]
            self.reason = next((answer.reason for answer in answers if not answer.ok), "")
            self._can = bool(answers) and not self.reason
        return self._can

    def _is_output_unread(self) -> bool:
        """Nothing reads an MLP's output in a recompute, unless the check of that very thing is under way."""
        now = current_phase()
        return now is not None and now.is_recompute and self._outputs.skips_last and self._outputs.fill is None
