"""The LM head and its loss in one: cross entropy summed over the supervised tokens, never with all logits.

    loss = - sum_n w_n / D log softmax(cap(scale * (h_n W^T + b)))[label_n]        cap(z) = c tanh(z / c), or z

The loss is one number, so the gradient of each hidden state is known in forward up to one factor: it is computed there,
a part of the tokens at a time, while their logits are at hand. That makes two products instead of three (logits,
gradient; no logits again), and of the row there is one tensor in the format of the hidden states beside these, which
backward scales in place. For frozen heads only.

Legend: R rows, L tokens of a row, H hidden width, V vocabulary, P tokens of a part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from finetune.optimizations.support import Support

IGNORED = -100
LOGITS = 2**26
"""Logits of a part: 256 MiB in fp32, and as much again in 16 bits for the product and its gradient."""


def can_fuse(head: nn.Module) -> Support:
    """Says whether `summed_loss` can take this head."""
    if type(head) is not nn.Linear:
        return Support(False, f"the LM head is a {type(head).__name__}, not a plain linear layer")
    if any(parameter.requires_grad for parameter in head.parameters()):
        return Support(False, "the LM head is trained: its own gradient needs what this loss does not keep")
    return Support(True)


def summed_loss(
    hidden: Tensor,
    labels: Tensor,
    head: nn.Module,
    *,
    divisor: Tensor | float = 1.0,
    loss_weights: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Returns the summed cross entropy of the labels, each predicted from the token before it, over a divisor (fp32,
    one number).

    Give the step's divisor here rather than dividing the result: the gradient, which is rounded to the format of the
    hidden states in forward, is then rounded once and not twice. In fp16 it is divided in backward, where the loss is
    scaled up. The number of supervised tokens is read from the device, once a call.

    Args:
        hidden: `[R, L, H]`, after the last norm.
        labels: int64 `[R, L]`; -100 where nothing is learned.
        head: allowed by `can_fuse`.
        loss_weights: `[R, L]`, a factor for each label's loss; None: 1.
        logit_scale: factor of the logits.
        softcap: the logits' cap, after the factor.

    Raises:
        ValueError: a head that `can_fuse` does not allow.
    """
    support = can_fuse(head)
    if not support.ok:
        raise ValueError(support.reason)
    over = torch.as_tensor(divisor, device=hidden.device)
    # Inside of the function gradients are off, and the inputs ask for them whether they were on or not.
    has_gradient = torch.is_grad_enabled() and hidden.requires_grad
    return _SummedLoss.apply(
        has_gradient, hidden, head.weight, head.bias, labels, over, loss_weights, logit_scale, softcap
    )


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        has_gradient: bool,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor,
        loss_weights: Tensor | None,
        logit_scale: float,
        softcap: float | None,
    ) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        states = hidden.reshape(-1, hidden.shape[-1])
        targets = _next(labels, IGNORED)
        factors = torch.ones_like(targets, dtype=torch.float32) if loss_weights is None else _next(loss_weights, 0)
        ctx.divisor = divisor if dtype is torch.float16 else None
        if ctx.divisor is None:
            factors = factors / divisor
        places = (targets != IGNORED).nonzero().squeeze(1)
        # Where nothing is learned the gradient is 0.
        ctx.grad = torch.zeros_like(states) if has_gradient else None
        ctx.shape = hidden.shape
        total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        for own in places.split(max(1, LOGITS // weight.shape[0])):
            logits = torch.nn.functional.linear(states[own].to(dtype), weight, bias).to(total.dtype)
            factor = factors[own].to(total.dtype)
            total -= _log_probs(logits, targets[own], factor, logit_scale, softcap, has_gradient=has_gradient)
            if ctx.grad is not None:
                ctx.grad[own] = (logits.to(dtype) @ weight).to(hidden.dtype)
            del logits  # else they would live beside the next part's
        return total if ctx.divisor is None else total / divisor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        if ctx.grad is None:
            raise RuntimeError("a second backward through the summed loss: the first took its only gradient along")
        grad, ctx.grad = ctx.grad, None
        factor = grad_output if ctx.divisor is None else grad_output / ctx.divisor
        # In parts and in fp32: a 16-bit tensor would round the factor to its own format first.
        for part in grad.split(max(1, LOGITS // max(1, grad.shape[-1]))):
            part.copy_(part.to(factor.dtype) * factor)
        return None, grad.view(ctx.shape), None, None, None, None, None, None, None


def _log_probs(
    logits: Tensor,
    targets: Tensor,
    factor: Tensor,
    logit_scale: float,
    softcap: float | None,
    *,
    has_gradient: bool,
) -> Tensor:
    """Returns the summed log-probabilities of the targets `[P]`, each times its factor.

    Afterwards `logits` `[P, V]` hold the gradient of the negative of that with respect to what they held before.
    """
    logits.mul_(logit_scale)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = (1 - logits.square()).mul_(logit_scale) if has_gradient else None
        logits.mul_(softcap)
    logits.sub_(logits.amax(-1, keepdim=True))
    own = logits.gather(-1, targets[:, None])
    sums = logits.exp_().sum(-1, keepdim=True)
    found = (own - sums.log()).squeeze(1)
    if has_gradient:
        logits.div_(sums)
        logits.scatter_add_(-1, targets[:, None], torch.full_like(own, -1.0))
        logits.mul_(factor[:, None])
        logits.mul_(logit_scale if slope is None else slope)
    return (found * factor).sum()


def _next(values: Tensor, fill: int) -> Tensor:
    """Returns for each token what its successor in the row has, all rows in one line; `fill` for the last of a row."""
    following = torch.full_like(values, fill)
    following[:, :-1] = values[:, 1:]
    return following.flatten()
