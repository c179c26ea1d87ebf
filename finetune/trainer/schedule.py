"""How long a run is: steps, micro-batches, warm-up. Pure arithmetic, done before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from finetune.recipe.schema import TrainingSection


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run, as executed.

    The last step of an epoch may have fewer rows than the others; no row is left out.
    """

    num_rows: int
    rows_per_step: int
    rows_per_micro_batch: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int

    @property
    def micro_batches_per_step(self) -> int:
        """Forward and backward passes of a full step."""
        return self.rows_per_step // self.rows_per_micro_batch

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"micro_batches_per_step": self.micro_batches_per_step}


def learning_rate_factor(step: int, *, schedule: str, plan: StepPlan) -> float:
    """Returns what the peak learning rate is multiplied with in a step, counted from 0; it is never 0.

    The rate rises in equal parts over the warm-up steps and is at its peak in the step after them; from there it
    stays (`constant`), or falls towards the 0 that the step after the last one would have (`linear`, `cosine`). So
    every step trains, also the first of a run with warm-up and the last.
    """
    if step < plan.warmup_steps:
        return (step + 1) / (plan.warmup_steps + 1)
    done = (step - plan.warmup_steps) / max(1, plan.total_steps - plan.warmup_steps)
    if schedule == "constant":
        return 1.0
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def plan_steps(training: TrainingSection, *, num_rows: int) -> StepPlan:
    """Counts the steps of `training` over `num_rows` rows; at least one."""
    steps_per_epoch = math.ceil(num_rows / training.rows_per_step)
    total = max(1, math.ceil(round(training.epochs * steps_per_epoch, 6)))  # 2.2 * 50 is 110.00000000000001
    if training.max_steps is not None:
        total = min(total, training.max_steps)
    return StepPlan(
        num_rows=num_rows,
        rows_per_step=training.rows_per_step,
        rows_per_micro_batch=training.rows_per_micro_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=math.ceil(training.warmup_fraction * total),
    )
