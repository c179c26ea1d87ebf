"""flash-attn-4 as an operation, on the CPU: its kernels are stood in for by plain torch, all around them is real."""

from __future__ import annotations

import sys
import types
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from finetune.data.packed_metadata import PackedMetadata, build_packed_metadata
from finetune.optimizations.attention import flash4, operation
from finetune.optimizations.attention.flash4 import attend_flash4
from finetune.optimizations.attention.reference import attention_reference, visible_keys
from finetune.optimizations.attention.types import AttentionOptions

ROWS, ROW_LENGTH = ((9, 4, 1), (3, 8)), 16
NAME = "finetune.flash_attn_4_varlen"


def scores_of(q, k, *, cu_seqlens_q, softmax_scale, window_size_left, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[H, T, T]`, and which of them count."""
    ids = torch.searchsorted(cu_seqlens_q, torch.arange(len(q), dtype=torch.int32), right=True)
    visible = visible_keys(ids[None], window=None if window_size_left is None else window_size_left + 1)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("qhe,khe->hqk", q, keys) * softmax_scale, visible


def stand_in(q, k, v, *, learnable_sink, score_mod=None, **more: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward kernel: output and log-sum-exp, in plain torch."""
    scores, visible = scores_of(q, k, **more)
    scores = (scores if score_mod is None else score_mod(scores)).masked_fill(~visible, float("-inf"))
    if learnable_sink is not None:
        scores = torch.cat((scores, learnable_sink[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)].to(v.dtype)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.einsum("hqk,khe->qhe", weights, values).contiguous()
    return out, torch.logsumexp(scores, dim=-1).float(), None


def stand_in_backward(q, k, v, out, grad, lse, *, learnable_sink, score_mod=None, score_mod_bwd=None, **more: Any):
    """The backward kernel, from output and log-sum-exp: a kernel is below autograd and cannot ask it."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    raw, visible = scores_of(q, k, **more)
    capped = raw if score_mod is None else score_mod(raw)
    weights = torch.exp(capped - lse[..., None]).masked_fill(~visible, 0.0).to(q.dtype)
    rowsum = (grad * out).sum(-1).T
    of_scores = weights * (torch.einsum("qhe,khe->hqk", grad, values) - rowsum[..., None])
    of_scores = of_scores if score_mod_bwd is None else score_mod_bwd(of_scores, raw)
    of_scores = of_scores * more["softmax_scale"]
    dq = torch.einsum("hqk,khe->qhe", of_scores, keys).contiguous()
    dk = torch.einsum("hqk,qhe->khe", of_scores, q).unflatten(1, (-1, groups)).sum(2)
    dv = torch.einsum("hqk,qhe->khe", weights, grad).unflatten(1, (-1, groups)).sum(2)
    if learnable_sink is None:
        return dq, dk, dv
    return dq, dk, dv, -(torch.exp(learnable_sink[:, None] - lse) * rowsum).sum(-1).to(learnable_sink.dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Puts the stand-ins in place; returns the softcaps that functions were made for."""
    values: list[float] = []

    def make(softcap: float) -> Any:
        values.append(softcap)
        return lambda scores: softcap * torch.tanh(scores / softcap)

    def make_backward(softcap: float) -> Any:
        values.append(softcap)
        return lambda grad, scores: grad * (1 - torch.tanh(scores / softcap).square())

    utils = types.SimpleNamespace(create_softcap_scoremod=make, create_softcap_scoremod_bwd=make_backward)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(utils=utils))
    monkeypatch.setattr(flash4, "_kernels", lambda: (stand_in, stand_in_backward))
    flash4._capped.cache_clear()
    yield values
    flash4._capped.cache_clear()


def make_tensors(*, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor, PackedMetadata]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(ROWS), ROW_LENGTH)
    tensors = [torch.randn(*shape, heads, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator)
    for tensor in (*tensors, sinks):
        tensor.requires_grad_()
    return tensors, sinks, build_packed_metadata(ROWS, row_length=ROW_LENGTH)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (3, 2.0)])
def test_what_is_handed_over_is_what_the_layer_asks(
    made: list[float], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    """Output and every gradient, over two rows, equal those of the reference."""
    tensors, sinks, metadata = make_tensors()
    options = AttentionOptions(0.4, window, softcap, sinks if has_sinks else None)
    found = attend_flash4(*tensors, boundaries=metadata, options=options)
    true = attention_reference(*tensors, boundaries=metadata, options=options)
    assert torch.allclose(found, true, atol=1e-6)
    leaves = [*tensors, sinks] if has_sinks else tensors
    weights = torch.randn_like(true)
    pairs = zip(torch.autograd.grad((found * weights).sum(), leaves),
                torch.autograd.grad((true * weights).sum(), leaves), strict=True)  # fmt: skip
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def test_without_gradients_nothing_is_kept(made: list[float]) -> None:
    tensors, _, metadata = make_tensors()
    with torch.no_grad():
        found = attend_flash4(*tensors, boundaries=metadata, options=AttentionOptions(0.4))
    assert not found.requires_grad
    assert torch.allclose(found, attention_reference(*tensors, boundaries=metadata, options=AttentionOptions(0.4)))


def test_the_functions_of_a_cap_are_made_once(made: list[float]) -> None:
    """The package would hash, and where the hash is new compile, a function made at each call."""
    tensors, _, metadata = make_tensors()
    for softcap in (2.0, 2.0, 5.0, 2.0):
        attend_flash4(*tensors, boundaries=metadata, options=AttentionOptions(0.4, None, softcap)).sum().backward()
    assert sorted(made) == [2.0, 2.0, 5.0, 5.0]  # forward and backward of each value


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "recomputed"])
def test_selective_checkpointing_sees_the_operation(made: list[float], is_kept: bool) -> None:
    """An output that the policy keeps is not computed again; gradients are the same either way."""
    tensors, sinks, metadata = make_tensors()
    attend = partial(attend_flash4, boundaries=metadata, options=AttentionOptions(0.4, None, None, sinks))
    true = torch.autograd.grad(attend(*tensors).square().sum(), [*tensors, sinks])

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        wanted = is_kept and operation is torch.ops.finetune.flash_attn_4_varlen.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    with Count() as count:
        out = checkpoint(
            lambda q, k, v: attend(q * 1.0, k, v), *tensors,
            use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy),
        )  # fmt: skip
        found = torch.autograd.grad(out.square().sum(), [*tensors, sinks])
    assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))
    assert count.calls[f"{NAME}.default"] == (1 if is_kept else 2)
    assert count.calls[f"{NAME}_backward.default"] == 1


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_the_operation_is_registered_soundly(made: list[float], has_sinks: bool) -> None:
    tensors, sinks, metadata = make_tensors(dtype=torch.float32)
    q, k, v = (tensor.detach().flatten(0, 1).requires_grad_() for tensor in tensors)
    library.opcheck(
        torch.ops.finetune.flash_attn_4_varlen.default,
        (q, k, v, sinks if has_sinks else None, metadata.cu_seqlens, metadata.max_seqlen, 0.4, 3, None),
    )


def test_fake_tensors_have_the_shapes_of_the_kernels(made: list[float]) -> None:
    tensors, sinks, metadata = make_tensors(dtype=torch.bfloat16)
    q, k, v = (tensor.detach().flatten(0, 1) for tensor in tensors)
    arguments = (q, k, v, sinks.detach(), metadata.cu_seqlens, metadata.max_seqlen, 0.4, None, None)
    real = torch.ops.finetune.flash_attn_4_varlen(*arguments)
    fake = operation._fake_forward(*arguments)
    assert [(one.shape, one.dtype) for one in real] == [(one.shape, one.dtype) for one in fake]
