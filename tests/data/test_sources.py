"""A source gives the records of its files in a fixed order under the names of their roles, and says what it leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.data.sources import hashed_files, read_source, source_files
from finetune.errors import DataError
from finetune.recipe.schema import Source


def source_of(path: Path | str, **fields: Any) -> Source:
    return Source.model_validate({"path": str(path), **fields})


def read(path: Path | str, **fields: Any) -> tuple[list[Any], list[str]]:
    said: list[str] = []
    records = [record for _, record in read_source(source_of(path, **fields), say=said.append)]
    return records, said


def failure(path: Path | str, **fields: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, **fields)
    assert caught.value.remedy
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and one in a folder below, with others that are no data, hidden, or describe data."""
    (tmp_path / "below").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.jsonl", "a.jsonl", "below/c.jsonl", ".hidden/d.jsonl", ".e.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": Path(name).stem}), encoding="utf-8")
    (tmp_path / "README.md").write_text("# Data", encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_folder_gives_all_data_files_sorted_and_names_the_others(folder: Path) -> None:
    records, said = read(folder)
    assert records == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert said == [f"{folder}: 1 file that is no data file left alone: README.md"]
    assert source_files(source_of(folder)) == [str(folder / name) for name in ("a.jsonl", "b.jsonl", "below/c.jsonl")]
    assert hashed_files(source_of(folder)) == source_files(source_of(folder))


def test_origins_name_the_file_and_not_the_folder(folder: Path) -> None:
    origins = [str(origin) for origin, _ in read_source(source_of(folder), say=lambda line: None)]
    assert origins[0] == f"{folder / 'a.jsonl'}:1"


def test_max_rows_counts_over_all_files(folder: Path) -> None:
    assert read(folder, max_rows=2)[0] == [{"text": "a"}, {"text": "b"}]


def test_linked_folder_is_read_once_though_links_form_a_circle(folder: Path) -> None:
    (folder / "below" / "circle").symlink_to(folder)
    assert len(read(folder)[0]) == 3


@pytest.mark.parametrize(
    ("pattern", "expected"), [("*.jsonl", "ab"), ("**/*.jsonl", "abc"), ("[b].jsonl", "b"), ("*", None)]
)
def test_pattern(folder: Path, pattern: str, expected: str | None) -> None:
    if expected is None:  # a pattern names its files, so one that is no data file is an error
        assert "unknown file type '.md'" in failure(folder / pattern).message
        return
    assert "".join(record["text"] for record in read(folder / pattern)[0]) == expected


def test_file_whose_name_looks_like_a_pattern_is_that_file(folder: Path) -> None:
    (folder / "[b].jsonl").write_text('{"text": "itself"}', encoding="utf-8")
    assert read(folder / "[b].jsonl")[0] == [{"text": "itself"}]


def test_pattern_without_a_file(folder: Path) -> None:
    error = failure(folder / "*.parquet")
    assert error.place == str(folder / "*.parquet")
    assert "no file fits" in error.message


def test_folder_without_a_data_file(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x", encoding="utf-8")
    error = failure(tmp_path)
    assert error.place == str(tmp_path)
    assert ".jsonl" in error.remedy


def test_folder_of_a_saved_dataset_with_several_splits(tmp_path: Path) -> None:
    """Reading it whole would mix the test split into the training data."""
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list([{"text": "x"}])
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "saved"))
    assert "several splits (test, train)" in failure(tmp_path / "saved").message
    assert read(tmp_path / "saved" / "train")[0] == [{"text": "x"}]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_folder_that_may_not_be_read(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert "cannot be read" in failure(closed).message


def test_columns_are_renamed_to_roles(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer,output,id\nq,a,old,7\n", encoding="utf-8")
    records, _ = read(path, columns={"instruction": "question", "output": "answer"})
    assert records == [{"instruction": "q", "output": "a", "id": "7", "own output": "old"}]


def test_columns_may_swap_names(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "q"}', encoding="utf-8")
    records, _ = read(path, columns={"prompt": "completion", "completion": "prompt"})
    assert records == [{"prompt": "q", "completion": "a"}]


def test_missing_column_suggests_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\nq,a\n", encoding="utf-8")
    error = failure(path, columns={"instruction": "qestion", "output": "answer"})
    assert error.place == f"{path}:2"
    assert "`columns.instruction` is 'qestion'" in error.message
    assert error.remedy == "Did you mean question?"


def test_optional_column_may_be_absent_from_some_records_but_not_from_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"q": "1", "output": "a"}, {"q": "2", "output": "b", "sys": "S"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    records, _ = read(path, columns={"instruction": "q", "system": "sys"})
    assert records[1] == {"instruction": "2", "output": "b", "system": "S"}
    error = failure(path, columns={"instruction": "q", "system": "syss"})
    assert "all records of the source lack" in error.message
    assert error.place == str(path)


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x", encoding="utf-8")
    assert "no columns" in failure(path, columns={"text": "body"}).message
