"""What is wrong with a recipe, one line each, gathered into one `RecipeError`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from finetune.errors import RecipeError
from finetune.recipe.locate import KeyPath, Place, Plain

LONGEST_FOUND = 160
"""Characters of a value shown in a message; a path should fit whole."""


@dataclass(frozen=True)
class Problem:
    """One fault, where it is, and what to change."""

    place: Place
    message: str
    remedy: str


def recipe_error(problems: Iterable[Problem]) -> RecipeError:
    """Joins problems, in the order they are written in, into one error.

    The first problem's place is the error's place; every further one stands on its own line behind its own place.
    """
    ordered = sorted(problems, key=lambda problem: problem.place)
    first, rest = ordered[0], ordered[1:]
    message = "\n".join([first.message, *(f"{problem.place}: {problem.message}" for problem in rest)])
    remedies = list(dict.fromkeys(problem.remedy for problem in ordered))
    return RecipeError(message, place=str(first.place), remedy="\n".join(remedies))


def dotted(path: KeyPath) -> str:
    """Returns a path as overrides write it, such as `data.train.0.path`."""
    return ".".join(str(key) for key in path)


def found(value: Plain) -> str:
    """Describes a value for a message, as YAML shows it, shortened."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return f"a mapping with the keys {', '.join(value)}" if value else "an empty mapping"
    if isinstance(value, list) and (not value or any(isinstance(item, dict | list) for item in value)):
        return f"a list of {len(value)}" if value else "an empty list"
    return shortened(json.dumps(value, ensure_ascii=False))


def shortened(text: str) -> str:
    """Cuts a value that would fill the screen."""
    return text if len(text) <= LONGEST_FOUND else text[: LONGEST_FOUND - 4] + " ..."


def choices(options: Sequence[str], *, last_word: str = "or") -> str:
    """Joins options to a phrase: `a`, `b` or `c`."""
    if len(options) < 2:
        return "".join(options)
    return f"{', '.join(options[:-1])} {last_word} {options[-1]}"
