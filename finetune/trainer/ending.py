"""What is known of a run when it ends, however it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from finetune.optimizations.apply import Applied
from finetune.run.folder import Status
from finetune.trainer.checks import Check
from finetune.trainer.measurement import Measurement
from finetune.trainer.meter import Meter

NOT_WORSE = "the result is no worse than before training"


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
    applied: list[Applied] = field(default_factory=list)
    """What became of the flags that are settled once the model is there."""
    activation_plan: dict[str, object] = field(default_factory=dict)
    """The plan of the activations in effect; empty where there is none."""
    stopped_early: str = ""
    """Why the run ended before all of its steps, where the recipe asked for that."""
    report: dict[str, Any] = field(default_factory=dict)

    def compare_with_before(self) -> None:
        """Adds a check where the held-out loss of what is delivered is above that of the model before training.

        The best weights too can be worse: the evaluation before the first step is none of theirs.
        """
        before, after = (part.loss if part is not None else None for part in (self.before, self.after))
        if before is not None and after is not None and after > before:
            weights = f"the {self.result['delivered']} weights" if self.result else "the weights"
            detail = f"{weights} are worse than before training: held-out loss {before:.4f} -> {after:.4f}"
            self.checks.append(Check(NOT_WORSE, False, detail))

    def note_training(self, meter: Meter, *, first_step_at: float | None) -> None:
        """Takes over the time of the steps; `first_step_at` is the clock at the end of the first one."""
        self.timings["training_seconds"] = meter.elapsed_seconds
        if meter.elapsed_seconds:
            self.timings["real_tokens_per_second"] = meter.real_tokens / meter.elapsed_seconds
        if first_step_at is not None:
            self.timings["seconds_to_first_step"] = first_step_at - self.started
