"""Sources of every kind go through the whole build: their faults have file, line and remedy, their ledger is right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import Dataset, build_dataset
from finetune.data.types import Origin
from finetune.errors import DataError, FinetuneError
from finetune.recipe.schema import DataSection

ALPACA = [{"instruction": f"q{index}", "output": f"a{index}"} for index in range(4)]
MESSAGES = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def build(tokenizer: Any, *sources: dict[str, Any], **settings: Any) -> tuple[Dataset, list[str]]:
    data = DataSection.model_validate({"train": list(sources), **settings})
    said: list[str] = []
    return build_dataset(data, tokenizer=tokenizer, seed=7, say=said.append), said


def failure(tokenizer: Any, path: Path, **fields: Any) -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        build(tokenizer, {"path": str(path), **fields})
    assert caught.value.remedy
    return caught.value


def test_mixed_formats_in_one_file(chatml: Any, write_jsonl: Callable) -> None:
    path = write_jsonl([*ALPACA, MESSAGES])
    error = failure(chatml, path)
    assert error.place == f"{path}:5"
    assert "has the format messages" in error.message
    assert f"first record ({path}:1) has the format alpaca" in error.message
    assert "a file of their own" in error.remedy


def test_mixed_formats_in_two_files_of_a_folder(chatml: Any, write_jsonl: Callable, tmp_path: Path) -> None:
    write_jsonl(ALPACA, "a.jsonl")
    second = write_jsonl([MESSAGES], "b.jsonl")
    assert failure(chatml, tmp_path).place == f"{second}:1"
    dataset, _ = build(chatml, {"path": str(tmp_path / "a.jsonl")}, {"path": str(second)})
    assert [source.format for source in dataset.ledger.sources] == ["alpaca", "messages"]


def test_folder_is_one_source_of_many_files(chatml: Any, write_jsonl: Callable, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write_jsonl([{**record, "instruction": name} for record in ALPACA], name)
    for expected in ("miss", "hit"):
        dataset, said = build(chatml, {"path": str(tmp_path)})
        assert any(expected in line for line in said if line.startswith("Token cache"))
        assert [(source.path, source.records) for source in dataset.ledger.sources] == [(str(tmp_path), 8)]
        assert [str(dataset.train.origin(index)) for index in (0, 4)] == [
            f"{tmp_path / 'a.jsonl'}:1",
            f"{tmp_path / 'b.jsonl'}:1",
        ]
    (tmp_path / "b.jsonl").write_text(json.dumps(ALPACA[0]), encoding="utf-8")
    dataset, said = build(chatml, {"path": str(tmp_path)})
    assert any("miss" in line for line in said)
    assert len(dataset.train) == 5


def test_columns_give_the_tokens_of_the_roles(chatml: Any, write_jsonl: Callable) -> None:
    plain = write_jsonl(ALPACA)
    renamed = write_jsonl([{"q": r["instruction"], "a": r["output"], "id": 1} for r in ALPACA], "renamed.jsonl")
    expected, _ = build(chatml, {"path": str(plain)})
    columns = {"instruction": "q", "output": "a"}
    dataset, said = build(chatml, {"path": str(renamed), "columns": columns})
    assert dataset.train.input_ids.tolist() == expected.train.input_ids.tolist()
    assert any("not used: id" in line for line in dataset.ledger.summary_lines())
    assert f"{renamed}: recognised as alpaca" in said
    assert "fits no known format" in failure(chatml, renamed).message
    assert "`columns`" in failure(chatml, renamed).remedy


def test_calls_without_definitions_are_told(chatml: Any, write_jsonl: Callable) -> None:
    call = {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {}}]}
    turns = [MESSAGES["messages"][0], call, {"role": "tool", "content": "1"}, MESSAGES["messages"][1]]
    path = write_jsonl([{"messages": turns}])
    dataset, _ = build(chatml, {"path": str(path)}, loss_on="last_assistant")
    assert any("tools are called" in line for line in dataset.ledger.summary_lines())


@pytest.mark.parametrize(("weight", "counts"), [(2.0, [2, 2, 2, 2]), (1.0, [1, 1, 1, 1]), (0.5, [0, 0, 1, 1])])
def test_weight_of_a_source(chatml: Any, write_jsonl: Callable, weight: float, counts: list[int]) -> None:
    path = write_jsonl(ALPACA)
    taken = []
    for _ in range(2):
        dataset, _ = build(chatml, {"path": str(path), "weight": weight})
        records = [dataset.train.origin(index).record for index in range(len(dataset.train))]
        assert sorted(records.count(record) for record in range(1, 5)) == counts
        taken.append(records)
    assert taken[0] == taken[1]


@pytest.mark.parametrize("cache", [True, False])
def test_pipe_does_not_hang_the_build(chatml: Any, tmp_path: Path, cache: bool) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    with pytest.raises(DataError, match="no regular file"):
        build(chatml, {"path": str(path)}, cache=cache)


@pytest.mark.parametrize("name", [f"{'x' * 300}.jsonl", "gone.jsonl", "gone", "gone-*.jsonl"])
def test_path_of_nothing(chatml: Any, tmp_path: Path, name: str) -> None:
    assert failure(chatml, tmp_path / name).place == str(tmp_path / name)


BAD_ROWS: list[tuple[str, Any, str]] = [
    ("no-assistant", {"messages": MESSAGES["messages"][:1]}, "no assistant turn"),
    (
        "late-system",
        {"messages": [*MESSAGES["messages"], {"role": "system", "content": "s"}]},
        "roles out of order: the 3rd message",
    ),
    ("tool-first", {"messages": [{"role": "tool", "content": "1"}, *MESSAGES["messages"]]}, "follows no tool call"),
    ("empty-answer", {"messages": [MESSAGES["messages"][0], {"role": "assistant", "content": ""}]}, "content is empty"),
    ("wrong-type", {"messages": [{"role": "user", "content": 5}, MESSAGES["messages"][1]]}, "must be a string"),
    (
        "half-weight",
        {"messages": [*MESSAGES["messages"][:1], {**MESSAGES["messages"][1], "weight": "1"}]},
        "must be 0, or",
    ),
    ("list", [1, 2], "must be a JSON object"),
]


@pytest.mark.parametrize(("record", "words"), [case[1:] for case in BAD_ROWS], ids=[case[0] for case in BAD_ROWS])
def test_bad_row_is_placed_at_its_line(chatml: Any, write_jsonl: Callable, record: Any, words: str) -> None:
    path = write_jsonl([MESSAGES, MESSAGES, record])
    error = failure(chatml, path)
    assert error.place == f"{path}:3"
    assert words in error.message


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_bad_row_of_a_file_whose_records_take_several_lines(chatml: Any, tmp_path: Path, suffix: str) -> None:
    """The number of such a record is not its line, and an editor goes to lines."""
    path = tmp_path / f"a{suffix}"
    records = [{"instruction": "two\nlines", "output": "a"}, {"instruction": "q", "output": " "}]
    csv = 'instruction,output\n"two\nlines",a\nq, \n'
    path.write_text(csv if suffix == ".csv" else json.dumps(records, indent=1), encoding="utf-8")
    error = failure(chatml, path)
    assert error.place == f"{path}:{'4' if suffix == '.csv' else '6 (record 2)'}"
    assert "output is empty" in error.message


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.csv", [":2", ":4", ":6"]),
        ("a.tsv", [":2", ":4", ":6"]),
        ("a.jsonl", [":2", ":3", ":5"]),
        ("a.json", [" (record 1)", " (record 2)", " (record 3)"]),
        ("a.parquet", [" (record 1)", " (record 2)", " (record 3)"]),
    ],
)
def test_samples_know_the_line_of_their_record(chatml: Any, tmp_path: Path, name: str, places: list[str]) -> None:
    """After tokenizing, `a.csv:2` was the second record, wherever it stood."""
    path, mark = tmp_path / name, "\t" if name == "a.tsv" else ","
    records = [{"instruction": "two\nlines", "output": "a"}, {"instruction": "q\nr", "output": "b"}]
    records.append({"instruction": "x", "output": "c"})
    rows = [[f'"{value}"' for value in record.values()] for record in records]
    lines = [json.dumps(record) for record in records]
    texts = {
        "a.csv": "\n".join(mark.join(row) for row in [["instruction", "output"], *rows]),
        "a.tsv": "\n".join(mark.join(row) for row in [["instruction", "output"], *rows]),
        "a.jsonl": "\n".join(["", lines[0], lines[1], "", lines[2]]),
        "a.json": json.dumps(records),
    }
    if name in texts:
        path.write_text(texts[name], encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    dataset, _ = build(chatml, {"path": str(path)}, cache=False)
    found = [str(dataset.train.origin(index)) for index in range(3)]
    assert found == [f"{path}{place}" for place in places]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a.csv.gz", "a.csv.gz:7"),
        ("A.JSONL", "A.JSONL:7"),
        ("a.jsonl.zst", "a.jsonl.zst:7"),
        ("a.json.gz", "a.json.gz (record 7)"),
        ("org/name[train]", "org/name[train] (record 7)"),
        ("org/name.csv[train]", "org/name.csv[train] (record 7)"),
    ],
)
def test_places_say_whether_they_are_lines(path: str, shown: str) -> None:
    assert str(Origin(path, 7)) == shown
