"""Scores of generated answers against references: `exact_match`, or a user's Python file."""

from __future__ import annotations

import importlib.util
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
    """Returns the mean of `score` over the pairs, 0.0 for none."""
    values = [float(score(p, r)) for p, r in zip(predictions, references, strict=True)]
    return sum(values) / len(values) if values else 0.0


def _from_file(path: Path) -> Score:
    place = f"evaluation.metrics: {path}"
    remedy = "Define `def score(prediction: str, reference: str) -> float:` in the file."
    spec = importlib.util.spec_from_file_location(f"finetune_metric_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RecipeError("the metric's file is not a Python file", place=place, remedy=remedy)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError, OSError) as error:
        what = f"the metric's file cannot be loaded: {type(error).__name__}: {error}"
        raise RecipeError(what, place=place, remedy=remedy) from error
    score = getattr(module, "score", None)
    if not callable(score):
        raise RecipeError("the metric's file defines no function `score`", place=place, remedy=remedy)
    return cast(Score, score)
