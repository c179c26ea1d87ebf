"""Steps are counted as they will be executed."""

from __future__ import annotations

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from finetune.recipe.schema import EarlyStopping, EvaluationSection, TrainingSection
from finetune.trainer.callbacks.early_stopping import EarlyStoppingCallback
from finetune.trainer.schedule import explain_idle_early_stopping, learning_rate_factor, plan_steps


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


@pytest.mark.parametrize(
    ("values", "named", "unnamed"),
    [
        ({"rows_per_step": 8}, "training.rows_per_step", "max_steps"),
        ({"rows_per_step": 1}, "raise training.epochs", "rows_per_step"),
        ({"rows_per_step": 1, "max_steps": 2}, "training.max_steps=2", "epochs."),
        ({"rows_per_step": 8, "max_steps": 3}, "training.rows_per_step", "max_steps"),
    ],
    ids=["rows", "one row", "max_steps", "max_steps of no effect"],
)
def test_what_limits_the_steps_is_named(values: dict, named: str, unnamed: str) -> None:
    """It said to lower rows_per_step where that was 1, or where max_steps ended the run."""
    plan = plan_steps(TrainingSection(**values), num_rows=5)
    assert named in plan.how_to_have_more and unnamed not in plan.how_to_have_more


@pytest.mark.parametrize(
    ("every", "patience", "total", "is_idle"),
    [(100, 3, 40, True), (10, 3, 40, True), (10, 3, 41, False), (1, 1, 3, False), (1, 1, 2, True)],
)
def test_early_stopping_that_cannot_fire_is_told(every: int, patience: int, total: int, is_idle: bool) -> None:
    evaluation = EvaluationSection(every_steps=every, early_stopping=EarlyStopping(patience=patience))
    told = explain_idle_early_stopping(evaluation, total_steps=total)
    assert bool(told) == is_idle
    assert not is_idle or f"every_steps={every}" in told
    assert explain_idle_early_stopping(EvaluationSection(every_steps=every), total_steps=total) == ""
    callback = EarlyStoppingCallback(patience=patience)
    stops = []
    for step in range(every, total, every):
        callback.on_evaluate(TrainingArguments(), TrainerState(global_step=step), TrainerControl(), {"eval_loss": 1.0})
        stops += [step] if callback.is_over else []
    assert bool(stops) != is_idle
