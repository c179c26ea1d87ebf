"""Scores: exact match, a user's file, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import RecipeError
from finetune.trainer.scores import exact_match, load_scores, mean_score


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [("a", "a", 1.0), (" a\n", "a", 1.0), ("a b", "ab", 0.0), ("", "", 1.0), ("A", "a", 0.0)],
)
def test_exact_match(prediction: str, reference: str, score: float) -> None:
    assert exact_match(prediction, reference) == score


def test_the_mean_is_over_pairs() -> None:
    assert mean_score(exact_match, ["a", "b", "c", "d"], ["a", "x", "c", "y"]) == 0.5


def test_a_score_that_fails_or_is_no_number_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    for body, problem in (("1 / 0", "ZeroDivisionError"), ("'many'", "ValueError"), ("None", "TypeError")):
        path.write_text(f"def score(prediction, reference):\n    return {body}\n")
        with pytest.raises(RecipeError) as caught:
            mean_score(load_scores([str(path)])["bad"], ["a"], ["b"])
        assert problem in caught.value.message
        assert str(path) in caught.value.place


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text("def score(prediction, reference):\n    return 0.5\n")
    scores = load_scores(["exact_match", str(path)])
    assert list(scores) == ["exact_match", "half"]
    assert scores["half"]("a", "b") == 0.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [("x = 1\n", "no function `score`"), ("score = 3\n", "no function"), ("def score(:\n", "SyntaxError"),
     ("import nothing_of_that_name\n", "nothing_of_that_name"), ("1 + 'a'\n", "TypeError")],
    ids=["no score", "not a function", "syntax", "import", "fails"],
)  # fmt: skip
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "metric.py"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_scores([str(path)])
    assert problem in caught.value.message
    assert str(path) in caught.value.place
    assert "def score" in caught.value.remedy
