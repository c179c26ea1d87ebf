"""The parts of a model's layers that work token by token in tiles or whole, as the plan wants them.

With the MLPs go the norms and the projections of attention: norms hold copies in fp32 and their gradients five more at
once, adapters hold casts of their input, so that beside an MLP in tiles these were the peak of backward. What is left
of a layer that holds all tokens at once is attention itself, rotary and the residual stream.

Legend: H hidden width, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from finetune.optimizations.activations.after_norm import AfterNorm, can_stand_in
from finetune.optimizations.activations.phase import current_phase
from finetune.optimizations.activations.stored_outputs import PROJECTIONS, StoredOutputs
from finetune.optimizations.activations.tiled_mlp import Undo, can_tile, is_norm, tile_mlp
from finetune.optimizations.activations.types import Group

LONG_ROW, TILE_OF_LONG_ROW, TILE = 8192, 4096, 2048
"""Tokens. A tile is to be large enough for products to run at their rate, since each tile unpacks quantized weights
anew: a step of Qwen3-14B at 16,384 was a quarter slower in tiles of 2,048 than in whole rows (H200)."""


def tile_tokens_for(tokens: int) -> int:
    """Returns the tokens of a tile for micro-batches of so many."""
    return TILE_OF_LONG_ROW if tokens > LONG_ROW else TILE


AFTER_ATTENTION = "post_attention_layernorm"
"""In most models the norm before the MLP; where there is a `pre_feedforward_layernorm`, that is."""


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
        self._layers = layers
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
                self._undo.append(tile_mlp(part, tokens, skip_last=self._remaking(part)))
            for mlp in self._mlps:
                unread, remaking = self._is_output_unread, self._remaking(mlp)
                self._undo.append(tile_mlp(mlp, tile_tokens, is_output_unread=unread, skip_last=remaking))
            for layer in self._layers:
                self._put_together(layer, tile_tokens)
        return True

    def _put_together(self, layer: nn.Module, tile_tokens: int) -> None:
        """Lets a layer's norms run within what reads them."""
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        before_mlp = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else AFTER_ATTENTION
        projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "qkv_proj")]
        for norm, readers, unread in (
            (getattr(layer, "input_layernorm", None), projections, _is_stored),
            (getattr(layer, before_mlp, None), [mlp], self._is_output_unread),
        ):
            known = [reader for reader in readers if isinstance(reader, nn.Module)]
            if not isinstance(norm, nn.Module) or not can_stand_in(norm, known):
                continue
            remaking = partial(_all, [self._remaking(reader) for reader in known])
            joint = AfterNorm(norm, known, tile_tokens=tile_tokens, is_output_unread=unread, skip_last=remaking)
            self._undo.append(joint.undo)

    def _remaking(self, part: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """What a remake of this part is inside of."""
        return partial(self._outputs.remaking_mlp if part in self._mlps else self._outputs.remaking, part)

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


def _is_stored() -> bool:
    """Projections of which the plan has the results: nothing reads those of a recompute."""
    now = current_phase()
    return now is not None and now.is_recompute and now.stores(Group.QKV)


@contextmanager
def _all(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


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
