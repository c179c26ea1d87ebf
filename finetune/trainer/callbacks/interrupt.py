"""Ctrl-C and SIGTERM end a run at the end of its step, with a checkpoint written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Leaves SIGINT and SIGTERM without effect for the length of a `with` block; for a few seconds of writing at most.

    Outside the main thread, where signals do not arrive, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not set from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class InterruptCallback(TrainerCallback):
    """Asks the trainer to save and stop after the first signal; a further SIGINT raises KeyboardInterrupt at once.

    Handlers are installed when training begins and put back when it ends. As an exception skips the trainer's end
    event, wrap the call: `with interrupt: trainer.train()`. Outside the main thread, where Python allows no handlers,
    nothing is installed.

    Args:
        notify: prints one line for the user.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.interrupted = False
        self._notify = notify
        self._pending_message: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM; does nothing where that is done already or not allowed."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        while self._previous:
            number, handler = self._previous.popitem()
            # None stands for a handler that was not set from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> InterruptCallback:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.interrupted:
            self.interrupted = True
            self._pending_message = f"{name}: saving and stopping after this step (Ctrl-C again quits without saving)"
            self._announce()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _announce(self) -> None:
        if self._pending_message is None:
            return
        try:
            self._notify(self._pending_message)
        except RuntimeError:
            # The signal came in the middle of a write to the same stream, which Python refuses to enter twice. The
            # message stays pending and is printed when the step ends.
            return
        self._pending_message = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.install()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.interrupted:
            self._announce()
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.restore()
