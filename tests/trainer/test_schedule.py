"""Steps are counted as they will be executed."""

from __future__ import annotations

import pytest

from finetune.recipe.schema import TrainingSection
from finetune.trainer.schedule import learning_rate_factor, plan_steps


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
    """P33: steps and warm-up are counted from the packed rows."""
    plan = plan_steps(TrainingSection(rows_per_step=8, **values), num_rows=num_rows)
    assert (plan.total_steps, plan.warmup_steps) == (steps, warmup)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "fraction"), [(1, 0.03), (20, 0.2), (20, 0.0), (7, 0.99)])
def test_every_step_has_a_rate(schedule: str, total: int, fraction: float) -> None:
    """P33: transformers' schedules give the first step of a warm-up no rate: a run of one step trained nothing."""
    training = TrainingSection(rows_per_step=1, max_steps=total, epochs=total, warmup_fraction=fraction)
    plan = plan_steps(training, num_rows=1)
    rates = [learning_rate_factor(step, schedule=schedule, plan=plan) for step in range(total)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    warmup = plan.warmup_steps
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert warmup >= total or rates[warmup] == 1.0


def test_the_schedules_have_their_shapes() -> None:
    plan = plan_steps(TrainingSection(rows_per_step=1, max_steps=12, epochs=12, warmup_fraction=0.16), num_rows=1)
    assert plan.warmup_steps == 2
    halfway = 2 + 5
    assert learning_rate_factor(0, schedule="linear", plan=plan) == pytest.approx(1 / 3)
    assert learning_rate_factor(halfway, schedule="linear", plan=plan) == pytest.approx(0.5)
    assert learning_rate_factor(halfway, schedule="cosine", plan=plan) == pytest.approx(0.5)
    assert learning_rate_factor(11, schedule="constant", plan=plan) == 1.0


def test_micro_batches() -> None:
    plan = plan_steps(TrainingSection(rows_per_step=8, rows_per_micro_batch=2), num_rows=8)
    assert plan.micro_batches_per_step == 4
