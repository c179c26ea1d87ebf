"""Attention's backward in groups of heads gives the whole call's numbers, with one group's work at a time."""

from __future__ import annotations

import pytest
import torch
from mlps import LiveBytes

from finetune.optimizations.attention import head_groups
from finetune.optimizations.attention.head_groups import MIN_SLOTS, backward_in_groups, groups_for

T, H, K, E = 64, 12, 6, 8


def kernel(grad, q, k, v, out, lse) -> tuple[torch.Tensor, ...]:
    """Causal attention's backward from output and log-sum-exp, with the buffers that torch's kernel has."""
    shared = q.shape[1] // k.shape[1]
    sums, of_keys, of_values = (torch.zeros(q.shape, dtype=torch.float32) for _ in range(3))
    rowsum = (grad * out.contiguous()).sum(-1)
    for head in range(q.shape[1]):
        query, key, value = q[:, head], k[:, head // shared], v[:, head // shared]
        weights = torch.exp(query @ key.T - lse[head][:, None]).tril()
        of_scores = weights * (grad[:, head] @ value.T - rowsum[:, head, None])
        sums[:, head], of_keys[:, head] = of_scores @ key, of_scores.T @ query
        of_values[:, head] = weights.T @ grad[:, head]
    return sums.to(q.dtype), *(one.unflatten(1, (-1, shared)).sum(2).to(q.dtype) for one in (of_keys, of_values))


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    grad, q, k, v = (torch.randn(T, heads, E, generator=generator) for heads in (H, H, K, K))
    scores = torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(H // K, 1))
    scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
    out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v.repeat_interleave(H // K, 1))
    return grad, q, k, v, out, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_every_number_is_that_of_one_call(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kernel(*inputs())
    monkeypatch.setattr(head_groups, "MIN_SLOTS", T * H // groups)
    calls: list[int] = []
    found = backward_in_groups(lambda *tensors: calls.append(tensors[1].shape[1]) or kernel(*tensors), *inputs())
    assert calls == [H // groups] * groups
    assert all(torch.equal(one, other) and one.is_contiguous() for one, other in zip(found, expected, strict=True))


def test_gradients_are_those_of_autograd() -> None:
    """The stand-in above is right."""
    grad, q, k, v, *_ = inputs()
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(H // K, 1))
    scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
    out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v.repeat_interleave(H // K, 1))
    for one, other in zip(torch.autograd.grad(out, (q, k, v), grad), kernel(*inputs()), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_work_is_that_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is beside the gradients; a stand-in that has the kernel's buffers and no scores."""

    def buffers(grad, q, k, v, out, lse) -> tuple[torch.Tensor, ...]:
        work = [torch.zeros(q.shape) for _ in range(3)]
        return work[0].clone(), torch.zeros(k.shape), torch.zeros(v.shape)

    peaks = {}
    for groups in (1, 6):
        monkeypatch.setattr(head_groups, "MIN_SLOTS", T * H // groups)
        tensors = inputs()
        with LiveBytes() as memory:
            found = backward_in_groups(buffers, *tensors)
        peaks[groups] = memory.peak - sum(4 * one.numel() for one in found)
    assert peaks[1] == 3 * 4 * T * H * E
    assert peaks[6] == (3 + 2) * 4 * T * H * E // 6  # its own gradients beside, before they are copied to their place


@pytest.mark.parametrize(
    ("num_slots", "query_heads", "key_heads", "groups"),
    [(1, 32, 8, 1), (4096, 32, 8, 1), (8192, 32, 8, 2), (32768, 32, 8, 8), (2**20, 32, 8, 8), (65536, 40, 10, 10),
     (16384, 40, 10, 5), (2**20, 8, 1, 1), (0, 8, 2, 1)],
)  # fmt: skip
def test_a_group_has_enough_to_do(num_slots: int, query_heads: int, key_heads: int, groups: int) -> None:
    assert groups_for(num_slots, query_heads, key_heads) == groups
    assert groups == 1 or num_slots * query_heads // groups >= MIN_SLOTS
