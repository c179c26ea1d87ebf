"""From the recipe to the activation plan of a run: the workload that is measured, the limits, the lines that tell."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.data.collate import Batch
from finetune.errors import RecipeError
from finetune.optimizations.activations.describe import plan_dict, plan_lines
from finetune.optimizations.activations.measure import CannotPlan
from finetune.optimizations.activations.planner import BudgetTooSmall
from finetune.optimizations.activations.runtime import Activations, Limits, Workload
from finetune.optimizations.activations.types import GIB
from finetune.optimizations.apply import Applied
from finetune.recipe.schema import Recipe
from finetune.trainer.budget_errors import too_small
from finetune.trainer.checks import Check
from finetune.trainer.ending import Ending
from finetune.trainer.memory import random_state_kept
from finetune.trainer.prepare import Prepared
from finetune.trainer.sft import SftTrainer

FLAG = "double_buffered_reload"
WARM_UP_RECORDS = 2
"""Logged steps that do not count: they compile, allocate, and make the optimizer's state."""
PEAK_TOLERANCE, TIME_TOLERANCE = 0.05, 0.15


def plan_activations(
    recipe: Recipe, prepared: Prepared, trainer: SftTrainer, ending: Ending, *, say: Callable[[str], None]
) -> None:
    """Measures the run's layers, plans their activations, puts the plan into effect and says what it is.

    `trainer.activations` is then set, unless the recipe settles checkpointing itself.

    Raises:
        OutOfMemory: nothing fits into the memory there is.
        RecipeError: nothing fits into the recipe's own budget, or the model cannot be planned and the recipe has one.
    """
    begun = time.perf_counter()
    checkpointing = recipe.training.gradient_checkpointing
    if checkpointing == "auto":
        try:
            trainer.activations = _planned(recipe, prepared, trainer)
            flag = reload_flag(recipe, trainer.activations)
            lines = activation_lines(trainer.activations)
        except CannotPlan as error:
            _refuse_budgets(recipe, str(error))
            flag, lines = Applied(FLAG, "not applicable", f"{error}: {_checkpointed_plainly(trainer.trained)}"), []
    else:
        reason = f"training.gradient_checkpointing is {str(checkpointing).lower()}: nothing is planned"
        flag, lines = Applied(FLAG, "not applicable", reason), []
    ending.applied.append(flag)
    if trainer.activations is not None:
        ending.activation_plan = activation_dict(trainer.activations) | {"in_words": lines}
    ending.timings["plan_seconds"] = time.perf_counter() - begun
    for line in lines:
        say(line)
    say(f"flag    {flag.flag} {flag.state}: {flag.reason}")


def _planned(recipe: Recipe, prepared: Prepared, trainer: SftTrainer) -> Activations:
    activations = Activations(
        trainer.trained,
        _layers(trainer.trained),
        device=prepared.model.device,
        limits=_limits(recipe, prepared),
        say=trainer.say,
    )
    try:
        with _measuring(trainer):
            activations.prepare(workload_of(trainer, _longest_batch(prepared, trainer)))
    except CannotPlan:
        activations.close()
        raise
    except BudgetTooSmall as error:
        fixed = 0 if activations.base is None else activations.base.fixed_bytes
        activations.close()
        raise too_small(error, fixed_bytes=fixed) from error
    return activations


def _refuse_budgets(recipe: Recipe, reason: str) -> None:
    """A budget that nothing looks at would be a setting without an effect."""
    for name in ("activation_memory", "host_memory"):
        value = getattr(recipe.optimizations, name)
        if value != "auto":
            raise RecipeError(
                f"optimizations.{name} is {value}, but {reason}, so nothing is planned",
                place=f"optimizations.{name}",
                remedy=f"Remove optimizations.{name}.",
            )


