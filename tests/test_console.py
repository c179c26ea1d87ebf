"""What the console writes of text that it did not choose: nothing that steers a terminal or turns a line around."""

from __future__ import annotations

import unicodedata

import pytest

from finetune.console import Console, ordinal, plural, visible
from finetune.errors import DataError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb\u2066c\u200f", "a\\u202eb\\u2066c\\u200f"),
        ("\x85\x00\x7f\r", "\\x85\\x00\\x7f\\r"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("\u6f22 \u05d0 \u00e9 \U0001f469\u200d\U0001f680", "\u6f22 \u05d0 \u00e9 \U0001f469\u200d\U0001f680"),
        ("\ud800", "\\ud800"),
        ("a\u200bb\u2060c\ufeff", "a\\u200bb\\u2060c\\ufeff"),
        (
            "\u0915\u094d\u200d\u0937 \u0645\u06cc\u200c\u062e a\u00a0b",
            "\u0915\u094d\u200d\u0937 \u0645\u06cc\u200c\u062e a\u00a0b",
        ),
    ],
)
def test_characters_that_cannot_be_seen_are_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_every_control_and_direction_mark_is_covered() -> None:
    """By the properties of Unicode itself: category Cc, and the marks that turn directions."""
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for number in range(0x3000):
        character = chr(number)
        if character in "\t\n":
            continue
        is_control = unicodedata.category(character) == "Cc"
        if is_control or unicodedata.bidirectional(character) in turning or number in (0x200E, 0x200F, 0x061C):
            assert visible(character) == ascii(character)[1:-1], hex(number)


def test_errors_spell_out_what_they_quote(capsys: pytest.CaptureFixture[str]) -> None:
    Console().error(DataError("found \u202etxt\x1b[2J", place="a\u2066.jsonl:1", remedy="Rename \x07."))
    shown = capsys.readouterr().err
    assert shown == "error: a\\u2066.jsonl:1: found \\u202etxt\\x1b[2J\nremedy: Rename \\x07.\n"


def test_each_remedy_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Console().error(DataError("two things", remedy="Do this.\nOr that."))
    assert capsys.readouterr().err == "error: two things\nremedy:\n  - Do this.\n  - Or that.\n"


def test_ordinal() -> None:
    shown = [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 111, 122)]
    assert shown == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "111th", "122nd"]


def test_plural() -> None:
    assert plural(1, "row") == "1 row"
    assert [plural(count, "sample") for count in (0, 1, 1234)] == ["0 samples", "1 sample", "1,234 samples"]
    assert plural(2, "micro-batch") == "2 micro-batches"


def test_prose_breaks_between_words_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "steps   " + "several words " * 9 + "a/path/that/stays/whole"
    Console().prose(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("FORCE_COLOR", "1")
    Console().prose(text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50 and all(line.startswith(" " * 8) for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
