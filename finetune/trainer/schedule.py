"""How long a run is: steps, micro-batches, warm-up. Pure arithmetic, done before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from finetune.console import plural
from finetune.recipe.schema import EvaluationSection, TrainingSection


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
    is_cut: bool = False
    """Whether `training.max_steps` ends the run before its epochs do."""

    @property
    def micro_batches_per_step(self) -> int:
        """Forward and backward passes of a full step."""
        return self.rows_per_step // self.rows_per_micro_batch

    @property
    def how_to_have_more(self) -> str:
        """Says which settings would give the run more steps."""
        if self.is_cut:
            return f"training.max_steps={self.total_steps} ends the run before its epochs do: raise it or leave it out."
        if self.rows_per_step == 1:
            return "A step takes one row, the least there is: raise training.epochs."
        return "Lower training.rows_per_step or raise training.epochs."

    def as_dict(self) -> dict[str, int]:
        values = asdict(self) | {"micro_batches_per_step": self.micro_batches_per_step}
        return {name: value for name, value in values.items() if name != "is_cut"}


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
    of_epochs = max(1, math.ceil(round(training.epochs * steps_per_epoch, 6)))  # 2.2 * 50 is 110.00000000000001
    total = of_epochs if training.max_steps is None else min(of_epochs, training.max_steps)
    return StepPlan(
        num_rows=num_rows,
        rows_per_step=training.rows_per_step,
        rows_per_micro_batch=training.rows_per_micro_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=math.ceil(training.warmup_fraction * total),
        is_cut=total < of_epochs,
    )


def explain_idle_early_stopping(evaluation: EvaluationSection, *, total_steps: int) -> str:
    """Returns why early stopping can never end a run of so many steps; empty where it can, or is not asked for.

    The first evaluation counts as an improvement, and an end at the last step is none before it.
    """
    if evaluation.early_stopping is None or evaluation.every_steps is None:
        return ""
    patience, every = evaluation.early_stopping.patience, evaluation.every_steps
    if (patience + 1) * every < total_steps:
        return ""
    num_evaluations = (total_steps - 1) // every
    return (
        f"evaluation.early_stopping can never end this run: it needs {plural(patience + 1, 'evaluation')} before the "
        f"last step, and evaluation.every_steps={every} makes {num_evaluations} in {plural(total_steps, 'step')}. "
        "Lower evaluation.every_steps or the patience."
    )
