"""Passes a training's events on to an experiment tracker, whose failure does not end the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import EnvironmentProblem


class TrackerCallback(TrainerCallback):
    """Wraps the callback of a tracker, as transformers makes it.

    A tracker that cannot start ends the run, before its first step: someone asked for it. One that fails later, such as
    when a server goes away, is told of once and left out of the rest of the run.

    The trainer's end of training is not passed on: the result is measured and logged after it. `close` ends the
    tracker's session in its place, also where the run fails.

    Args:
        name: of the tracker.
        tracker: the callback.
        say: prints a warning.
    """

    def __init__(self, name: str, tracker: TrainerCallback, *, say: Callable[[str], None]) -> None:
        self._name = name
        self._tracker = tracker
        self._say = say
        self._has_started = False
        self._is_off = False
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the last event came with."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._pass_on("on_train_begin", args, state, control, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._pass_on("on_log", args, state, control, **kwargs)

    def close(self) -> None:
        """Ends the tracker's session, if one was begun; nothing may be logged afterwards."""
        if self._last is not None:
            arguments, kwargs = self._last
            self._pass_on("on_train_end", *arguments, **kwargs)
            self._last = None  # it holds the model
        self._is_off = True

    def _pass_on(self, event: str, *arguments: Any, **kwargs: Any) -> None:
        if self._is_off:
            return
        self._last = arguments, {key: value for key, value in kwargs.items() if key != "logs"}
        try:
            getattr(self._tracker, event)(*arguments, **kwargs)
        # A tracker may raise whatever it likes, and some leave the process; it is told, not hidden.
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            if not self._has_started:
                raise EnvironmentProblem(
                    f"the tracker {self._name} cannot start: {what}",
                    place="output.trackers",
                    remedy=f"Set {self._name} up (log in, or choose its offline mode), or remove it from the recipe.",
                ) from error
            self._is_off = True
            self._say(f"the tracker {self._name} failed and gets nothing more of this run: {what}")
        self._has_started = True
