"""An entry of the token cache is whole or made again, is shared by processes, and says where it cannot be kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_builds import RECORDS, assert_same, build

from finetune.data.build import build_dataset
from finetune.data.cache import cache_folder
from finetune.data.store import SampleStore
from finetune.recipe.schema import DataSection


@pytest.fixture
def path(write_jsonl: Callable) -> Path:
    return write_jsonl(RECORDS)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


@pytest.mark.parametrize(
    "name",
    [
        "input_ids.npy",
        "labels.npy",
        "starts.npy",
        "lengths.npy",
        "supervised.npy",
        "digests.npy",
        "records.npy",
        "origins.npy",
        "store.json",
        "ledger.json",
        "gate.json",
        "checksums.json",
    ],
)
@pytest.mark.parametrize("damage", [cut, Path.unlink, lambda file: file.write_bytes(b"")], ids=["cut", "gone", "empty"])
def test_damaged_entry_is_built_again(chatml: Any, path: Path, name: str, damage: Callable[[Path], Any]) -> None:
    first, _ = build(chatml, path)
    (entry,) = cache_folder().iterdir()
    damage(entry / name)
    second, said = build(chatml, path)
    assert "damaged" in said
    assert str(entry) in said
    assert_same(first, second)
    assert "hit" in build(chatml, path)[1]
    assert list(cache_folder().iterdir()) == [entry]


def test_a_million_samples_open_at_once(tmp_path: Path) -> None:
    num_samples, length = 1_000_000, 4
    store = SampleStore(
        input_ids=np.zeros(num_samples * length, dtype=np.int32),
        labels=np.zeros(num_samples * length, dtype=np.int32),
        starts=np.arange(0, num_samples * length, length, dtype=np.int64),
        lengths=np.full(num_samples, length, dtype=np.int64),
        supervised=np.full(num_samples, length, dtype=np.int64),
        digests=np.arange(num_samples, dtype=np.uint64),
        label_digests=np.arange(num_samples, dtype=np.uint64),
        records=np.arange(num_samples, dtype=np.int64),
        origins=np.zeros((num_samples, 2), dtype=np.int64),
        paths=("a.jsonl",),
        max_id=0,
    )
    store.save(tmp_path)
    start = time.perf_counter()
    loaded = SampleStore.load(tmp_path)
    assert len(loaded[num_samples - 1]) == length
    assert loaded.num_supervised_tokens == num_samples * length
    assert time.perf_counter() - start < 0.5


def flip_last_byte(file: Path) -> None:
    """Same size, same time, one other byte: only a checksum tells."""
    before, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["input_ids.npy", "labels.npy", "supervised.npy", "digests.npy", "ledger.json"])
def test_flipped_byte_is_found_and_built_again(chatml: Any, path: Path, name: str) -> None:
    first, _ = build(chatml, path)
    (entry,) = cache_folder().iterdir()
    flip_last_byte(entry / name)
    second, said = build(chatml, path)
    assert f"damaged ({name} does not have its checksum)" in said
    assert_same(first, second)
    assert "hit" in build(chatml, path)[1]


def test_negative_or_unknown_ids_are_found(chatml: Any, path: Path) -> None:
    """An entry whose token ids were overwritten is not trained on."""
    first, _ = build(chatml, path)
    (entry,) = cache_folder().iterdir()
    ids = np.load(entry / "input_ids.npy")
    np.save(entry / "input_ids.npy", np.full_like(ids, -5))
    second, said = build(chatml, path)
    assert "damaged" in said
    assert_same(first, second)
    assert second.train.max_id == int(second.train.input_ids.max())


def test_large_entries_are_checked_in_samples(
    chatml: Any, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of many blocks only some are read, the first and the last always."""
    monkeypatch.setattr("finetune.data.entry.BLOCK_BYTES", 64)
    monkeypatch.setattr("finetune.data.entry.VERIFIED_WHOLE_BYTES", 0)
    monkeypatch.setattr("finetune.data.entry._BLOCKS_OF_LARGE", 2)
    first, _ = build(chatml, path)
    (entry,) = cache_folder().iterdir()
    assert "hit" in build(chatml, path)[1]
    flip_last_byte(entry / "labels.npy")
    second, said = build(chatml, path)
    assert "damaged" in said
    assert_same(first, second)


def test_references_that_cannot_be_kept_are_told(chatml: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def run() -> Any:
        data = DataSection.model_validate({"train": [{"path": str(path)}], "eval": {"fraction": 0.5}})
        return build_dataset(data, tokenizer=chatml, seed=7, say=said.append, max_references=5)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    build(chatml, path)
    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.cache.os.replace", fail)
        count = len(run().references)
    assert any("cannot be added to" in line and "No space left" in line for line in said)
    assert not list(cache_folder().glob("*/.new-*")), "what was half written went too"
    run()
    (kept,) = cache_folder().glob("*/references-*.json")
    kept.write_text("{broken", encoding="utf-8")
    said.clear()
    assert len(run().references) == count > 0
    assert [line for line in said if f"{kept} cannot be read" in line]
    kept.write_text("[5]", encoding="utf-8")
    said.clear()
    assert len(run().references) == count
    assert [line for line in said if "is damaged" in line]


TWO_PROCESSES = """
import sys, time
sys.path.insert(0, {tests!r})
from data_conftest import build_tokenizer
from finetune.data.build import build_dataset
from finetune.recipe.schema import DataSection
data = DataSection.model_validate({{"train": [{{"path": {path!r}}}]}})
said = []
while time.time() < float({start!r}):
    pass
dataset = build_dataset(data, tokenizer=build_tokenizer(), seed=7, say=said.append)
print(len(dataset.train), dataset.train.num_tokens, " | ".join(said))
"""


def test_two_processes_at_once_share_one_entry(write_jsonl: Callable, tmp_path: Path) -> None:
    """P41: both get the whole data; one tokenizes and the other waits for it, or comes later and hits."""
    rows = [{"instruction": f"q{index}", "output": f"a{index} " * 40} for index in range(3000)]
    path = write_jsonl(rows)
    shutil.copyfile(Path(__file__).parent / "conftest.py", tmp_path / "data_conftest.py")
    code = TWO_PROCESSES.format(tests=str(tmp_path), path=str(path), start=str(time.time() + 4))
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    counts = {tuple(output[0].split(" ")[:2]) for output in outputs}
    assert [samples for samples, _ in counts] == ["3000"]
    said = " ".join(output[0] for output in outputs)
    assert said.count("Token cache: miss") == 1
    assert said.count("Token cache: hit") == 1
    assert len(list(cache_folder().iterdir())) == 1


def test_lock_of_a_dead_process_holds_no_one(chatml: Any, path: Path) -> None:
    """The lock is the operating system's: a file that is left behind means nothing."""
    build(chatml, path)
    (entry,) = cache_folder().iterdir()
    (cache_folder() / f".lock-{entry.name}").write_text("", encoding="utf-8")
    assert "hit" in build(chatml, path)[1]


def test_old_leftovers_are_removed(chatml: Any, path: Path) -> None:
    old, new = cache_folder() / ".new-old", cache_folder() / ".new-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    build(chatml, path)
    assert not old.exists()
    assert new.exists()
