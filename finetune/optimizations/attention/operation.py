"""A flash kernel as an operation of torch's, with its gradient: what `flash4` and `varlen` have in common.

Selective checkpointing and fake tensors see it, and in a recompute it can be told the result that is stored.

Legend: T slots of the batch, H query heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from finetune.optimizations.activations.phase import remembered
from finetune.optimizations.activations.types import Group

NAMESPACE = "finetune"
_FRAGMENT = library.Library(NAMESPACE, "FRAGMENT")
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_TENSORS = 5
"""Query, key, value, sinks and offsets come before the numbers."""


def register_operation(
    name: str,
    numbers: str,
    *,
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    backward: Callable[..., list[torch.Tensor]],
) -> Any:
    """Registers `finetune::NAME` and `finetune::NAME_backward`; returns the first, which gives attention `[T, H, E]`
    and its log-sum-exp `[H, T]` (fp32).

    Args:
        numbers: what follows query, key, value and sinks in the schema: the offsets, then numbers.
        forward: takes these in that order.
        backward: takes the gradient, query, key, value, sinks, output, log-sum-exp, and then `numbers`; returns the
            gradients of query, key, value, and of the sinks where there are some.
    """
    _FRAGMENT.define(f"{name}({_INPUTS}, {numbers}) -> (Tensor, Tensor)", tags=_TAGS)
    schema = f"(Tensor grad, {_INPUTS}, Tensor out, Tensor lse, {numbers}) -> Tensor[]"
    _FRAGMENT.define(f"{name}_backward{schema}", tags=_TAGS)
    packets = getattr(torch.ops, NAMESPACE)
    # Overloads by themselves: a packet of all overloads is looked through at every call.
    operation, gradient = getattr(packets, name).default, getattr(packets, f"{name}_backward").default
    _FRAGMENT.impl(name, forward, "CompositeExplicitAutograd")
    _FRAGMENT.impl(name, _differentiable(operation, gradient).apply, "Autograd")
    _FRAGMENT.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    library.register_fake(f"{NAMESPACE}::{name}", _fake_forward, lib=_FRAGMENT)
    library.register_fake(f"{NAMESPACE}::{name}_backward", _fake_backward, lib=_FRAGMENT)
    return operation


def _differentiable(operation: Any, gradient: Any) -> type[torch.autograd.Function]:
    class Differentiable(torch.autograd.Function):
        """The forward operation with its gradient."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = remembered(Group.ATTENTION, lambda: operation(*inputs))
            q, k, v, sinks, cu_seqlens, *ctx.numbers = inputs
            ctx.save_for_backward(q, k, v, sinks, out, lse, cu_seqlens)
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            none = (None,) * (_TENSORS - 4 + len(ctx.numbers))
            if grads[0] is None:
                return (None, None, None, None, *none)
            dq, dk, dv, *dsinks = gradient(grads[0], *ctx.saved_tensors, *ctx.numbers)
            return (dq, dk, dv, dsinks[0] if dsinks else None, *none)

    return Differentiable


def _fake_forward(q_THE: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_THE), q_THE.new_empty((q_THE.shape[1], q_THE.shape[0]), dtype=torch.float32)


def _fake_backward(
    grad_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *_: Any,
) -> list[torch.Tensor]:
    tensors = (q_THE, k_TKE, v_TKE) if sinks_H is None else (q_THE, k_TKE, v_TKE, sinks_H)
    return [torch.empty_like(tensor) for tensor in tensors]
