"""Projections that give their stored result in a recompute instead of computing it again.

In backward the graph of forward runs, with what its nodes saved made again: of the recompute only the saved tensors
matter. So a projection whose result is stored has to save again what backward reads (its adapter's input, the
adapter's inner product) and may leave out the frozen product. `down` of an MLP is left out without being stored:
nothing saves its result, which is only added to the residual.

A tile's remake is another matter: there the graph of the remake itself goes backward, and a frozen product that is left
out still has to hand its gradient on (`of_gradient_alone`).

Works on single module instances, as transformers' and accelerate's hooks do: their `forward` is wrapped and put back by
`undo`. Classes, names, parameters and other models stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from finetune.optimizations.activations.frozen_product import of_gradient_alone
from finetune.optimizations.activations.phase import Phase, current_phase
from finetune.optimizations.activations.types import Group

PROJECTIONS = {
    "q_proj": Group.QKV,
    "k_proj": Group.QKV,
    "v_proj": Group.QKV,
    "qkv_proj": Group.QKV,
    "o_proj": Group.ATTENTION_OUTPUT,
    "gate_proj": Group.GATE_UP,
    "up_proj": Group.GATE_UP,
    "gate_up_proj": Group.GATE_UP,
}
"""Names that transformers' decoder layers give their projections."""
LAST_OF_MLP = "down_proj"


class StoredOutputs:
    """The wrapped projections of one model.

    Args:
        layers: decoder layers.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._layers = layers
        self._skipped: set[int] = set()
        """Base modules whose product is left out right now."""
        self._gradient_alone: set[int] = set()
        """Base modules of which right now the gradient alone is wanted."""
        self.skips_last = True
        """Whether `down` is left out of a recompute; wrong for a layer that reads its result, as one with a norm after
        the MLP does."""
        self.fill: float | None = None
        """What a left-out product is filled with: nothing, or a value that shows where it is read after all."""
        self._wrap_all()

    def _wrap_all(self) -> None:
        for layer in self._layers:
            for name, module in layer.named_modules():
                self._wrap(name.rpartition(".")[2], module)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Takes the wrapping off in a block, for what has to lie under it."""
        is_wrapped = bool(self._undo)
        self.undo()
        try:
            yield
        finally:
            if is_wrapped:
                self._wrap_all()

    def undo(self) -> None:
        """Puts every `forward` back."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, name: str, module: nn.Module) -> None:
        base = base_that_can_be_left_out(module)
        if base is None:
            return
        if name in PROJECTIONS:
            self._replace(base, self._base_forward(base))
            self._replace(module, self._stored_forward(module, base, PROJECTIONS[name]))
        elif name == LAST_OF_MLP:
            self._replace(base, self._base_forward(base, is_last=True))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward

        def put_back() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        self._undo.append(put_back)

    def _stored_forward(self, module: nn.Module, base: nn.Module, group: Group) -> Callable[..., torch.Tensor]:
        compute = module.forward

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            now = current_phase()
            if now is None or not now.stores(group):
                return compute(x, *args, **kwargs)
            if not now.is_recompute:
                output = compute(x, *args, **kwargs)
                now.record.put(group, (output,))
                return output
            with self._leaving_out(base):
                compute(x, *args, **kwargs)  # for what it saves
            return now.record.take(group)[0]

        return forward

    def _base_forward(self, base: nn.Module, *, is_last: bool = False) -> Callable[..., torch.Tensor]:
        compute = base.forward

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if id(base) in self._gradient_alone:
                return of_gradient_alone(base, compute, x)
            if id(base) in self._skipped or (is_last and self._leaves_out_last(current_phase())):
                return self._left_out(compute, x, *args, **kwargs)
            return compute(x, *args, **kwargs)

        return forward

    def _leaves_out_last(self, now: Phase | None) -> bool:
        return self.skips_last and now is not None and now.is_recompute

    @contextmanager
    def remaking_mlp(self, mlp: nn.Module) -> Iterator[None]:
        """Leaves out the last product of an MLP in a block, where that is allowed; what a tile's remake wants."""
        with self.remaking(getattr(mlp, LAST_OF_MLP, nn.Identity())) if self.skips_last else nullcontext():
            yield

    @contextmanager
    def remaking(self, projection: nn.Module) -> Iterator[None]:
        """Leaves out the frozen product of a projection in a block whose graph goes backward and whose result nobody
        reads."""
        base = base_that_can_be_left_out(projection)
        if base is None:
            yield
            return
        self._gradient_alone.add(id(base))
        try:
            yield
        finally:
            self._gradient_alone.discard(id(base))

    @contextmanager
    def _leaving_out(self, base: nn.Module) -> Iterator[None]:
        self._skipped.add(id(base))
        try:
            yield
        finally:
            self._skipped.discard(id(base))

    def _left_out(
        self, compute: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Saves what the product saves for backward, by a product of no rows; its result has the right shape only."""
        nothing = compute(x[..., :0, :], *args, **kwargs)
        output = nothing.new_empty((*x.shape[:-1], nothing.shape[-1]))
        return output if self.fill is None else output.fill_(self.fill)


def base_that_can_be_left_out(module: nn.Module) -> nn.Module | None:
    """Returns the frozen linear layer of a projection, or None where more than its shape is needed again.

    A trained weight saves its whole input; int8 saves statistics of its input; DoRA reads the base's result.
    """
    base = module
    if isinstance(module, LoraLayer):
        if module.lora_variant or module.merged:
            return None
        base = module.get_base_layer()
    is_known = type(base) is nn.Linear or type(base).__name__ == "Linear4bit"
    is_frozen = not any(parameter.requires_grad for parameter in base.parameters())
    return base if is_known and is_frozen else None
