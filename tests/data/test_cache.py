"""The token cache hits when the content is the same, and misses with the reason when anything changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_builds import RECORDS, assert_same, build

from finetune.data import cache
from finetune.data.build import Dataset, build_dataset
from finetune.data.cache import cache_folder, tokenizer_digest
from finetune.errors import DataError
from finetune.recipe.schema import DataSection


@pytest.fixture
def path(write_jsonl: Callable) -> Path:
    return write_jsonl(RECORDS)


def test_second_build_hits(chatml: Any, path: Path) -> None:
    first, said = build(chatml, path)
    assert "miss (the cache is empty)" in said
    second, said = build(chatml, path)
    assert "hit" in said
    assert_same(first, second)
    assert first.ledger == second.ledger
    assert isinstance(second.train.input_ids, np.memmap)


def test_copied_folder_with_new_times_hits_under_its_own_name(chatml: Any, path: Path, tmp_path: Path) -> None:
    """P41: nothing changed but the folder, the name and the times."""
    build(chatml, path, max_length=64, over_length="drop")
    copy = tmp_path / "copy" / "other-name.jsonl"
    copy.parent.mkdir()
    shutil.copyfile(path, copy)
    os.utime(copy, (1, 1))
    dataset, said = build(chatml, copy, max_length=64, over_length="drop")
    assert "hit" in said
    assert dataset.train.origin(0).path == str(copy)
    assert dataset.ledger.sources[0].path == str(copy)


def test_tokenizer_that_was_used_or_made_again_hits(make_tokenizer: Callable, path: Path) -> None:
    tokenizer = make_tokenizer()
    build(tokenizer, path)
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=4)
    assert "hit" in build(tokenizer, path)[1]
    assert "hit" in build(make_tokenizer(), path)[1]


def test_byte_changed_with_same_time_and_size_misses(chatml: Any, path: Path) -> None:
    """P41: the bytes count, not time and size."""
    build(chatml, path)
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"a3", b"b3"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    dataset, said = build(chatml, path)
    assert "miss (changed: files)" in said
    assert "b3<|im_end|>" in chatml.decode(dataset.train[3].input_ids)


def test_data_that_were_never_seen_are_told_as_new(chatml: Any, path: Path, write_jsonl: Callable) -> None:
    """It said `changed: columns, files`; a copy under another name, or other content of the same name, is known."""
    build(chatml, path)
    rows = [{"instruction": "never seen", "output": "so far"}]
    new = path.with_name("new.jsonl")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert "miss (the data are new to it)" in build(chatml, new)[1]
    copy = path.with_name("copy.jsonl")
    copy.write_bytes(path.read_bytes())
    assert "miss (changed: max_length)" in build(chatml, copy, max_length=1024)[1]


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("max_length", {"max_length": 1024}),
        ("over_length", {"over_length": "drop"}),
        ("loss_on", {"loss_on": "all"}),
        ("max_rows", {"max_rows": 2}),
    ],
)
def test_changed_setting_misses(chatml: Any, path: Path, reason: str, settings: dict[str, Any]) -> None:
    """P41: the length, the mask and the row limit, with the reason."""
    build(chatml, path)
    assert f"miss (changed: {reason})" in build(chatml, path, **settings)[1]


def test_settings_that_change_no_token_hit(chatml: Any, path: Path) -> None:
    build(chatml, path)
    assert "hit" in build(chatml, path, packing=False, eval={"fraction": 0.5})[1]


def test_changed_template_misses(make_tokenizer: Callable, chatml: Any, path: Path) -> None:
    """P41: the template's text."""
    build(chatml, path)
    other = make_tokenizer(chat_template=chatml.chat_template.replace("assistant", "assistant "))
    assert "miss (changed: chat_template)" in build(other, path)[1]


def test_added_token_misses(make_tokenizer: Callable, chatml: Any, path: Path) -> None:
    """P41: a token added to the tokenizer."""
    build(chatml, path)
    assert "miss (changed: tokenizer)" in build(make_tokenizer(extra_special="<|new|>"), path)[1]


