"""Every kind of file gives its records with their origins; every broken one an error with place, value and remedy."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.data.formats import convert, recognise
from finetune.data.load import read_records
from finetune.errors import DataError

RECORDS = [{"text": "one"}, {"text": "zwei \u00e9\u6c49\u2028 \U0001f600"}]


def read(path: Path, max_rows: int | None = None) -> list:
    return [(origin.record, record) for origin, record in read_records(path, max_rows=max_rows)]


def failure(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.remedy
    return caught.value


def test_jsonl_numbers_records_by_line_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    text = f"{json.dumps(RECORDS[0])}\r\n\n  \n{json.dumps(RECORDS[1], ensure_ascii=False)}"
    path.write_bytes(text.encode("utf-8"))
    assert read(path) == [(1, RECORDS[0]), (4, RECORDS[1])]


@pytest.mark.parametrize("indent", [None, 2], ids=["one-line", "indented"])
def test_json_array(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(RECORDS, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert read(path) == [(1, RECORDS[0]), (2, RECORDS[1])]


def test_csv_keeps_line_breaks_quotes_and_long_fields(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    long = "x" * 200_000
    path.write_text(f'instruction,output\n"a\nb","say ""hi"", ok"\n\nq,{long}\n', encoding="utf-8", newline="")
    assert read(path) == [
        (2, {"instruction": "a\nb", "output": 'say "hi", ok'}),
        (5, {"instruction": "q", "output": long}),
    ]


def test_parquet_drops_the_keys_that_arrow_fills(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"args": {"city": "Rome"}, "n": 1}, {"args": {"day": "Monday"}, "calls": [{"a": 1}, {"b": 2}]}]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.Table.from_pylist(rows[:1]).schema), path)
    assert read(path) == [(1, rows[0]), (2, {"args": {}})]
    full = pa.schema(
        [
            ("args", pa.struct([("city", pa.string()), ("day", pa.string())])),
            ("n", pa.int64()),
            ("calls", pa.list_(pa.struct([("a", pa.int64()), ("b", pa.int64())]))),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=full), path)
    assert read(path) == [(1, rows[0]), (2, rows[1])]


def test_txt_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("first\n\nsecond\n", encoding="utf-8")
    assert read(path) == [(1, "first\n\nsecond\n")]


@pytest.mark.parametrize(
    ("name", "body"),
    [("a.jsonl", '{"text": "x"}'), ("a.json", '[{"text": "x"}]'), ("a.csv", "text\nx\n"), ("a.txt", "x")],
)
def test_byte_order_mark_is_accepted(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + body.encode())
    line = 2 if name == "a.csv" else 1
    assert read(path) == [(line, "x" if name.endswith("txt") else {"text": "x"})]


def test_max_rows_stops_before_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "x"}\nnot json\n', encoding="utf-8")
    assert read(path, max_rows=1) == [(1, {"text": "x"})]


def test_missing_file_suggests_near_names(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}", encoding="utf-8")
    error = failure(tmp_path / "trian.jsonl")
    assert error.place == str(tmp_path / "trian.jsonl")
    assert "does not exist" in error.message
    assert "train.jsonl" in error.remedy
    for unlike in ("data.jsonl", "tests.jsonl", "valid.jsonl"):
        assert "Did you mean" not in failure(tmp_path / unlike).remedy
    assert "nowhere" in failure(tmp_path / "nowhere" / "a.jsonl").remedy


def test_folder(tmp_path: Path) -> None:
    error = failure(tmp_path)
    assert error.place == str(tmp_path)
    assert "folder" in error.message


def test_unknown_suffix_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "data.xlsx"
    path.write_bytes(b"PK")
    error = failure(path)
    assert "'.xlsx'" in error.message
    assert ".json, .jsonl, .csv, .tsv, .parquet, .arrow, .txt" in error.remedy


@pytest.mark.parametrize(
    ("name", "body"),
    [("a.jsonl", "\n\n"), ("a.json", ""), ("b.json", "[ ]"), ("a.csv", "text\n"), ("b.csv", ""), ("a.txt", " \n")],
)
def test_no_records(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / name
    path.write_text(body, encoding="utf-8")
    error = failure(path)
    assert error.place == str(path)
    assert "no records" in error.message


def test_empty_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert "no records" in failure(path).message


def test_broken_jsonl_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "ok"}\n{"text": "say "hi""}\n', encoding="utf-8")
    error = failure(path)
    assert error.place == f"{path}:2"
    assert "column 16" in error.message
    assert 'say "hi"' in error.message
    assert "one complete JSON object on each line" in error.remedy


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ('[{"a": 1},\n {"a": }]', 2, "Expecting value"),
        ('[{"a": 1}\n\n {"a": 2}]', 3, "expected a comma"),
        ('[{"a": 1},\n', 2, "not closed"),
        ('[{"a": 1}', 1, "expected a comma"),
        ('[{"a": 1},\n]', 2, "Expecting value"),
        ('[{"a": 1}]\n{"a": 2}', 2, "after the end"),
    ],
    ids=["value", "comma", "cut-after-comma", "cut", "trailing-comma", "rest"],
)
def test_broken_json_array(tmp_path: Path, body: str, line: int, words: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(body, encoding="utf-8")
    error = failure(path)
    assert error.place == f"{path}:{line}"
    assert words in error.message
    assert "column" in error.message


def test_json_file_of_lines_says_rename(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('{"a": 1}\n{"a": 2}\n', encoding="utf-8")
    assert ".jsonl" in failure(path).remedy


@pytest.mark.parametrize(("name", "body"), [("a.jsonl", '{"a": 1}\n[1, 2]'), ("a.json", '[{"a": 1}, [1, 2]]')])
def test_record_that_is_no_object(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / name
    path.write_text(body, encoding="utf-8")
    error = failure(path)
    assert error.place == f"{path}:2" if name == "a.jsonl" else f"{path}:1 (record 2)"
    assert "found list: [1, 2]" in error.message


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_binary_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"abc\n\0def")
    error = failure(path)
    assert "NUL byte at byte offset 4" in error.message
    assert "UTF-8" in error.remedy


def test_undecodable_byte_is_placed_across_chunks(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    body = b"x" * ((1 << 20) - 1) + "\u6c49".encode() + b"y\xff"
    path.write_bytes(body)
    assert f"byte 0xff at byte offset {len(body) - 1}" in failure(path).message
    path.write_bytes(b"abc" + "\u6c49".encode()[:2])
    assert "at byte offset 3" in failure(path).message


@pytest.mark.parametrize(
    ("body", "words"),
    [("a,b\n1,2\n1,2,3\n", "row 2 (ending on line 3) has 3 fields"), ('a,b\n1,"2\n', "broken CSV at row 1")],
    ids=["fields", "open-quote"],
)
def test_broken_csv(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text(body, encoding="utf-8")
    error = failure(path)
    assert words in error.message
    assert error.place.startswith(f"{path}:")


def test_csv_header_with_repeated_name(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,a\n1,2\n", encoding="utf-8")
    assert failure(path).place == f"{path}:1"


def test_broken_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 this is no table PAR1")
    error = failure(path)
    assert "row 1" in error.message
    assert error.place == f"{path} (record 1)"


def test_long_values_are_shortened(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps("x" * 10_000), encoding="utf-8")
    assert len(failure(path).message) < 200


def test_files_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    """P46: Windows reads in its own code page unless told otherwise; so does a C locale without UTF-8 mode here."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(RECORDS[1], ensure_ascii=False), encoding="utf-8")
    program = (
        "import locale, sys; from finetune.data.load import read_records\n"
        "assert locale.getpreferredencoding(False).upper() not in ('UTF-8', 'UTF8')\n"
        "print(ascii([record for _, record in read_records(sys.argv[1], max_rows=None)]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii([RECORDS[1]])


def test_csv_of_messages_as_json_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    messages = [{"role": "user", "content": 'a, "b"\n'}, {"role": "assistant", "content": "c"}]
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([["messages"], [json.dumps(messages)]])
    ((origin, record),) = read_records(path, max_rows=None)
    assert recognise(record, origin) == "messages"
    assert convert(record, format="messages", origin=origin).messages[0].content == 'a, "b"\n'
