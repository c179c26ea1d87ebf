"""Packing: no token lost, none twice, no row too long, no more rows than best-fit decreasing, fast."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.pack import one_sample_a_row, pack

cases = st.integers(1, 60).flatmap(
    lambda limit: st.tuples(st.just(limit), st.lists(st.integers(1, limit), min_size=1, max_size=80))
)


def best_fit_decreasing(lengths: list[int], max_length: int) -> int:
    """The textbook rule, one sample at a time; returns the number of rows."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(space, row) for row, space in enumerate(free) if space >= length]
        if fitting:
            free[min(fitting)[1]] -= length
        else:
            free.append(max_length - length)
    return len(free)


@settings(max_examples=300, deadline=None)
@given(cases, st.integers(0, 2**32 - 1))
def test_every_sample_is_in_one_row_that_it_fits(case: tuple[int, list[int]], seed: int) -> None:
    max_length, lengths = case
    plan = pack(np.array(lengths), max_length=max_length, seed=seed)
    assert sorted(plan.sample_indices.tolist()) == list(range(len(lengths)))
    for row in plan:
        assert 0 < row.num_tokens <= max_length
        assert row.num_tokens == sum(lengths[index] for index in row.sample_indices)
    assert plan.num_tokens == sum(lengths)
    assert plan.num_tokens + plan.num_pad_tokens == len(plan) * max_length


@settings(max_examples=300, deadline=None)
@given(cases)
def test_needs_as_many_rows_as_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    max_length, lengths = case
    assert len(pack(np.array(lengths), max_length=max_length, seed=0)) == best_fit_decreasing(lengths, max_length)


def test_a_million_short_documents_pack_full_in_under_four_seconds() -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(np.exp(generator.normal(np.log(300), 0.8, 1_000_000)).astype(np.int64), 1, 8192)
    started = time.perf_counter()
    plan = pack(lengths, max_length=8192, seed=1)
    assert time.perf_counter() - started < 4.0
    assert plan.fill > 0.999


def test_the_seed_alone_decides_the_order() -> None:
    lengths = np.random.default_rng(3).integers(1, 50, 500)
    first, again, other = (pack(lengths, max_length=64, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.sample_indices, again.sample_indices)
    assert not np.array_equal(first.sample_indices, other.sample_indices)
    assert len(first) == len(other)


def test_a_row_of_exactly_the_limit_is_full() -> None:
    plan = pack(np.array([8, 8, 3, 5]), max_length=8, seed=0)
    assert (len(plan), plan.fill, plan.num_pad_tokens) == (3, 1.0, 0)


@pytest.mark.parametrize("lengths", [[0], [9], [4, 9]], ids=["empty sample", "too long", "one too long"])
def test_a_length_that_does_not_fit_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        pack(np.array(lengths), max_length=8, seed=0)


def test_unpacked_keeps_the_order() -> None:
    plan = one_sample_a_row(np.array([3, 1, 2]), max_length=4)
    assert [row.sample_indices for row in plan] == [(0,), (1,), (2,)]
    assert plan.row_tokens.tolist() == [3, 1, 2]


def test_no_samples_make_no_rows() -> None:
    plan = pack(np.array([], dtype=np.int64), max_length=8, seed=0)
    assert (len(plan), plan.fill, plan.num_tokens) == (0, 0.0, 0)


def test_the_most_documents_of_a_batch_count_pad_tails() -> None:
    plan = pack(np.array([5, 5, 3, 3, 3, 9]), max_length=10, seed=0)
    assert sorted(len(row.sample_indices) for row in plan) == [1, 2, 3]  # 9; 5 and 5; three of 3
    assert [plan.most_documents(rows) for rows in (1, 2, 3, 8)] == [4, 6, 8, 8]
