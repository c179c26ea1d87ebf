"""Small recipes for tests, and the error that a wrong one gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import ExitCode, RecipeError
from finetune.recipe.load import load_recipe

MINIMAL = "model: {path: org/name}\ndata: {train: [{path: a.jsonl}]}\noutput: {dir: out}\n"

Write = Callable[..., Path]


def with_dir(text: str) -> str:
    return MINIMAL.replace("dir: out", f"dir: {text}")


def failure(path: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides=overrides)
    assert caught.value.exit_code == ExitCode.RECIPE
    assert caught.value.remedy
    return caught.value
