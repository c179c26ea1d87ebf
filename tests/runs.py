"""Trainers made from recipe dicts, without a run folder and without the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from finetune.model.adapter import add_adapter
from finetune.model.load import load_model
from finetune.recipe.schema import Recipe
from finetune.trainer.build import TrainerParts, build_trainer
from finetune.trainer.prepare import Prepared, prepare
from finetune.trainer.sft import SftTrainer


def build(recipe: dict[str, Any], *, callbacks: list[TrainerCallback] | None = None) -> tuple[SftTrainer, Prepared]:
    """Prepares a recipe, loads the model and builds its trainer."""
    parsed, prepared, model = build_model(recipe)
    folder = Path(parsed.output.dir)
    trainer = build_trainer(
        parsed,
        TrainerParts(
            model=model,
            plan=prepared.model,
            tokenizer=prepared.tokenizer,
            train_rows=prepared.train_rows,
            eval_rows=prepared.eval_rows,
            steps=prepared.steps,
            pad_token_id=prepared.pad_token_id,
            checkpoints_dir=folder / "checkpoints",
            failure_dir=folder,
            callbacks=callbacks or [],
        ),
    )
    return trainer, prepared


def build_model(recipe: dict[str, Any]) -> tuple[Recipe, Prepared, nn.Module]:
    """The recipe's model with its adapter, before any trainer has touched it; the same one for the same seed."""
    parsed = Recipe.model_validate(recipe)
    prepared = prepare(parsed, say=lambda text: None)
    base = load_model(prepared.model, seed=parsed.training.seed)
    return parsed, prepared, add_adapter(base, parsed.adapter, targets=prepared.targets)


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
