"""What a rule finds wrong with a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from finetune.recipe.locate import Plain
from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Violation:
    """A broken rule."""

    keys: tuple[str, ...]
    """The key that is wrong, then others that take part; the first one written in a file gives the place."""
    found: Plain
    allowed: str
    reason: str
    remedy: str


Rule = Callable[[Recipe], Violation | None]
