"""Boundaries of a batch: the docstring's example, one buffer, what is derived goes with it, bad lengths are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.packed_metadata import MAX_SLOTS, build_packed_metadata


def test_the_docstrings_example() -> None:
    metadata = build_packed_metadata([(3, 2)], row_length=8)
    assert metadata.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert metadata.sequence_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert metadata.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert (metadata.lengths, metadata.pad_documents, metadata.max_seqlen) == ((3, 2, 3), {2}, 3)


def test_rows_do_not_share_documents() -> None:
    metadata = build_packed_metadata([(4,), (1, 2)], row_length=4)
    assert metadata.lengths == (4, 1, 2, 1)
    assert metadata.sequence_ids.tolist() == [[0, 0, 0, 0], [1, 2, 2, 3]]
    assert metadata.pad_documents == {3}


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 5))
def test_every_slot_belongs_to_one_document(rows: list[list[int]], room: int) -> None:
    length = max(map(sum, rows)) + room
    metadata = build_packed_metadata(rows, row_length=length)
    assert metadata.cu_seqlens.diff().tolist() == list(metadata.lengths)
    assert sum(metadata.lengths) == metadata.num_slots == len(rows) * length
    real = [metadata.lengths[i] for i in range(len(metadata.lengths)) if i not in metadata.pad_documents]
    assert real == [length for row in rows for length in row]
    starts = (metadata.position_ids.flatten() == 0).nonzero().flatten().tolist()
    assert starts == metadata.cu_seqlens[:-1].tolist()
    assert metadata.sequence_ids.flatten().bincount().tolist() == list(metadata.lengths)


def test_one_buffer_goes_to_the_device() -> None:
    metadata = build_packed_metadata([(3, 2), (5,)], row_length=8)
    assert {view.untyped_storage().data_ptr() for view in (metadata.position_ids, metadata.cu_seqlens)} == {
        metadata.sequence_ids.untyped_storage().data_ptr()
    }
    moved = metadata.to("meta")
    assert moved.buffer.device.type == "meta"
    assert moved.lengths == metadata.lengths


def test_what_is_derived_is_made_once_and_goes_with_the_batch() -> None:
    metadata = build_packed_metadata([(3, 2)], row_length=8)
    made = [metadata.derived("mask", lambda: torch.zeros(3)) for _ in range(3)]
    assert made[0] is made[1] is made[2]
    assert metadata.num_derived == 1
    assert metadata.to("cpu").num_derived == 0
    assert build_packed_metadata([(3, 2)], row_length=8).num_derived == 0


@pytest.mark.parametrize(
    ("rows", "length", "words"),
    [
        ([], 8, "at least one row"),
        ([(3, 0)], 8, "row 0: a document of 0 tokens"),
        ([(3,), (6, 3)], 8, "row 1: documents of 9 tokens in a row of 8"),
        ([(1,)] * 2, MAX_SLOTS, "training.rows_per_micro_batch or data.max_length"),
    ],
)
def test_bad_lengths_are_named(rows: list[tuple[int, ...]], length: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_packed_metadata(rows, row_length=length)


def test_rows_of_one_document_need_no_mask() -> None:
    assert build_packed_metadata([(8,), (8,)], row_length=8).has_one_document_a_row
    assert not build_packed_metadata([(5,), (8,)], row_length=8).has_one_document_a_row
    assert not build_packed_metadata([(5,), (4, 4)], row_length=8).has_one_document_a_row
