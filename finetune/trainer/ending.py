"""What is known of a run when it ends, however it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from finetune.run.folder import Status
from finetune.trainer.checks import Check
from finetune.trainer.measurement import Measurement
from finetune.trainer.meter import Meter


@dataclass
class Ending:
    """Filled while the run goes on; the report is made of it.

    Times are seconds from `started`, the clock (`time.perf_counter`) when the command began.
    """

    started: float
    status: Status = "failed"
    message: str = ""
    before: Measurement | None = None
    after: Measurement | None = None
    checks: list[Check] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    """What `result.json` holds; empty until there is a result."""
    stopped_early: str = ""
    """Why the run ended before all of its steps, where the recipe asked for that."""
    report: dict[str, Any] = field(default_factory=dict)

    def note_training(self, meter: Meter, *, first_step_at: float | None) -> None:
        """Takes over the time of the steps; `first_step_at` is the clock at the end of the first one."""
        self.timings["training_seconds"] = meter.elapsed_seconds
        if meter.elapsed_seconds:
            self.timings["real_tokens_per_second"] = meter.real_tokens / meter.elapsed_seconds
        if first_step_at is not None:
            self.timings["seconds_to_first_step"] = first_step_at - self.started
