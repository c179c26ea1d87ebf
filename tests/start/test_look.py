"""The look at the data says what a run would find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from finetune.errors import DataError, RecipeError
from finetune.start import look as module
from finetune.start.look import Look, Unmapped, look_at


def table(path: Path, header: str, *rows: str) -> str:
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def seen(path: str, **columns: str) -> Look:
    look = look_at(path, columns=columns)
    assert isinstance(look, Look)
    return look


def test_a_known_format_is_recognised(tmp_path: Path) -> None:
    look = seen(str(tiny.make_chat_file(tmp_path / "a.jsonl", rows=12)))
    assert (look.format, look.num_rows, look.is_whole, look.columns) == ("messages", 12, True, {})


@pytest.mark.parametrize(
    ("header", "guess"),
    [
        ("question,answer", {"instruction": "question", "output": "answer"}),
        ("id,Query,Response", {"instruction": "Query", "output": "Response"}),
        ("prompt,answer", {"instruction": "prompt", "output": "answer"}),
        ("id,content", {"text": "content"}),
        ("Frage,Antwort", {}),
        ("question,source", {}),
    ],
)
def test_other_columns_are_guessed_where_their_names_say_it(tmp_path: Path, header: str, guess: dict[str, str]) -> None:
    row = ",".join("x" * header.count(",") + "x")
    look = look_at(table(tmp_path / "a.csv", header, row), columns={})
    assert isinstance(look, Unmapped)
    assert look.guess == guess
    assert look.columns == tuple(header.split(","))


def test_given_columns_are_used(tmp_path: Path) -> None:
    look = seen(table(tmp_path / "a.csv", "Frage,Antwort", "a,b", "c,d"), instruction="Frage", output="Antwort")
    assert (look.format, look.num_rows) == ("alpaca", 2)
    assert look.columns == {"instruction": "Frage", "output": "Antwort"}


def test_wrong_columns_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "Frage,Antwort", "a,b")
    with pytest.raises(DataError, match="a column that the record lacks"):
        look_at(path, columns={"instruction": "Frage", "output": "Antwrt"})
    with pytest.raises(RecipeError, match="no role") as caught:
        look_at(path, columns={"instructions": "Frage"})
    assert caught.value.remedy == "Did you mean instruction?"


def test_a_first_record_that_cannot_be_used_stops_and_later_ones_are_counted(tmp_path: Path) -> None:
    good, bad = {"instruction": "a", "output": "b"}, {"instruction": "a", "output": ""}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (good, bad, good, bad)))
    look = seen(str(path))
    assert (look.num_rows, look.num_faulty) == (4, 2)
    assert look.first_fault == f"{path}:2: output is empty"
    path.write_text(json.dumps(bad) + "\n")
    with pytest.raises(DataError, match="output is empty"):
        look_at(str(path), columns={})


def test_preference_pairs_are_refused_by_the_data_layer_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(DataError, match="preference"):
        look_at(str(path), columns={})


def test_a_long_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 5)
    path = str(tiny.make_chat_file(tmp_path / "a.jsonl", rows=6))
    look = seen(path)
    assert (look.num_rows, look.is_whole) == (5, False)
    monkeypatch.setattr(module, "MAX_ROWS", 6)
    assert seen(path).is_whole


def test_the_longest_row_is_estimated_from_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"instruction": "a" * n, "output": "b"} for n in (1, 299, 20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    look = seen(str(path))
    assert look.longest_tokens == 100 + 2 * module.TOKENS_PER_MESSAGE
    assert look.longest_tokens < look.total_tokens < 3 * look.longest_tokens
