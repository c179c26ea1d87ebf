"""The view of a running training: a dashboard on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.trainer.callbacks.dashboard import (
    Sample,
    View,
    format_clock,
    latest_facts,
    plain_number,
    render_dashboard,
)
from finetune.trainer.callbacks.live_view import LiveView
from finetune.trainer.callbacks.metrics_log import log_kind

_FIRST_LINES = 5
_LINE_SECONDS = 5.0
_LINES_A_RUN = 20


class ProgressCallback(TrainerCallback):
    """Shows step, loss, rate, memory, time left and the latest answer. It reads the logs and changes nothing.

    Args:
        console: where to print.
        is_live: draw the dashboard, for a terminal; otherwise print lines.
        title: what the dashboard is headed with.
        latest_sample: gives the newest answer of the model, or None; asked for whenever the dashboard is drawn.
        history: earlier records of `metrics.jsonl`, of a run that is continued.
    """

    def __init__(
        self,
        console: Console,
        *,
        is_live: bool = False,
        title: str = "training",
        latest_sample: Callable[[], Sample | None] = lambda: None,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._console = console
        self._is_live = is_live
        self._view = View(title)
        self._latest_sample = latest_sample
        self._live = LiveView(console, self._render)
        self._state: TrainerState | None = None
        self._step_times: deque[tuple[int, float]] = deque(maxlen=50)
        self._started = time.monotonic()
        self._num_lines = 0
        self._printed_at = 0.0
        self._printed_step = -1
        for record in history:
            self._keep(record, step=record.get("step", 0))
        self._view.latest = {}

    def close(self) -> None:
        """Ends the dashboard, for a run that an exception ends; harmless when there is none."""
        self._live.stop()

    def __enter__(self) -> ProgressCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._state = state
        self._started = time.monotonic()
        if self._is_live:
            self._live.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._state is None:
            return
        # From the end of the first step on: that one compiles and allocates, and tells nothing of the others.
        self._step_times.append((state.global_step, time.monotonic()))
        if not control.should_log:  # else the figures of this step are about to come, and are drawn then
            self._live.draw()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._live.draw()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._live.draw()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self._state = state
        kind = log_kind(logs)
        self._keep({**logs, "kind": kind}, step=state.global_step)
        if kind in ("eval", "scores"):
            self._console.print(_eval_line(logs, step=state.global_step), highlight=False)
        elif kind == "train":
            if self._live.is_on:
                self._live.draw()
            elif self._is_line_due(state):
                self._print_line(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._live.is_on:
            self.close()
        elif self._view.latest and state.is_world_process_zero and self._printed_step != state.global_step:
            self._print_line(state)

    def _keep(self, record: Mapping[str, Any], *, step: int) -> None:
        """Takes a record's losses into the curves."""
        kind = record.get("kind")
        loss = plain_number(record.get("eval_loss" if kind == "eval" else "loss"))
        if kind == "train":
            self._view.latest = dict(record)
        if loss is not None and math.isfinite(loss):
            (self._view.held_out if kind == "eval" else self._view.training).add(step, loss)

    def _is_line_due(self, state: TrainerState) -> bool:
        if self._num_lines < _FIRST_LINES or state.global_step >= state.max_steps:
            return True
        step_gap = max(1, state.max_steps // _LINES_A_RUN)
        is_far = state.global_step - self._printed_step >= step_gap
        return is_far and time.monotonic() - self._printed_at >= _LINE_SECONDS

    def _print_line(self, state: TrainerState) -> None:
        left = self._seconds_left()
        parts = [
            f"step {state.global_step}/{state.max_steps}",
            *(f"{name} {text}" for name, text in latest_facts(self._view.latest).items() if name in _IN_LINES),
            f"elapsed {format_clock(time.monotonic() - self._started)}",
            *([] if left is None else [f"left {format_clock(left)}"]),
        ]
        self._console.print("  ".join(parts), highlight=False, soft_wrap=True, markup=False)
        self._num_lines += 1
        self._printed_at = time.monotonic()
        self._printed_step = state.global_step

    def _seconds_left(self) -> float | None:
        if self._state is None or len(self._step_times) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._step_times[0], self._step_times[-1]
        remaining = max(0, self._state.max_steps - self._state.global_step)
        return remaining * (last_time - first_time) / (last_step - first_step) if last_step > first_step else None

    def _render(self) -> RenderableType:
        view = self._view
        if self._state is not None:
            view.step, view.total_steps = self._state.global_step, max(1, self._state.max_steps)
        view.elapsed_seconds = time.monotonic() - self._started
        view.seconds_left = self._seconds_left()
        view.sample = self._latest_sample()
        width, height = self._console.size
        return render_dashboard(view, width=width, height=height, ascii_only=self._console.options.ascii_only)


def _eval_line(logs: Mapping[str, Any], *, step: int) -> Text:
    hidden = {"eval_runtime", "eval_tokens", "eval_seconds", "eval_model_preparation_time"}
    parts = [f"eval at step {step}"]
    for key, value in logs.items():
        number = plain_number(value)
        if key.startswith("eval_") and key not in hidden and not key.endswith("_per_second") and number is not None:
            parts.append(f"{key.removeprefix('eval_')} {number:.4f}")
    return Text("  ".join(parts), style="green")


_IN_LINES = ("loss", "aux loss", "lr", "grad norm", "tokens/s", "peak")
