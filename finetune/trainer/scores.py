"""Scores of generated answers against references: `exact_match`, or a user's Python file."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from finetune.errors import RecipeError

Score = Callable[[str, str], float]
"""Takes the prediction and the reference; returns a number, larger is better."""


def exact_match(prediction: str, reference: str) -> float:
    """Returns 1.0 if both are the same text, white space at the ends aside, else 0.0."""
    return float(prediction.strip() == reference.strip())


def load_scores(names: Sequence[str]) -> dict[str, Score]:
    """Returns the scores of a recipe by name; a file's name is its stem.

    Raises:
        RecipeError: a file cannot be run or defines no `score(prediction, reference)`.
    """
    return {Path(name).stem: exact_match if name == "exact_match" else _from_file(Path(name)) for name in names}


def mean_score(score: Score, predictions: Sequence[str], references: Sequence[str]) -> float:
    """Returns the mean of `score` over the pairs, of which there must be one at least.

    Raises:
        RecipeError: the user's function fails, or returns something that is not a number.
    """
    values = []
    for number, (prediction, reference) in enumerate(zip(predictions, references, strict=True), start=1):
        try:
            value = float(score(prediction, reference))
            if not math.isfinite(value):
                raise ValueError(f"it returned {value}")
            values.append(value)
        except (Exception, SystemExit) as error:  # the user's code may raise what it likes; it is told, not hidden
            raise RecipeError(
                f"the metric fails on held-out answer {number}: {type(error).__name__}: {error}",
                place=f"evaluation.metrics: {score.__code__.co_filename}" if hasattr(score, "__code__") else "",
                remedy=f"It was given the prediction {prediction[:80]!r} and the reference {reference[:80]!r}.",
            ) from error
    return sum(values) / len(values)


def _from_file(path: Path) -> Score:
    place = f"evaluation.metrics: {path}"
    remedy = "Define `def score(prediction: str, reference: str) -> float:` in the file."
    spec = importlib.util.spec_from_file_location(f"finetune_metric_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RecipeError("the metric's file is not a Python file", place=place, remedy=remedy)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise whatever it likes; it is told, not hidden
        what = f"the metric's file cannot be loaded: {type(error).__name__}: {error}"
        raise RecipeError(what, place=place, remedy=remedy) from error
    score = getattr(module, "score", None)
    if not callable(score):
        raise RecipeError("the metric's file defines no function `score`", place=place, remedy=remedy)
    return cast(Score, score)
