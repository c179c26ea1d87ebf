"""Batches: positions restart, first labels and padding are not learned, the pad tail is a document of its own."""

from __future__ import annotations

import numpy as np
import torch

from finetune.data.collate import RowCollator
from finetune.data.rows import RowTokens
from finetune.data.types import IGNORE_INDEX


def row(number: int, *lengths: int) -> RowTokens:
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    return RowTokens(row=number, input_ids=tokens, labels=tokens.copy(), lengths=np.array(lengths, dtype=np.int64))


def test_the_docstrings_example() -> None:
    """P31: the first label of each document of a row is ignored, so none is learned from the document before it."""
    batch = RowCollator(row_length=8, pad_token_id=0)([row(5, 3, 2)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["packed_metadata"].position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    x = IGNORE_INDEX
    assert batch["labels"].tolist() == [[x, 2, 3, x, 5, x, x, x]]
    assert (batch["num_real_tokens"], batch["num_supervised_tokens"], batch["rows"]) == (5, 3, [5])


def test_a_full_row_has_no_tail() -> None:
    batch = RowCollator(row_length=5, pad_token_id=0)([row(0, 2, 3)])
    assert batch["packed_metadata"].position_ids.tolist() == [[0, 1, 0, 1, 2]]


def test_unpacked_rows_are_padded_to_the_longest_of_the_batch() -> None:
    batch = RowCollator(row_length=None, pad_token_id=9)([row(0, 3), row(1, 10)])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"][0, 3:].tolist() == [9] * 13
    assert (batch["labels"][0, 3:] == IGNORE_INDEX).all()


def test_a_pad_token_that_is_also_a_real_token_keeps_its_label() -> None:
    """With the pad equal to EOS, masking by id would leave the end of turn unlearned."""
    batch = RowCollator(row_length=8, pad_token_id=3)([row(0, 3)])
    assert batch["labels"][0, 2] == 3
    assert (batch["labels"][0, 3:] == IGNORE_INDEX).all()


def test_types_are_what_the_model_takes() -> None:
    batch = RowCollator(row_length=8, pad_token_id=0)([row(0, 3)])
    assert all(batch[key].dtype == torch.int64 for key in ("input_ids", "labels"))
