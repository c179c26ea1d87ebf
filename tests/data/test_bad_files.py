"""Files that are no such files: each is refused with place and remedy, in bounded time, and none hangs."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path

import pytest

from finetune.data.load import is_data_file, read_records
from finetune.data.text_files import MAX_RECORD_BYTES
from finetune.errors import DataError, EnvironmentProblem
from finetune.recipe.paths import COMPRESSED_SUFFIXES, DATA_FILE, DATA_SUFFIXES

LINES = [{"text": f"line {number} \u00e9\u6c49"} for number in range(1, 4001)]
JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in LINES).encode()


def read(path: Path) -> list:
    return [record for _, record in read_records(path, max_rows=None)]


def failure(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.remedy
    return caught.value


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


# Compressed


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("a.jsonl", b'{"text": "x"}\n', [{"text": "x"}]),
        ("a.json", b'[{"text": "x"}]', [{"text": "x"}]),
        ("a.csv", b"text\nx\n", [{"text": "x"}]),
        ("a.tsv", b"text\tb\nx\ty\n", [{"text": "x", "b": "y"}]),
        ("a.txt", b"x", ["x"]),
    ],
)
def test_compressed(tmp_path: Path, suffix: str, name: str, body: bytes, expected: list) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(gzip.compress(body) if suffix == ".gz" else zstd(body))
    assert read(path) == expected


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_compressed_parts_in_one_file(tmp_path: Path, suffix: str) -> None:
    compress = gzip.compress if suffix == ".gz" else zstd
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(JSONL[:1000]) + compress(JSONL[1000:]))
    assert read(path) == LINES


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.5, 0.999], ids=["half", "last-bytes"])
def test_compressed_file_cut_short(tmp_path: Path, suffix: str, share: float) -> None:
    """The reader of the zstandard package takes a missing end for the end of the data; rows would vanish."""
    body = gzip.compress(JSONL) if suffix == ".gz" else zstd(JSONL)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(body[: int(len(body) * share)])
    error = failure(path)
    file, line = error.place.rsplit(":", 1)
    assert file == str(path)
    assert 1 <= int(line) <= len(LINES) + 1
    assert "cut short" in error.message
    assert "again" in error.remedy


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_uncompressed_file_named_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(JSONL)
    assert failure(path).place == f"{path}:1"


def test_zstd_without_its_package_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what Python itself does for a module that must not be found
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"")
    with pytest.raises(EnvironmentProblem) as caught:
        read(path)
    assert "finetune[zstd]" in caught.value.remedy
    assert caught.value.place == str(path)


def test_compressed_file_named_plain(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(JSONL))
    assert "gzip" in failure(path).message


def test_compressed_parquet_is_no_data_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(b"")
    assert "'.parquet.gz'" in failure(path).message


def test_names_of_data_files_agree_with_the_recipe() -> None:
    for suffix in DATA_SUFFIXES:
        assert is_data_file(f"a{suffix}")
        assert DATA_FILE.search(f"a{suffix.upper()}")
    assert all(is_data_file(f"a.jsonl{suffix}") for suffix in COMPRESSED_SUFFIXES)
    assert not is_data_file("a.gz")
    assert not is_data_file("README.md")


# Encodings


def test_invalid_utf8_is_placed_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(JSONL + b'{"text": "caf\xe9"}\n')
    error = failure(path)
    assert error.place == f"{path}:4001"
    assert f"byte 0xe9 at byte offset {len(JSONL) + 13} (line 4001)" in error.message


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.csv", "a.jsonl"])
def test_invalid_utf8_in_every_kind_of_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes({"a.json": b'[{"t":\n"\xff"}]', "a.jsonl": b'{"a": 1}\n\xff'}.get(name, b"a\n\xff\n"))
    error = failure(path)
    assert error.place == f"{path}:2"
    assert "byte 0xff" in error.message


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes('[{"text": "some words"}]'.encode(encoding))
    error = failure(path)
    assert encoding[:6].upper() in error.message
    assert "iconv" in error.remedy
    assert error.place == f"{path}:1"


# JSON that other readers take


@pytest.mark.parametrize(
    ("value", "words", "remedy"),
    [
        ("NaN", "NaN is no JSON value", "null"),
        ("-Infinity", "-Infinity is no JSON value", "null"),
        ("1e999", "too large for a float", "as a string"),
        ("1e-400", "1e-400' is too small for a float and would become 0", "Write 0"),
        ("9" * 5000, "the integer '99999", "as a string"),
        ('{"b": 1, "c": 2, "b": 3}', "the key 'b' stands twice", "Keep one"),
        ('{"b": ["x\\ud83d"]}', "a.b[0] holds half of a surrogate pair at character 1", "whole characters"),
        ('{"\\uDC00": 1}', "half of a surrogate pair", "whole characters"),
        ("[" * 100_000, "nested too deeply", "less deeply"),
        ("'x'", "Expecting value", "JSON"),
    ],
    ids=["nan", "infinity", "float", "underflow", "digits", "key-twice", "half", "half-key", "deep", "quotes"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_refused_json(tmp_path: Path, name: str, value: str, words: str, remedy: str) -> None:
    path = tmp_path / name
    record = f'{{"a": {value}}}'
    path.write_text(f'{{"a": 1}}\n{record}\n' if name == "a.jsonl" else f'[{{"a": 1}},\n{record}]', encoding="utf-8")
    error = failure(path)
    assert error.place == f"{path}:2"
    assert words in error.message
    assert remedy in error.remedy
    assert len(error.message) < 300


def test_zeros_of_any_writing_are_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": [0.0, -0.00, 0e5, 0.0e-400, 5e-324]}', encoding="utf-8")
    assert read(path) == [{"a": [0, 0, 0, 0, 5e-324]}]


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}', encoding="utf-8")
    assert read(path) == [{"a": "\U0001f600"}]


def test_json_array_named_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('[{"a": 1}]', encoding="utf-8")
    assert "name it .json" in failure(path).remedy
    path.write_text('[\n  {"a": 1}\n]', encoding="utf-8")
    assert "name it .json" in failure(path).remedy


# Size


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_line_of_50_megabytes_is_refused_in_bounded_time(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    record = b'{"text": "' + b"x" * 50_000_000 + b'"}'
    body = {"a.json": b"[" + record + b"]", "a.csv": b"text\n" + record}.get(name, record)
    path.write_bytes(gzip.compress(body, 1) if name.endswith("gz") else body)
    started = time.monotonic()
    error = failure(path)
    assert time.monotonic() - started < 10
    assert f"longer than {MAX_RECORD_BYTES:,}" in error.message
    assert error.place.startswith(f"{path}:")


def test_line_just_within_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (MAX_RECORD_BYTES - 20) + b'"}\n{"text": "y"}\n')
    assert len(read(path)) == 2


# What is no file


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.txt", "a.jsonl.gz"])
def test_pipe_is_refused_and_does_not_hang(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    error = failure(path)
    assert error.place == str(path)
    assert "no regular file" in error.message


def test_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to("/dev/zero")
    assert "no regular file" in failure(path).message


def test_links_in_a_circle_do_not_suggest_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(path)
    error = failure(path)
    assert "circle" in error.message
    assert "Did you mean" not in error.remedy


def test_link_to_nothing_says_where_it_points(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to(tmp_path / "gone.jsonl")
    error = failure(path)
    assert "leads to no file" in error.message
    assert "gone.jsonl" in error.remedy


def test_name_beyond_255_characters(tmp_path: Path) -> None:
    error = failure(tmp_path / f"{'x' * 300}.jsonl")
    assert "longer than the file system allows" in error.message


def test_name_with_a_nul(tmp_path: Path) -> None:
    assert "cannot be used" in failure(tmp_path / "a\0.jsonl").message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch(mode=0)
    assert "may not be read" in failure(path).message


# Tables


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_ragged_rows_are_placed_by_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = 'a,b\n"two\nlines",2\n1,2,3\n'
    path.write_text(text.replace(",", "\t") if name == "a.tsv" else text, encoding="utf-8")
    error = failure(path)
    assert error.place == f"{path}:4"
    assert "row 2 (ending on line 4) has 3 fields, the header has 2" in error.message


def test_tsv_keeps_commas_quotes_and_a_byte_order_mark_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes('\ufeffinstruction\toutput\n"a\tb, ""c"""\td, e\n'.encode())
    assert read(path) == [{"instruction": 'a\tb, "c"', "output": "d, e"}]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9], ids=["empty", "third", "most"])
