"""Large data: several processes, disk instead of memory, and no hang when a process dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.build import build_dataset, hold_out
from finetune.data.pack import pack
from finetune.data.pool import WORKER_BYTES, choose_workers, free_memory_bytes, map_ordered
from finetune.data.split import repeated
from finetune.data.store import SampleStore, StoreBuilder
from finetune.data.tokenize import Batch, batches_of, num_characters
from finetune.data.types import IGNORE_INDEX, Origin, Sample
from finetune.errors import EnvironmentProblem
from finetune.recipe.schema import DataSection

ARRAYS = ("input_ids", "labels", "starts", "lengths", "supervised", "digests", "origins")


def questions(count: int) -> list[dict[str, Any]]:
    return [
        {"instruction": f"question {index}", "output": f"answer {index} " * (1 + index % 9)} for index in range(count)
    ]


def assert_same(left: SampleStore, right: SampleStore) -> None:
    for name in ARRAYS:
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert (left.paths, left.max_id) == (right.paths, right.max_id)


def test_one_and_two_processes_make_the_same_store(chatml: Any, write_jsonl: Callable) -> None:
    """Order, ledger and labels do not depend on how many processes tokenize."""
    first, second = write_jsonl(questions(700)), write_jsonl([{"prompt": "p", "completion": "c"}] * 300, "second.jsonl")
    data = DataSection.model_validate(
        {
            "train": [{"path": str(first)}, {"path": str(second)}],
            "cache": False,
            "max_length": 96,
            "over_length": "drop",
        }
    )
    one, two = (
        build_dataset(data, tokenizer=chatml, seed=7, say=lambda line: None, workers=workers) for workers in (1, 2)
    )
    assert_same(one.train, two.train)
    assert one.ledger == two.ledger
    assert one.ledger.records_dropped > 0
    assert one.gate == two.gate


def test_results_come_in_order_whatever_takes_long() -> None:
    def work(item: int) -> int:
        time.sleep(0.05 if item % 4 == 0 else 0.0)
        return item * item

    found = list(map_ordered(work, range(40), workers=3, describe=str))
    assert found == [item * item for item in range(40)]


def test_items_are_read_only_as_far_ahead_as_needed() -> None:
    """A file is not read into memory while the workers are slower than the reader."""
    read: list[int] = []

    def items() -> Any:
        for item in range(100):
            read.append(item)
            yield item

    results = map_ordered(lambda item: item, items(), workers=2, describe=str)
    assert next(results) == 0
    assert len(read) <= 8
    results.close()  # type: ignore[attr-defined]


def test_dead_worker_is_an_error_that_names_the_records() -> None:
    """P43: no hang; the error says which records the process had, and what came before them is kept."""

    def work(batch: Batch) -> int:
        number = batch.records[0][0].record
        if number == 11:
            time.sleep(1)  # until the batches before this one are done
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    records: list[tuple[Origin, Any]] = [(Origin("a.jsonl", number), {"text": "x"}) for number in range(1, 101)]
    batches = [Batch(0, "text", records[start : start + 2]) for start in range(0, 100, 2)]
    started, done = time.monotonic(), []
    with pytest.raises(EnvironmentProblem, match="died") as caught:
        for number in map_ordered(work, batches, workers=2, describe=str):
            done.append(number)
    assert time.monotonic() - started < 30
    assert done == [1, 3, 5, 7, 9]
    assert caught.value.place == "records a.jsonl:11 to a.jsonl:12"
    assert "memory" in caught.value.message
    assert caught.value.remedy


def test_error_of_a_worker_is_raised_as_it_is() -> None:
    def work(item: int) -> int:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        list(map_ordered(work, range(5), workers=2, describe=str))


@pytest.mark.parametrize(
    ("cores", "free", "expected"),
    [(8, 100 * WORKER_BYTES, 8), (8, 3 * WORKER_BYTES, 3), (4, 0, 1), (1, 100 * WORKER_BYTES, 1)],
)
def test_workers_follow_cores_and_memory(cores: int, free: int, expected: int) -> None:
    """P43: no more processes than free memory holds."""
    assert choose_workers(num_cores=cores, free_bytes=free) == expected


def test_free_memory_is_known_here() -> None:
    free = free_memory_bytes()
    assert free is not None and free > 0
    assert choose_workers() >= 1


def test_store_on_disk_equals_the_one_in_memory(tmp_path: Path) -> None:
    """Past its limit the builder holds no tokens in memory; nothing is left in the folder."""
    rng = np.random.default_rng(7)
    in_memory, on_disk = StoreBuilder(), StoreBuilder(folder=tmp_path, spill_tokens=50)
    for number in range(200):
        ids = rng.integers(0, 1000, size=int(rng.integers(1, 30)), dtype=np.int32)
        labels = np.where(ids % 2 == 0, ids, IGNORE_INDEX).astype(np.int32)
        for builder in (in_memory, on_disk):
            builder.add(Sample(ids, labels, Origin("a.jsonl", number)))
    left, right = in_memory.finish(), on_disk.finish()
    assert_same(left, right)
    assert isinstance(right.input_ids, np.memmap)
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "saved"
    folder.mkdir()
    right.save(folder)
    assert_same(SampleStore.load(folder), left)


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_a_million_samples_are_built_and_packed_in_bounded_memory(tmp_path: Path) -> None:
    """Some 50 bytes a sample stay in memory and no token, also while they are split and packed."""
    before = anonymous_bytes()
    builder = StoreBuilder(folder=tmp_path, spill_tokens=1 << 20)
    ids = np.arange(100 * 30, dtype=np.int32)
    for batch in range(10_000):
        builder.add_tokens(ids, ids)
        for number in range(100):
            record = 100 * batch + number
            builder.add_entry(30, supervised=10, digest=record, label_digest=record, origin=Origin("a.jsonl", record))
    store = builder.finish()
    is_held_out = hold_out(store, fraction=0.01, seed=7)
    train = store.select(np.flatnonzero(~is_held_out))
    plan = pack(train.lengths, max_length=4096, seed=7)
    assert (len(store), store.num_tokens, plan.num_tokens) == (1_000_000, 30_000_000, 30 * 990_000)
    assert train[0].input_ids.tolist() == ids[:30].tolist()
    assert anonymous_bytes() - before < 300 << 20  # the tokens and labels alone are 240 MB, the index 96 MB


def test_selection_copies_no_tokens() -> None:
    builder = StoreBuilder()
    for number in range(100):
        ids = np.full(50, number, dtype=np.int32)
        builder.add(Sample(ids, ids, Origin("a.jsonl", number)))
    store = builder.finish()
    chosen = store.select(np.arange(99, -1, -2))
    assert np.shares_memory(chosen.input_ids, store.input_ids)
    assert chosen[0].input_ids.tolist() == [99] * 50
    assert (chosen.num_tokens, chosen.num_supervised_tokens) == (2500, 2500)


def test_a_million_samples_are_split_in_seconds() -> None:
    """Index work only: no token is read, and no Python object is made for a sample."""
    count = 1_000_000
    rng = np.random.default_rng(7)
    lengths = np.full(count, 100, dtype=np.int64)
    store = SampleStore(
        input_ids=np.zeros(0, dtype=np.int32),
        labels=np.zeros(0, dtype=np.int32),
        starts=np.arange(0, count * 100, 100, dtype=np.int64),
        lengths=lengths,
        supervised=lengths,
        digests=rng.integers(0, count * 4, size=count, dtype=np.uint64),
        label_digests=rng.integers(0, count * 4, size=count, dtype=np.uint64),
        records=np.arange(count),
        origins=np.stack([np.zeros(count, dtype=np.int64), np.arange(count)], axis=1),
        paths=("a.jsonl",),
        max_id=0,
    )
    started = time.perf_counter()
    is_held_out = hold_out(store, fraction=0.01, seed=7)
    is_repeat = repeated(store)
    held_out, train = store.select(np.flatnonzero(is_held_out)), store.select(np.flatnonzero(~is_held_out))
    assert time.perf_counter() - started < 10
    assert not np.isin(held_out.digests, train.digests).any()
    assert int(is_repeat.sum()) == count - len(np.unique(store.digests))


def test_batches_are_small_whatever_the_records() -> None:
    records: list[Any] = [(Origin("a", number), {"text": "x" * 600_000}) for number in range(6)]
    sizes = [len(batch.records) for batch in batches_of(records, source=0, format_of=lambda: "text")]
    assert sizes == [2, 2, 2]
    assert num_characters({"a": ["bc", {"d": "efg"}], "n": 5}) == 6


def test_long_runs_tell_how_far_they_are(chatml: Any, write_jsonl: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.data.prepared._PROGRESS_SECONDS", 0.0)
    data = DataSection.model_validate({"train": [{"path": str(write_jsonl(questions(300)))}], "cache": False})
    said: list[str] = []
    build_dataset(data, tokenizer=chatml, seed=7, say=said.append)
    progress = [line for line in said if line.startswith("tokenizing: ")]
    assert progress[0].startswith("tokenizing: 128 records")
    assert progress[-1].startswith("tokenizing: 300 records")