def _checkpointed_plainly(model: Any) -> str:
    """Lets transformers checkpoint a model that cannot be planned, where it can; returns what became of it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return "all activations are kept"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return "layers keep their inputs and compute all else again"


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def reload_flag(recipe: Recipe, activations: Activations) -> Applied:
    """Says what became of the flag under the plan in effect."""
    plan, costs = activations.plan, activations.costs
    assert plan is not None and costs is not None
    if plan.host_bytes == 0:
        return Applied(FLAG, "not applicable", "the plan has nothing on the host")
    if costs.num_buffers == 1:
        reason = "the recipe says so" if recipe.optimizations.double_buffered_reload is False else "it saves no time"
        return Applied(FLAG, "off", f"{reason}: one buffer, copies and computing take turns")
    megabytes = plan.buffer_bytes / 2**20
    return Applied(FLAG, "on", f"two buffers of together {megabytes:,.0f} MiB, each filled while the other is read")


def activation_lines(activations: Activations) -> list[str]:
    """Returns the plan in words, as it is printed before training."""
    assert activations.plan is not None and activations.costs is not None
    return plan_lines(activations.plan, activations.costs)


def activation_dict(activations: Activations) -> dict[str, object]:
    """Returns the plan for the report."""
    assert activations.plan is not None and activations.costs is not None
    return plan_dict(activations.plan, activations.costs)


def end_activations(recipe: Recipe, trainer: SftTrainer, ending: Ending) -> None:
    """Sets the plan beside what was measured, and gives back what training alone needs: the pinned pool, the reload
    buffers, the wrapped forwards."""
    ending.checks.append(check_plan(trainer))
    activations = trainer.activations
    if activations is not None:
        # After a step that ran out of memory the plan is another than the one that was printed.
        flag = reload_flag(recipe, activations)
        ending.applied = [*(one for one in ending.applied if one.flag != FLAG), flag]
        ending.activation_plan = activation_dict(activations) | {"in_words": activation_lines(activations)}
        activations.close()


def check_plan(trainer: SftTrainer) -> Check:
    """Sets what the plan predicted beside what the first steps took: peak of memory, and seconds of a step."""
    name = "the plan of activations predicts the run"
    if trainer.activations is None or trainer.activations.plan is None:
        return Check(name, None, "checkpointing is the recipe's own: nothing was planned")
    plan = trainer.activations.plan
    records = [
        entry
        for entry in trainer.state.log_history
        if "step_seconds" in entry and entry["step"] > trainer.planned_at_step
    ]
    steady = [entry["step_seconds"] for entry in records[WARM_UP_RECORDS:]]
    if not steady:
        return Check(name, None, "too few steps to compare with")
    seconds = statistics.median(steady)
    detail = f"a step {plan.step_seconds:.3f} s, measured {seconds:.3f} s"
    if trainer.args.device.type != "cuda":
        return Check(name, None, f"{detail}; a CPU does not tell its peak of memory")
    peak = records[WARM_UP_RECORDS]["peak_memory_bytes"]
    ok = abs(plan.peak_bytes / peak - 1) <= PEAK_TOLERANCE and abs(plan.step_seconds / seconds - 1) <= TIME_TOLERANCE
    return Check(name, ok, f"peak {plan.peak_bytes / GIB:.2f} GiB, measured {peak / GIB:.2f}; {detail}")


def _limits(recipe: Recipe, prepared: Prepared) -> Limits:
    section = recipe.optimizations
    return Limits(
        double_buffered=section.double_buffered_reload,
        activation_bytes=None if section.activation_memory == "auto" else int(section.activation_memory * GIB),
        host_bytes=None if section.host_memory == "auto" else int(section.host_memory * GIB),
        optimizer=recipe.training.optimizer,
        num_micro_batches=prepared.steps.micro_batches_per_step,
    )


def _longest_batch(prepared: Prepared, trainer: SftTrainer) -> Batch:
    rows = prepared.train_rows
    longest = np.argsort(-rows.plan.row_tokens, kind="stable")[: prepared.steps.rows_per_micro_batch]
    return trainer.rows_collator([rows[int(index)] for index in longest])


def workload_of(trainer: SftTrainer, batch: Batch) -> Workload:
    """Returns the trainer's loss of a batch as what is measured."""
    inputs: Any = send_to_device(batch, trainer.args.device)  # as the loader does, metadata included

    def loss() -> torch.Tensor:
        with trainer.accelerator.autocast():
            return trainer._loss_sum(trainer.trained, inputs)[0]

    return Workload(loss=loss, context=lambda: trainer.accelerator.autocast())


@contextmanager
def _measuring(trainer: SftTrainer) -> Iterator[None]:
    """Runs a block in training mode and leaves no trace: mode, random state, and what was counted."""
    was_training, has_aux = trainer.trained.training, trainer.aux_loss_enabled
    config: Any = trainer.trained.config
    text_config = config.get_text_config()
    asks_router = getattr(text_config, "output_router_logits", None)
    trainer.trained.train()
    trainer.aux_loss_enabled = False  # the routers are in the layers, which are left out when the head is measured
    if asks_router is not None:
        text_config.output_router_logits = False
    try:
        with random_state_kept(trainer.args.device):
            yield
    finally:
        if asks_router is not None:
            text_config.output_router_logits = asks_router
        trainer.aux_loss_enabled = has_aux
        trainer.trained.train(was_training)
        trainer.forget_builds()
