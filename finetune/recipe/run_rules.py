"""Rules of training, evaluation and output. See `rules.py`."""

from __future__ import annotations

import difflib
from pathlib import Path

from finetune.recipe.schema import EvaluationSection, Recipe
from finetune.recipe.violation import Violation

METRICS = ("exact_match",)
"""Metrics that need no file."""
TAKEN_METRIC_NAMES = frozenset({"loss", "tokens", "seconds"})
"""Names under which the held-out loss and its counts are recorded."""


def micro_batch_divides_the_step(recipe: Recipe) -> Violation | None:
    """A step is a whole number of micro-batches, so that each weighs the same."""
    rows, micro = recipe.training.rows_per_step, recipe.training.rows_per_micro_batch
    if rows % micro == 0:
        return None
    nearest = max(size for size in range(1, min(rows, micro) + 1) if rows % size == 0)
    return Violation(
        keys=("training.rows_per_micro_batch", "training.rows_per_step"),
        found=micro,
        allowed=f"a divisor of `training.rows_per_step`, which is {rows}",
        reason="a step is a whole number of micro-batches",
        remedy=f"Set `training.rows_per_micro_batch: {nearest}`, or `training.rows_per_step: {micro}`.",
    )


def evaluation_needs_held_out_data(recipe: Recipe) -> Violation | None:
    """Asking for an evaluation without data to evaluate on is a mistake; the defaults ask for none."""
    if recipe.data.eval is not None:
        return None
    default = EvaluationSection()
    for key in ("every_steps", "metrics", "samples"):
        value = getattr(recipe.evaluation, key)
        if value and value != getattr(default, key):
            return Violation(
                keys=(f"evaluation.{key}",),
                found=value,
                allowed="left out while `data.eval` is empty",
                reason="there is no held-out data to evaluate on",
                remedy="Add held-out data, such as `data.eval: {fraction: 0.02}`, or remove the key.",
            )
    return None


def early_stopping_needs_evaluations(recipe: Recipe) -> Violation | None:
    """Early stopping counts the evaluations during training."""
    if recipe.evaluation.early_stopping is None or recipe.evaluation.every_steps is not None:
        return None
    return Violation(
        keys=("evaluation.early_stopping",),
        found=recipe.evaluation.early_stopping.model_dump(),
        allowed="left out without `evaluation.every_steps`",
        reason="the run is evaluated at its end only, when there is nothing left to stop",
        remedy="Set `evaluation.every_steps`, or remove `evaluation.early_stopping`.",
    )


def delivering_the_best_needs_evaluations(recipe: Recipe) -> Violation | None:
    """Without evaluations during training the last weights are the only ones that were measured."""
    if recipe.output.deliver != "best" or recipe.evaluation.every_steps is not None:
        return None
    return Violation(
        keys=("output.deliver", "evaluation.every_steps"),
        found=recipe.output.deliver,
        allowed="`auto` or `last` without `evaluation.every_steps`",
        reason="the run is evaluated at its end only, so there are no best weights beside the last",
        remedy="Set `evaluation.every_steps`, or remove `output.deliver`.",
    )


def trackers_are_named_once(recipe: Recipe) -> Violation | None:
    """A tracker named twice would get every figure twice."""
    trackers = recipe.output.trackers
    if len(set(trackers)) == len(trackers):
        return None
    return Violation(
        keys=("output.trackers",),
        found=list(trackers),
        allowed="a list without repetitions",
        reason="a tracker would get every figure twice",
        remedy="Name each tracker once.",
    )


def metrics_are_known(recipe: Recipe) -> Violation | None:
    """A metric is built in, or a Python file that is there."""
    for index, name in enumerate(recipe.evaluation.metrics):
        if name in METRICS or (name.endswith(".py") and Path(name).is_file()):
            continue
        near = difflib.get_close_matches(name, METRICS, n=1)
        return Violation(
            keys=(f"evaluation.metrics.{index}", "evaluation.metrics"),
            found=name,
            allowed="`exact_match` or an existing Python file",
            reason=f"did you mean `{near[0]}`?" if near else "there is no such metric or file",
            remedy="Use `exact_match`, or the path of a .py file (relative to the file that names it).",
        )
    return None


def metric_names_differ(recipe: Recipe) -> Violation | None:
    """Scores are recorded under the metric's name (a file's without `.py`), so two may not share one."""
    names = [Path(metric).stem for metric in recipe.evaluation.metrics]
    twice = sorted({name for name in names if names.count(name) > 1} | (TAKEN_METRIC_NAMES & set(names)))
    if not twice:
        return None
    return Violation(
        keys=("evaluation.metrics",),
        found=list(recipe.evaluation.metrics),
        allowed=f"metrics with names of their own, not {', '.join(sorted(TAKEN_METRIC_NAMES))}",
        reason=f"two values would be recorded as `eval_{twice[0]}`",
        remedy="Remove one, or rename its file.",
    )


def budgets_need_a_plan(recipe: Recipe) -> Violation | None:
    """Without a plan nothing would look at the two budgets."""
    checkpointing = recipe.training.gradient_checkpointing
    if checkpointing == "auto":
        return None
    for name in ("activation_memory", "host_memory"):
        value = getattr(recipe.optimizations, name)
        if value != "auto":
            return Violation(
                keys=(f"optimizations.{name}", "training.gradient_checkpointing"),
                found=value,
                allowed="auto, unless `training.gradient_checkpointing` is auto",
                reason=f"with `training.gradient_checkpointing: {str(checkpointing).lower()}` nothing is planned",
                remedy=f"Remove `optimizations.{name}`, or set `training.gradient_checkpointing: auto`.",
            )
    return None
