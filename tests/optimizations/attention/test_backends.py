"""Backends against the reference, on odd shapes: output and every gradient, windows, groups, caps, sinks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.attention import chunks as chunks_module
from finetune.optimizations.attention import flex, transformers_flash
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.chunks import chunks
from finetune.optimizations.attention.probe import probe_backend
from finetune.optimizations.attention.rebuild import RebuildCounter, RebuildEachLayer
from finetune.optimizations.attention.reference import attention_reference
from finetune.optimizations.attention.types import Attend, AttentionLayer, AttentionOptions, Boundaries
from finetune.optimizations.support import Hardware

CPU_BACKENDS = ("sdpa", "segments")
LAYERS = [
    AttentionLayer(heads, groups, 16, window, softcap, has_sinks)
    for (heads, groups), window, softcap, has_sinks in itertools.product(
        ((4, 4), (4, 2), (6, 1)), (None, 1, 7, 400), (None, 20.0), (False, True)
    )
]


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.label)
def test_as_accurate_as_plain_torch(name: str, layer: AttentionLayer) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        result = probe_backend(BACKENDS[name], layer, dtype=dtype, device=torch.device("cpu"))
        assert not result.faults, (dtype, result.faults)


@given(
    rows=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=3),
    room=st.integers(0, 9),
    window=st.none() | st.integers(1, 12),
    name=st.sampled_from(CPU_BACKENDS),
    is_rebuilt=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_documents(rows: list[list[int]], room: int, window: int | None, name: str, is_rebuilt: bool) -> None:
    """Random rows with pad tails, from the collator's boundaries and from ones rebuilt from positions."""
    metadata = build_packed_metadata(rows, row_length=max(map(sum, rows)) + room)
    shape = (metadata.num_rows, metadata.row_length)
    generator = torch.Generator().manual_seed(sum(map(sum, rows)))
    q = torch.randn(*shape, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(*shape, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    options = AttentionOptions(0.3, window)
    rebuild = RebuildEachLayer(metadata.position_ids, RebuildCounter())
    boundaries = rebuild.boundaries() if is_rebuilt else metadata
    found = BACKENDS[name].attend(q, k, v, boundaries=boundaries, options=options)
    true = attention_reference(q, k, v, boundaries=metadata, options=options)
    is_real = ~torch.isin(metadata.sequence_ids, torch.tensor(sorted(metadata.pad_documents), dtype=torch.int32))
    assert torch.allclose(found[is_real], true[is_real], atol=1e-12)


def test_segments_never_touch_another_document() -> None:
    """NaN in one document leaves the others finite: nothing of it takes part, not even times zero."""
    metadata = build_packed_metadata([(5, 6, 4)], row_length=16)
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    for tensor in (q, k, v):
        tensor[:, 5:11] = float("nan")
    out = BACKENDS["segments"].attend(q, k, v, boundaries=metadata, options=AttentionOptions(0.3))
    assert out[:, :5].isfinite().all() and out[:, 11:].isfinite().all()


def deaf(change: dict[str, object]) -> Attend:
    """The reference, deaf to one thing that a layer asks."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions):
        return attention_reference(q, k, v, boundaries=boundaries, options=dataclasses.replace(options, **change))

    return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (AttentionLayer(64, 8, 64, 128, None, True), {"window": None}),
        (AttentionLayer(64, 8, 64, 128, None, True), {"window": 39}),
        (AttentionLayer(8, 2, 64, 4096), {"window": None}),
        (AttentionLayer(8, 2, 64, None, 50.0), {"softcap": None}),
        (AttentionLayer(8, 2, 64, None, 30.0), {"softcap": 40.0}),
        (AttentionLayer(8, 2, 64, None, None, True), {"scale": 0.13}),
    ],
    ids=["window", "window-by-one", "long-window", "softcap", "other-softcap", "scale"],
)
def test_the_check_hears_what_a_backend_does_not(
    layer: AttentionLayer, change: dict[str, object], dtype: torch.dtype
) -> None:
    wrong = dataclasses.replace(BACKENDS["sdpa"], attend=deaf(change))
    assert probe_backend(wrong, layer, dtype=dtype, device=torch.device("cpu")).faults
    assert not probe_backend(BACKENDS["sdpa"], layer, dtype=dtype, device=torch.device("cpu")).faults


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_several_rows_with_sinks(name: str) -> None:
    metadata = build_packed_metadata([(5, 6), (9,), (1, 2, 7)], row_length=11)
    tensors = [torch.randn(3, 11, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = AttentionOptions(0.3, 4, None, sinks)
    found = BACKENDS[name].attend(*tensors, boundaries=metadata, options=options)
    true = attention_reference(*tensors, boundaries=metadata, options=options)
    assert torch.allclose(found, true, atol=1e-12)
    weights = torch.randn_like(true)
    pairs = zip(
        torch.autograd.grad((found * weights).sum(), [*tensors, sinks]),
        torch.autograd.grad((true * weights).sum(), [*tensors, sinks]),
        strict=True,
    )
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in pairs)


def test_derived_masks_serve_all_layers() -> None:
    metadata = build_packed_metadata([(5, 6)], row_length=16)
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    for _ in range(4):
        for window in (None, 3):
            BACKENDS["sdpa"].attend(q, k, v, boundaries=metadata, options=AttentionOptions(0.3, window))
    assert metadata.num_derived == 2


def test_a_batch_is_cut_where_offsets_would_overflow() -> None:
    metadata = build_packed_metadata([(300, 200, 500)], row_length=1000)
    limit = 128 * 3 + 700
    parts = chunks(metadata, numbers_a_slot=(2**31 - 1) // limit)
    assert [(part.start, part.end, part.max_seqlen) for part in parts] == [(0, 500, 300), (500, 1000, 500)]
    assert [part.cu_seqlens.tolist() for part in parts] == [[0, 300, 500], [0, 500]]
    assert len(chunks(metadata, numbers_a_slot=4096)) == 1
    with pytest.raises(ValueError, match="a document of 500 tokens"):
        chunks(metadata, numbers_a_slot=(2**31 - 1) // 600)


ROWS = ((5, 6), (9,), (1, 2, 7), (11,), (4, 4))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_flex_takes_rows_in_groups_that_32_bits_number(
    rows_at_once: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its kernel uncompiled, which the CPU has; the groups and their schedules are the same."""
    calls: list[int] = []

    def plain(q: torch.Tensor, *args: Any, **more: Any) -> Any:
        calls.append(len(q))
        return torch.nn.attention.flex_attention.flex_attention(q, *args, **more)

    monkeypatch.setattr(flex, "_compiled", lambda: plain)
    monkeypatch.setattr(flex, "create_block_mask", partial(uncompiled, flex.create_block_mask))
    monkeypatch.setattr(flex, "most_slots", lambda numbers_a_slot: rows_at_once * 16 + 3)
    metadata = build_packed_metadata(ROWS, row_length=16)
    q, k, v = (torch.randn(5, 16, heads, 16) for heads in (4, 2, 2))
    options = AttentionOptions(0.3, window, None, torch.randn(4))
    for _ in range(2):  # the second layer finds the schedules of the first
        found = BACKENDS["flex"].attend(q, k, v, boundaries=metadata, options=options)
        true = attention_reference(q, k, v, boundaries=metadata, options=options)
        assert torch.allclose(found, true, atol=1e-5)
    num_calls = -(-5 // rows_at_once)
    assert len(calls) == 2 * num_calls and max(calls) == rows_at_once
    assert metadata.num_derived == num_calls


def uncompiled(make: Any, *args: Any, _compile: bool, **more: Any) -> Any:
    return make(*args, _compile=False, **more)


def test_flex_refuses_a_row_that_32_bits_do_not_number() -> None:
    assert flex.rows_a_call(row_length=2**20 - 128, numbers_a_slot=2**10) == 2
    assert flex.rows_a_call(row_length=2**21 - 129, numbers_a_slot=2**10) == 1
    with pytest.raises(ValueError, match=r"a row of 2097152 slots is beyond the 2097023 .* lower data\.max_length"):
        flex.rows_a_call(row_length=2**21, numbers_a_slot=2**10)


@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_flash_of_transformers_is_called_in_parts_that_32_bits_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, *, query_length: int, **more: Any):
        assert q.shape[:2] == (1, query_length) and more["max_length_q"] <= query_length
        calls.append(query_length)
        metadata = build_packed_metadata([more["cu_seq_lens_q"].diff().tolist()], row_length=query_length)
        options = AttentionOptions(more["softmax_scale"], more["sliding_window"], more["softcap"])
        return attention_reference(q, k, v, boundaries=metadata, options=options)

    monkeypatch.setattr(transformers_flash, "_flash_attention_forward", stand_in)
    metadata = build_packed_metadata(ROWS, row_length=16)
    q, k, v = (torch.randn(5, 16, heads, 16) for heads in (4, 2, 2))
    options = AttentionOptions(0.3, 4)
    true = attention_reference(q, k, v, boundaries=metadata, options=options)
    for limit, num_calls in ((2**31 - 1, 1), (4 * 16 * (128 * 4 + 40), 3)):
        monkeypatch.setattr(chunks_module, "_MAX_OFFSET", limit)
        calls.clear()
        assert torch.allclose(BACKENDS[name].attend(q, k, v, boundaries=metadata, options=options), true, atol=1e-6)
        assert sum(calls) == 5 * 16 and len(calls) >= num_calls
        assert (len(calls) > 1) == (num_calls > 1)


H200 = Hardware("cuda", (9, 0), "H200")
LIMITS = [
    ("varlen", Hardware("cpu"), torch.bfloat16, AttentionLayer(4, 2, 64), "needs a CUDA device"),
    ("varlen", Hardware("cuda", (7, 5)), torch.float16, AttentionLayer(4, 2, 64), r"needs compute capability 8\.0"),
    ("varlen", H200, torch.float32, AttentionLayer(4, 2, 64), "not in float32"),
    ("varlen", H200, torch.bfloat16, AttentionLayer(4, 2, 60), "heads are 60 wide"),
    ("varlen", H200, torch.bfloat16, AttentionLayer(4, 2, 512), "heads are 512 wide"),
    ("varlen", H200, torch.bfloat16, AttentionLayer(4, 2, 64, softcap=30.0), "softcap"),
    ("flex", Hardware("cpu"), torch.float32, AttentionLayer(4, 2, 64), "no backward"),
    ("flex", H200, torch.bfloat16, AttentionLayer(4, 2, 80), "powers of two"),
    ("flash4", Hardware("cuda", (8, 9)), torch.bfloat16, AttentionLayer(4, 2, 64), "no backward"),
    ("flash2", H200, torch.bfloat16, AttentionLayer(4, 2, 64), "flash-attn is not installed"),
]


@pytest.mark.parametrize(("name", "hardware", "dtype", "layer", "reason"), LIMITS)
def test_limits_are_stated_before_the_run(
    name: str, hardware: Hardware, dtype: torch.dtype, layer: AttentionLayer, reason: str
) -> None:
    support = BACKENDS[name].supported(hardware, dtype, [layer])
    assert not support.ok
    assert re.search(reason, support.reason), support.reason


def test_names_mean_nothing_else_to_transformers() -> None:
    for backend in BACKENDS.values():
        assert not any(word in backend.registered for word in ("flash", "sdpa", "flex_attention", "/"))
