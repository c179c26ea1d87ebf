"""The view of a running training: a live panel on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.trainer.callbacks.metrics_log import log_kind

_SPARK_LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SPARK_WIDTH = 24
_REFRESH_SECONDS = 0.25
_FIRST_LINES = 5
_LINE_SECONDS = 5.0
_LINES_A_RUN = 20


class ProgressCallback(TrainerCallback):
    """Shows step, loss, rate, memory and time left. It reads the logs and changes nothing.

    The live panel is drawn from the training loop, without a thread of its own: a data loader's worker that is forked
    while another thread holds the console's lock would wait for it for ever.

    Args:
        console: where to print; `console.is_terminal` chooses between the panel and lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._state: TrainerState | None = None
        self._latest: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=200)
        self._step_times: deque[tuple[int, float]] = deque(maxlen=50)
        self._started = time.monotonic()
        self._drawn = 0.0
        self._num_lines = 0
        self._printed_at = 0.0
        self._printed_step = -1

    def close(self) -> None:
        """Ends the live panel, for a run that an exception ends; harmless when there is none."""
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.stop()
            self._live = None

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
        self._step_times.append((state.global_step, self._started))
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._state is None:
            return
        if len(self._step_times) == 1 and state.global_step > self._step_times[0][0]:
            # The first step compiles and allocates; the time left is told from the steps after it.
            self._step_times.clear()
        self._step_times.append((state.global_step, time.monotonic()))
        self._draw()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._draw()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._draw()

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
        if kind == "eval":
            self._console.print(_eval_line(logs, step=state.global_step), highlight=False)
        elif kind == "train":
            self._latest = dict(logs)
            loss = _number(logs.get("loss"))
            if loss is not None and math.isfinite(loss):
                self._losses.append(loss)
            if self._live is not None:
                self._draw(now=True)
            elif self._is_line_due(state):
                self._print_line(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._live is not None:
            self.close()
        elif self._latest and state.is_world_process_zero and self._printed_step != state.global_step:
            self._print_line(state)

    def _is_line_due(self, state: TrainerState) -> bool:
        if self._num_lines < _FIRST_LINES or state.global_step >= state.max_steps:
            return True
        step_gap = max(1, state.max_steps // _LINES_A_RUN)
        is_far = state.global_step - self._printed_step >= step_gap
        return is_far and time.monotonic() - self._printed_at >= _LINE_SECONDS

    def _print_line(self, state: TrainerState) -> None:
        parts = [
            f"step {state.global_step}/{state.max_steps}",
            *(f"{name} {text}" for name, text in self._facts()),
            self._times(),
        ]
        self._console.print("  ".join(parts), highlight=False, soft_wrap=True, markup=False)
        self._num_lines += 1
        self._printed_at = time.monotonic()
        self._printed_step = state.global_step

    def _draw(self, *, now: bool = False) -> None:
        if self._live is None:
            return
        if now or time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._drawn = time.monotonic()
            self._live.update(self._panel(), refresh=True)

    def _facts(self) -> list[tuple[str, str]]:
        """Returns the names and texts of what the latest log tells, in the order they are shown."""
        logs = self._latest
        facts: list[tuple[str, str]] = []
        for key, name, form in _SHOWN:
            value = _number(logs.get(key))
            if value is not None and not (key == "peak_memory_bytes" and value == 0):
                facts.append((name, form(value)))
        return facts

    def _times(self) -> str:
        """Returns the time since the start of training and, once steps tell it, the time left."""
        left = self._seconds_left()
        elapsed = f"elapsed {_duration(time.monotonic() - self._started)}"
        return elapsed if left is None else f"{elapsed}  left {_duration(left)}"

    def _seconds_left(self) -> float | None:
        if self._state is None or len(self._step_times) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._step_times[0], self._step_times[-1]
        remaining = max(0, self._state.max_steps - self._state.global_step)
        return remaining * (last_time - first_time) / (last_step - first_step) if last_step > first_step else None

    def _panel(self) -> Panel:
        step = self._state.global_step if self._state else 0
        total = max(1, self._state.max_steps if self._state else 1)
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(ProgressBar(total=total, completed=step), f"step {step}/{total}  {100 * step / total:.0f}%")
        # Columns as wide as their widest value keep the panel still while the numbers change.
        facts = Table.grid(padding=(0, 3))
        shown = self._facts()
        num_columns = max(1, min(len(shown), (self._console.width - 4) // 15))
        for start in range(0, len(shown), num_columns):
            chunk = shown[start : start + num_columns]
            facts.add_row(*(Text(name, style="dim") for name, _ in chunk))
            facts.add_row(*(Text(text.ljust(10), style="bold") for _, text in chunk))
        trend = Text()
        if len(self._losses) > 1 and not self._console.options.ascii_only:
            trend.append(sparkline(list(self._losses), width=_SPARK_WIDTH), style="cyan")
            trend.append("  loss", style="dim")
        head.add_row(trend, self._times())
        return Panel(Group(head, facts), title="training", title_align="left", border_style="dim")


def sparkline(values: list[float], *, width: int) -> str:
    """Returns the course of `values` as at most `width` block characters, each the mean of its share of them."""
    num_bins = min(width, len(values))
    edges = [index * len(values) // num_bins for index in range(num_bins + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(_SPARK_LEVELS) - 1
    return "".join(_SPARK_LEVELS[round((mean - low) / span * top) if span > 0 else 0] for mean in means)


def _number(value: object) -> float | None:
    """Returns a number, NaN included, as float; None for what is missing or not a number."""
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    return float(plain) if isinstance(plain, int | float) and not isinstance(plain, bool) else None


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _eval_line(logs: Mapping[str, Any], *, step: int) -> Text:
    hidden = {"eval_runtime", "eval_tokens", "eval_seconds", "eval_model_preparation_time"}
    parts = [f"eval at step {step}"]
    for key, value in logs.items():
        number = _number(value)
        if key.startswith("eval_") and key not in hidden and not key.endswith("_per_second") and number is not None:
            parts.append(f"{key.removeprefix('eval_')} {number:.4f}")
    return Text("  ".join(parts), style="green")


_SHOWN = (
    ("loss", "loss", "{:.4f}".format),
    ("aux_loss", "aux loss", "{:.4f}".format),
    ("learning_rate", "lr", "{:.2e}".format),
    ("grad_norm", "grad norm", "{:.3g}".format),
    ("real_tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("peak_memory_bytes", "peak", lambda value: f"{value / 1024**3:.1f} GiB"),
)
