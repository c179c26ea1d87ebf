"""Trainers made from recipe dicts, without a run folder and without the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn
from transformers import TrainerCallback

from finetune.recipe.schema import Recipe
from finetune.run.folder import RunFolder
from finetune.trainer.activations import plan_activations
from finetune.trainer.build import build_model as build_parsed
from finetune.trainer.build import build_trainer
from finetune.trainer.ending import Ending
from finetune.trainer.prepare import Prepared, prepare
from finetune.trainer.sft import SftTrainer


@overload
def build(
    recipe: dict[str, Any],
    *,
    callbacks: list[TrainerCallback] | None = None,
    with_ending: Literal[False] = False,
    say: Callable[[str], None] = ...,
) -> tuple[SftTrainer, Prepared]: ...


@overload
def build(
    recipe: dict[str, Any],
    *,
    callbacks: list[TrainerCallback] | None = None,
    with_ending: Literal[True],
    say: Callable[[str], None] = ...,
) -> tuple[SftTrainer, Prepared, Ending]: ...


def build(
    recipe: dict[str, Any],
    *,
    callbacks: list[TrainerCallback] | None = None,
    with_ending: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[SftTrainer, Prepared] | tuple[SftTrainer, Prepared, Ending]:
    """Prepares a recipe, loads the model, builds its trainer and plans its activations."""
    parsed, prepared, model = build_model(recipe)
    run = RunFolder(Path(parsed.output.dir))
    run.path.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(parsed, prepared, model=model, run=run, callbacks=callbacks or [])
    ending = Ending(0.0)
    trainer.say = say
    plan_activations(parsed, prepared, trainer, ending, say=lambda text: None)
    return (trainer, prepared, ending) if with_ending else (trainer, prepared)


def build_model(recipe: dict[str, Any]) -> tuple[Recipe, Prepared, nn.Module]:
    """The recipe's model with its adapter, before any trainer has touched it; the same one for the same seed."""
    parsed = Recipe.model_validate(recipe)
    prepared = prepare(parsed, say=lambda text: None)
    return parsed, prepared, build_parsed(parsed, prepared, say=lambda text: None, ending=Ending(0.0))


def losses(trainer: SftTrainer) -> list[float]:
    """The loss of each logged step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def grad_norms(trainer: SftTrainer) -> list[float]:
    """The gradient's norm of each logged step."""
    return [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]


def windows(trainer: SftTrainer) -> list[list[dict[str, Any]]]:
    """The micro-batches of the first epoch, grouped as the trainer accumulates them."""
    batches = list(trainer.get_train_dataloader())
    size = trainer.args.gradient_accumulation_steps
    return [batches[start : start + size] for start in range(0, len(batches), size)]
