"""Typed errors: each names what is wrong, where, and what to do about it.

The exit code of the command line is the error's class; `docs/quickstart.md` lists them as a contract.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar


class ExitCode(IntEnum):
    """What the process returns; scripts rely on these numbers."""

    DONE = 0
    RECIPE = 2
    DATA = 3
    ENVIRONMENT = 4
    OUT_OF_MEMORY = 5
    GATE = 6
    INTERRUPTED = 130


class FinetuneError(Exception):
    """Base of every error that a user can mend.

    Args:
        message: what is wrong, with the value found.
        place: the file, line and column, key, or folder that it was found in; empty when there is none.
        remedy: what to change or type next, one remedy a line; never empty.
    """

    exit_code: ClassVar[ExitCode]

    def __init__(self, message: str, *, place: str = "", remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.place}: {self.message}" if self.place else self.message
        return f"{head}\n{self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets an error pass between processes; the default would call the class without its keywords."""
        return _rebuilt, (type(self), self.args, self.__dict__)

    def as_dict(self) -> dict[str, str | int]:
        """Returns the error as the JSON object that `--json` prints."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "place": self.place,
            "remedy": self.remedy,
            "exit_code": int(self.exit_code),
        }


def _rebuilt(kind: type[FinetuneError], args: tuple[Any, ...], state: dict[str, Any]) -> FinetuneError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RecipeError(FinetuneError):
    """The recipe or the command's arguments are wrong."""

    exit_code = ExitCode.RECIPE


class DataError(FinetuneError):
    """A data file is missing, broken, or does not hold what the recipe says.

    Args:
        kind: the message without what differs from record to record, under which such errors are counted together;
            the message itself where nothing does.
        text: the beginning of the record, where it cannot be read as one.
    """

    exit_code = ExitCode.DATA

    def __init__(self, message: str, *, place: str = "", remedy: str, kind: str = "", text: str = "") -> None:
        super().__init__(message, place=place, remedy=remedy)
        self.kind = kind or message
        self.text = text


class EnvironmentProblem(FinetuneError):
    """The machine lacks something: a device, a package, disk space, a model's files."""

    exit_code = ExitCode.ENVIRONMENT


class OutOfMemory(FinetuneError):
    """The device ran out of memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class GateStopped(FinetuneError):
    """The program stopped the run itself: a loss that is not finite, a diverged run, a failed verification."""

    exit_code = ExitCode.GATE


class Interrupted(FinetuneError):
    """The user stopped the run; everything needed to continue was saved."""

    exit_code = ExitCode.INTERRUPTED
