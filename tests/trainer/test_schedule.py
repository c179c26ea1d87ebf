"""Steps are counted as they will be executed."""

from __future__ import annotations

import pytest

from finetune.recipe.schema import TrainingSection
from finetune.trainer.schedule import plan_steps


@pytest.mark.parametrize(
    ("num_rows", "values", "steps", "warmup"),
    [
        (80, {"epochs": 1}, 10, 1),
        (81, {"epochs": 1}, 11, 1),
        (3, {"epochs": 1}, 1, 1),
        (80, {"epochs": 2.5, "warmup_fraction": 0.1}, 25, 3),
        (80, {"epochs": 100, "max_steps": 7, "warmup_fraction": 0.0}, 7, 0),
        (80, {"epochs": 0.01}, 1, 1),
        (400, {"epochs": 2.2, "warmup_fraction": 0.0}, 110, 0),
    ],
    ids=[
        "exact",
        "short last step",
        "fewer rows than a step",
        "part of an epoch",
        "max_steps",
        "hardly any",
        "no step from rounding",
    ],
)
def test_steps(num_rows: int, values: dict, steps: int, warmup: int) -> None:
    plan = plan_steps(TrainingSection(rows_per_step=8, **values), num_rows=num_rows)
    assert (plan.total_steps, plan.warmup_steps) == (steps, warmup)


def test_micro_batches() -> None:
    plan = plan_steps(TrainingSection(rows_per_step=8, rows_per_micro_batch=2), num_rows=8)
    assert plan.micro_batches_per_step == 4