def test_table_cut_short(tmp_path: Path, kind: str, share: float) -> None:
    path = tmp_path / f"a.{'arrow' if kind == 'stream' else kind}"
    write_table(path, kind)
    body = path.read_bytes()
    path.write_bytes(body[: int(len(body) * share)])
    error = failure(path)
    assert error.place.startswith(str(path))
    assert ("broken" in error.message and "again" in error.remedy) or "no records" in error.message


def write_table(path: Path, kind: str, records: list = LINES) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(records)
    if kind == "parquet":
        pq.write_table(table, path)
        return
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=len(records) // 4)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_tables_are_read_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{'arrow' if kind == 'stream' else kind}"
    write_table(path, kind)
    assert read(path) == LINES


def test_arrow_drops_the_keys_that_it_fills_down_to_tool_arguments(tmp_path: Path) -> None:
    """P25: two calls with other arguments, stored in one column, must not get each other's as null."""
    import pyarrow as pa

    calls = [
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Rome"}}}]}
            ]
        },
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"day": 1}}}]}]},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    table = pa.Table.from_pylist(calls)
    assert "day" in str(table.schema)
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    assert read(path) == calls


def test_arrow_stream_cut_between_two_batches(tmp_path: Path) -> None:
    """Arrow reads such a file without a complaint, and the rows that are missing would vanish."""
    path = tmp_path / "a.arrow"
    write_table(path, "stream")
    path.write_bytes(path.read_bytes()[:-8])
    error = failure(path)
    assert "no end mark" in error.message
    assert error.place == f"{path} (record {len(LINES) + 1})"


@pytest.mark.parametrize(
    ("name", "header", "words"),
    [
        ("a.csv", "instruction;output", "semicolons"),
        ("a.csv", "instruction\toutput", "tabs"),
        ("a.tsv", "instruction,output", "commas"),
    ],
)
def test_other_separator_than_the_name_says(tmp_path: Path, name: str, header: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(f"{header}\nx\n", encoding="utf-8")
    error = failure(path)
    assert error.place == f"{path}:1"
    assert f"{words} separate columns" in error.message


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream", "gz", "zst"])
def test_no_cut_loses_records_in_silence(tmp_path: Path, kind: str) -> None:
    """Wherever a copy broke off, the file is refused; the rows before the cut would look like all there are."""
    suffix = {"stream": "arrow", "gz": "jsonl.gz", "zst": "jsonl.zst"}.get(kind, kind)
    path = tmp_path / f"a.{suffix}"
    body = b"".join(JSONL.splitlines(keepends=True)[:5])
    if kind in ("gz", "zst"):
        path.write_bytes(gzip.compress(body) if kind == "gz" else zstd(body))
    else:
        write_table(path, kind, LINES[:40])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read(path)