def test_other_bos_behaviour_or_eos_is_another_tokenizer(make_tokenizer: Callable) -> None:
    other_eos = make_tokenizer()
    other_eos.eos_token = "<|pad|>"
    digests = [tokenizer_digest(each) for each in (make_tokenizer(), make_tokenizer(adds_bos=True), other_eos)]
    assert len(set(digests)) == 3


def test_our_code_version_misses(chatml: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P41: another version of our code."""
    build(chatml, path)
    monkeypatch.setattr("finetune.data.prepared.DATA_VERSION", cache.DATA_VERSION + 1)
    assert "miss (changed: data_version)" in build(chatml, path)[1]


def test_template_that_prints_the_day_misses_on_another(
    make_tokenizer: Callable, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(chat_template="{{ strftime_now('%Y') }}" + make_tokenizer().chat_template)
    build(tokenizer, path)
    assert "hit" in build(tokenizer, path)[1]

    class Tomorrow:
        @staticmethod
        def today() -> Any:
            from datetime import date, timedelta

            return date.today() + timedelta(days=1)

    monkeypatch.setattr("finetune.data.build.date", Tomorrow)
    assert "miss (changed: date)" in build(tokenizer, path)[1]


def test_cache_off_leaves_nothing(chatml: Any, path: Path) -> None:
    _, said = build(chatml, path, cache=False)
    assert said == ""
    assert not cache_folder().exists()


def test_failed_build_leaves_nothing(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([*RECORDS, {"instruction": "q"}])
    with pytest.raises(Exception, match="no key 'output'"):
        build(chatml, path)
    assert list(cache_folder().iterdir()) == []


def test_cache_that_cannot_be_written_is_said(chatml: Any, path: Path, cache_home: Path) -> None:
    (cache_home / "finetune").write_text("a file where the folder should be", encoding="utf-8")
    dataset, said = build(chatml, path)
    assert len(dataset.train) == 4
    assert "cannot be written" in said


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "finetune" / "tokens"


def test_file_that_changes_while_it_is_read_is_refused(
    chatml: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P41: what was read is not what was hashed, so it must not be kept under that hash."""
    from finetune.data import prepared

    def grow(*args: Any, **kwargs: Any) -> Any:
        result = tokenize(*args, **kwargs)
        with path.open("a", encoding="utf-8") as stream:
            stream.write('{"instruction": "late", "output": "row"}\n')
        return result

    tokenize = prepared._tokenize
    monkeypatch.setattr("finetune.data.prepared._tokenize", grow)
    with pytest.raises(DataError, match="changed while it was read") as caught:
        build(chatml, path)
    assert caught.value.place == str(path)
    assert list(cache_folder().glob("[!.]*")) == []


def test_file_touched_while_it_is_read_is_fine(chatml: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other times with the same bytes: the hash decides."""
    from finetune.data import prepared

    def touch(*args: Any, **kwargs: Any) -> Any:
        os.utime(path, (1, 1))
        return tokenize(*args, **kwargs)

    tokenize = prepared._tokenize
    monkeypatch.setattr("finetune.data.prepared._tokenize", touch)
    build(chatml, path)
    assert "hit" in build(chatml, path)[1]


def test_hit_with_references_reads_no_source(chatml: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts for generation are kept with the entry; a hit opens no data file but to hash it."""
    source = {"path": str(path), "max_rows": None}
    data = DataSection.model_validate({"train": [source], "eval": {"fraction": 0.5}})

    def dataset() -> Dataset:
        return build_dataset(data, tokenizer=chatml, seed=7, say=lambda line: None, max_references=5)

    first = dataset()
    assert len(first.references) == 2

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a source was read")

    monkeypatch.setattr("finetune.data.references.open_source", fail)
    monkeypatch.setattr("finetune.data.prepared.open_source", fail)
    second = dataset()
    for left, right in zip(first.references, second.references, strict=True):
        assert np.array_equal(left.prompt_ids, right.prompt_ids)
        assert (left.prompt, left.reference, left.origin) == (right.prompt, right.reference, right.origin)
