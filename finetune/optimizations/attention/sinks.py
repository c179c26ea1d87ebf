"""Attention sinks, exactly, over kernels that know none.

A sink is a logit of each head that takes part in the softmax and adds nothing to the output. With out and
lse = log sum_j exp(s_ij) of a kernel without sinks:

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

The kernel's own backward, given out' and lse' in place of out and lse, then yields the gradients of query, key and
value, because it rebuilds the weights as exp(s - lse') and takes rowsum(dout' * out') for their correction. That of the
sink is d sink = -sum_i exp(sink - lse'_i) * rowsum(dout'_i * out'_i).

Legend: T tokens, H heads, E width of a head. Extra memory: one fp32 number a token and head.
"""

from __future__ import annotations

import torch


def add_sinks(out_THE: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out' (in the format of `out`) and lse' (fp32 or fp64, as `lse`)."""
    lse_with = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
    factor = torch.exp(lse_HT - lse_with).transpose(0, 1)[..., None]
    return (out_THE * factor).to(out_THE.dtype), lse_with


def sinks_gradient(
    grad_THE: torch.Tensor, out_THE: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Gradient of the sinks `[H]`, in their format, from out' and lse' (see the module's text)."""
    rowsum_HT = (grad_THE.to(lse_HT.dtype) * out_THE.to(lse_HT.dtype)).sum(-1).transpose(0, 1)
    share_HT = torch.exp(sinks_H.to(lse_HT.dtype)[:, None] - lse_HT)
    return -(share_HT * rowsum_HT).sum(-1).to(sinks_H.dtype)
