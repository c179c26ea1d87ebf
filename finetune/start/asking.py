"""Questions on the terminal: a wrong answer is told with its reason, and asked for again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from finetune.console import Console
from finetune.errors import DataError, RecipeError

Ask = Callable[[str, str | None], str]
"""Asks one question, with a default or None; returns the answer, or the default where the user gives none."""
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A question, the option that answers it as well, and the default."""

    text: str
    option: str
    default: str | None = None


@dataclass(frozen=True)
class Asking:
    """Takes values from options, else from the user, else their defaults.

    Args:
        ask: asks the user; None where nobody can be asked.
    """

    ask: Ask | None
    console: Console

    def taken(self, given: str | None, question: Question, read: Callable[[str], T]) -> T:
        """Returns what `read` makes of the value.

        An answer that `read` refuses is asked for again, so that the earlier answers are not lost. Ctrl-C
        ends it.

        Raises:
            RecipeError: the option is missing where nobody can be asked, or its value is refused.
            DataError: the option's value is refused.
        """
        given = given or (question.default if self.ask is None else None)
        if given is not None:
            return read(given)
        if self.ask is None:
            remedy = f"Give {question.option}; without a terminal nothing can be asked. See: finetune init --help"
            raise RecipeError(f"{question.option} is missing", place="command line", remedy=remedy)
        while True:
            try:
                return read(self.ask(question.text, question.default))
            except (RecipeError, DataError) as error:
                self.console.warning(f"{error.place}: {error.message}. {error.remedy}")

    def choice(self, given: str | None, allowed: Sequence[str], question: Question) -> str:
        """Returns one of a few values, the first by default; one alone is not asked for."""

        def read(value: str) -> str:
            if value not in allowed:
                remedy = f"Use one of: {', '.join(allowed)}."
                raise RecipeError(f"`{value}` is not allowed", place=question.option, remedy=remedy)
            return value

        if len(allowed) == 1 and given is None:
            return allowed[0]
        return self.taken(given, Question(question.text, question.option, allowed[0]), read)
