"""Attention's backward for a few heads at a time, where rows are long.

torch's kernel holds, beside the gradients, an fp32 sum of query gradients (4 bytes a number) and, where heads share key
and value, gradients of these for each query head (2 * 2 bytes). Heads do not touch each other, so one group of heads
after the other gives the same numbers with one group's share of that. In bytes a token beside the gradients:

    one call: 8 H E        G groups: (8 H + 6 H + 4 K) E / G, with copies of what is cut out and the group's gradients

The kernel runs one block of threads for each head and 128 tokens: a group is never so small that blocks would be few.

Legend: T slots, H query heads, K key and value heads, E width of a head, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MIN_SLOTS = 2**17
"""Least product of slots and query heads of a group: 1,024 blocks, about eight for each processor of the largest cards.
Reckoned, not measured."""


def groups_for(num_slots: int, query_heads: int, key_heads: int) -> int:
    """Returns into how many groups the heads go: a divisor of the key heads, 1 for short batches."""
    most = max(1, num_slots * query_heads // MIN_SLOTS)
    return max(count for count in range(1, key_heads + 1) if key_heads % count == 0 and count <= most)


def backward_in_groups(
    backward: Callable[..., Sequence[Tensor]],
    grad_THE: Tensor,
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
) -> list[Tensor]:
    """Returns the gradients of query, key and value.

    Args:
        backward: the kernel's, of these tensors; returns the three gradients.
    """
    query_heads, key_heads = q_THE.shape[1], k_TKE.shape[1]
    count = groups_for(len(q_THE), query_heads, key_heads)
    if count == 1:
        return list(backward(grad_THE, q_THE, k_TKE, v_TKE, out_THE, lse_HT))
    grads = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q_THE, k_TKE, v_TKE)]
    for group in range(count):
        query, key = (slice(group * n // count, (group + 1) * n // count) for n in (query_heads, key_heads))
        own = backward(
            grad_THE[:, query], q_THE[:, query], k_TKE[:, key], v_TKE[:, key], out_THE[:, query], lse_HT[query]
        )
        for index, heads in enumerate((query, key, key)):
            grads[index][:, heads] = own[index]
        del own  # else it would live while the next group is computed
    return grads
