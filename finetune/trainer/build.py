"""From the recipe and its parts to a trainer: the one place where recipe fields become TRL's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig

from finetune.data.collate import RowCollator
from finetune.data.rows import RowDataset
from finetune.model.config import ModelPlan
from finetune.recipe.schema import Recipe
from finetune.trainer.callbacks.log_on_time import LogOnTimeCallback
from finetune.trainer.schedule import StepPlan
from finetune.trainer.sft import SftTrainer

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "paged_adamw_8bit"}
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What a trainer is built of, besides the recipe."""

    model: nn.Module
    plan: ModelPlan
    tokenizer: PreTrainedTokenizerBase
    train_rows: RowDataset
    eval_rows: RowDataset | None
    steps: StepPlan
    pad_token_id: int
    checkpoints_dir: Path
    failure_dir: Path
    """Where the batch of a loss that is not finite is saved."""
    callbacks: list[TrainerCallback]


def build_trainer(recipe: Recipe, parts: TrainerParts) -> SftTrainer:
    """Builds the trainer; the model in `parts` is the one it trains."""
    row_length = recipe.data.max_length if recipe.data.packing else None
    trainer = SftTrainer(
        model=parts.model,
        args=_arguments(recipe, parts),
        tokenizer=parts.tokenizer,
        rows=(parts.train_rows, parts.eval_rows),
        collator=RowCollator(row_length=row_length, pad_token_id=parts.pad_token_id),
        failure_dir=parts.failure_dir,
        callbacks=[*parts.callbacks, LogOnTimeCallback()],  # last: it looks at what the others asked for
    )
    trainer.remove_callback(PrinterCallback)  # transformers' own progress lines; ours replace them
    return trainer


def _arguments(recipe: Recipe, parts: TrainerParts) -> SFTConfig:
    training, evaluation, output = recipe.training, recipe.evaluation, recipe.output
    steps, plan = parts.steps, parts.plan
    evaluates = parts.eval_rows is not None and evaluation.every_steps is not None
    return SFTConfig(
        output_dir=str(parts.checkpoints_dir),
        max_steps=steps.total_steps,
        per_device_train_batch_size=steps.rows_per_micro_batch,
        per_device_eval_batch_size=steps.rows_per_micro_batch,
        gradient_accumulation_steps=steps.micro_batches_per_step,
        learning_rate=training.learning_rate,
        lr_scheduler_type=SCHEDULES[training.schedule],
        warmup_steps=steps.warmup_steps,
        optim=OPTIMIZERS[training.optimizer],
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        gradient_checkpointing=training.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        router_aux_loss_coef=training.router_aux_loss,
        seed=training.seed,
        data_seed=training.seed,
        bf16=plan.dtype == torch.bfloat16,
        fp16=plan.dtype == torch.float16,
        use_cpu=plan.device.type == "cpu",
        dataloader_pin_memory=plan.device.type == "cuda",
        eval_strategy="steps" if evaluates else "no",
        eval_steps=evaluation.every_steps if evaluates else None,
        save_strategy="steps",
        save_steps=output.save_every_steps or steps.total_steps,
        save_total_limit=None,  # our callback removes old checkpoints once the new one is complete
        logging_strategy="steps",
        logging_steps=output.log_every_steps,
        logging_nan_inf_filter=False,  # a loss that is not finite is to be seen, not averaged away
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        packing=False,  # rows come packed
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
