"""Watches the logged losses and gradient norms: warns of spikes, and stops a run that diverged.

It reads values that were logged anyway, so it costs no wait for the device.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import GateStopped
from finetune.run.checkpoints import what_is_left
from finetune.trainer.callbacks.metrics_log import RecordWriter

WINDOW = 50
"""Values that a spike is compared with."""
FEWEST = 10
"""Values below which nothing is called a spike: the first steps of a run are unlike the rest."""
LEVEL_WINDOW = 50
"""Losses of which four of five are not above the level that a run has reached. With fewer, a run on mixed data would
now and then reach the level of its easy half by luck, and its hard half be taken for a divergence."""
FIRST_LEVEL_WINDOW = 20
"""The first losses, which make a level before there is a window of them."""
FEWEST_FOR_A_LEVEL = 3
LEVEL_QUANTILE = 0.8
DEVIATIONS_PER_MAD = 1.4826
"""A normal spread's standard deviation over its median absolute deviation."""
SMALLEST_SHARE = 0.05
"""A deviation is at least this share of the median: values that hardly vary would make a spike of any change."""


class SpikeDetector:
    """Compares each value with the median of those before it, in robust standard deviations."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._is_in_spike = False

    def add(self, value: float) -> float | None:
        """Takes a value; returns the median before it where a spike begins, else None. One spike is told once."""
        median = statistics.median(self._values) if len(self._values) >= FEWEST else None
        was_in_spike, self._is_in_spike = self._is_in_spike, False
        if median is not None:
            spread = statistics.median(abs(each - median) for each in self._values) * DEVIATIONS_PER_MAD
            deviation = max(spread, SMALLEST_SHARE * abs(median))
            self._is_in_spike = value > median + self._threshold * deviation
        self._values.append(value)
        return median if self._is_in_spike and not was_in_spike else None


class DivergenceDetector:
    """Tells when the loss stays far above the level that the run had reached.

    The level is the lowest value that four of five losses did not exceed, of the first `FIRST_LEVEL_WINDOW` and of any
    `LEVEL_WINDOW` in a row; before there are so many, of those there are. So it lies where the hard part of mixed data
    lies, if that is more than a fifth of them. Losses more than the margin above the level take part in it only once a
    lower one has come after them, so a diverged run cannot raise its own level. What climbs slowly within the first
    `FIRST_LEVEL_WINDOW` losses raises it.

    Args:
        margin: nats per token above the level.
        num_steps: losses in a row.
    """

    def __init__(self, margin: float, num_steps: int) -> None:
        self._margin = margin
        self._num_steps = num_steps
        self._recent: deque[float] = deque(maxlen=LEVEL_WINDOW)
        self._above: list[float] = []
        self._num_taken = 0
        self.level = math.inf

    def add(self, loss: float) -> bool:
        """Takes a loss; returns whether the run has diverged."""
        if loss > self.level + self._margin:
            self._above.append(loss)
            return len(self._above) >= self._num_steps
        taken, self._above = [*self._above, loss], []
        self._recent.extend(taken)
        self._num_taken += len(taken)
        if self._num_taken < FEWEST_FOR_A_LEVEL:
            return False
        level = sorted(self._recent)[math.ceil(LEVEL_QUANTILE * len(self._recent)) - 1]
        if self._num_taken <= FIRST_LEVEL_WINDOW:
            self.level = level
        elif self._num_taken >= LEVEL_WINDOW:
            self.level = min(self.level, level)
        return False


@dataclass(frozen=True)
class Limits:
    """When to warn and when to stop; None leaves a thing out. `Watch` of the recipe says what each means."""

    loss_spike: float | None
    grad_norm_spike: float | None
    divergence: float | None
    divergence_steps: int


class SpikesCallback(TrainerCallback):
    """Warns of a spike once, records it as a line of kind `spike`, and raises when the run has diverged.

    Args:
        writer: takes the record of a spike.
        say: prints a warning.
        past: the training records that a continued run has behind it, in order.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        writer: RecordWriter,
        say: Callable[[str], None],
        past: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        thresholds = {"loss": limits.loss_spike, "grad_norm": limits.grad_norm_spike}
        self._spikes = {key: SpikeDetector(value) for key, value in thresholds.items() if value is not None}
        self._divergence = (
            DivergenceDetector(limits.divergence, limits.divergence_steps) if limits.divergence is not None else None
        )
        self._limits = limits
        self._writer = writer
        self._say = say
        for record in past:
            self._take(record)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        spikes, is_diverged = self._take(logs)
        for key, median in spikes.items():
            record = {"kind": "spike", "step": state.global_step, "of": key, "value": logs[key], "median": median}
            self._writer.write(record)
            name = key.replace("_", " ")
            self._say(f"{name} {logs[key]:.4g} at step {state.global_step}, where the median before was {median:.4g}")
        if is_diverged and self._divergence is not None:
            raise GateStopped(
                f"the run has diverged: the loss stayed more than {self._limits.divergence:g} above its lowest level "
                f"({self._divergence.level:.4g}) for {self._limits.divergence_steps} logged steps and is "
                f"{logs['loss']:.4g} at step {state.global_step}",
                place="training.watch",
                remedy="Lower training.learning_rate, or raise training.watch.divergence_steps if this was expected. "
                + what_is_left(Path(str(args.output_dir))),
            )

    def _take(self, record: Mapping[str, Any]) -> tuple[dict[str, float], bool]:
        """Takes one training record; returns the medians of the spikes that begin in it, and whether it diverged."""
        finite = {
            key: value
            for key in ("loss", "grad_norm")
            if isinstance(value := record.get(key), int | float) and math.isfinite(value)
        }
        found = {key: self._spikes[key].add(value) for key, value in finite.items() if key in self._spikes}
        is_diverged = self._divergence is not None and "loss" in finite and self._divergence.add(finite["loss"])
        return {key: median for key, median in found.items() if median is not None}, is_diverged
