"""From the recipe and its parts to a trainer: the one place where recipe fields become TRL's arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig

from finetune.data.collate import RowCollator
from finetune.model.adapter import add_adapter
from finetune.model.earlier import load_earlier_adapter
from finetune.model.load import load_model, vocabulary_rows
from finetune.model.new_tokens import add_rows
from finetune.optimizations.apply import apply_attention
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.recipe.schema import LoraAdapter, Recipe
from finetune.run.folder import RunFolder
from finetune.trainer.callbacks.log_on_time import LogOnTimeCallback
from finetune.trainer.checks import Check, check_documents_are_separate
from finetune.trainer.ending import Ending
from finetune.trainer.prepare import Prepared
from finetune.trainer.schedule import learning_rate_factor
from finetune.trainer.sft import SftTrainer
from finetune.trainer.trackers import PROJECT

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "paged_adamw_8bit"}


def build_model(recipe: Recipe, prepared: Prepared, *, say: Callable[[str], None], ending: Ending) -> nn.Module:
    """Loads or draws the weights, adds the adapter, and checks that packed documents stay apart.

    Args:
        say: prints a warning.
        ending: takes the check and the seconds.

    Raises:
        FinetuneError: the weights cannot be used, or documents would see each other.
    """
    begun = time.perf_counter()
    base = load_model(prepared.model, seed=recipe.training.seed, say=say)
    checked = apply_attention(
        base, prepared.attention, dtype=prepared.model.dtype, most_documents=prepared.most_documents
    )
    ending.checks.append(Check("attention equals the reference", checked.ok, checked.reason))
    if prepared.new_tokens is not None:
        add_rows(base, prepared.new_tokens)
    model = add_adapter(base, recipe.adapter, targets=prepared.targets, new_tokens=prepared.new_tokens)
    if isinstance(recipe.adapter, LoraAdapter) and recipe.adapter.continue_from is not None:
        assert isinstance(model, PeftModel)
        load_earlier_adapter(model, recipe.adapter.continue_from)
    ending.timings["load_seconds"] = time.perf_counter() - begun
    if recipe.data.packing:
        check = check_documents_are_separate(
            model,
            num_rows=vocabulary_rows(base),
            takes_metadata=prepared.attention.backend is not None,
            is_int8=recipe.model.quantization == "int8",
        )
        ending.checks.append(check)
    else:
        detail = "not packed: one document a row"
        ending.checks.append(Check("packed documents do not see each other", None, detail))
    return model


def build_trainer(
    recipe: Recipe,
    prepared: Prepared,
    *,
    model: nn.Module,
    run: RunFolder,
    callbacks: list[TrainerCallback],
) -> SftTrainer:
    """Builds the trainer of `model`; its checkpoints, and the batch of a loss that is not finite, go into `run`."""
    row_length = recipe.data.max_length if recipe.data.packing else None
    trainer = SftTrainer(
        model=model,
        args=_arguments(recipe, prepared, output_dir=run.checkpoints_dir),
        tokenizer=prepared.tokenizer,
        rows=(prepared.train_rows, prepared.eval_rows),
        collator=RowCollator(row_length=row_length, pad_token_id=prepared.pad_token_id),
        callbacks=[*callbacks, LogOnTimeCallback()],  # last: it looks at what the others asked for
    )
    trainer.learning_rate_factor = partial(learning_rate_factor, schedule=recipe.training.schedule, plan=prepared.steps)
    trainer.loraplus_ratio = recipe.adapter.loraplus_ratio if isinstance(recipe.adapter, LoraAdapter) else None
    if prepared.attention.backend is not None:
        trainer.metadata_feed = MetadataFeed(is_cached=any(a.is_on("packed_metadata_cache") for a in prepared.applied))
    trainer.remove_callback(PrinterCallback)  # transformers' own progress lines; ours replace them
    return trainer


def _arguments(recipe: Recipe, prepared: Prepared, *, output_dir: Path) -> SFTConfig:
    training, evaluation, output = recipe.training, recipe.evaluation, recipe.output
    steps, plan = prepared.steps, prepared.model
    evaluates = prepared.eval_rows is not None and evaluation.every_steps is not None
    return SFTConfig(
        output_dir=str(output_dir),
        max_steps=steps.total_steps,
        per_device_train_batch_size=steps.rows_per_micro_batch,
        per_device_eval_batch_size=steps.rows_per_micro_batch,
        gradient_accumulation_steps=steps.micro_batches_per_step,
        learning_rate=training.learning_rate,
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
        accelerator_config={"non_blocking": plan.device.type == "cuda"},  # a batch crosses without a wait
        eval_strategy="steps" if evaluates else "no",
        eval_steps=evaluation.every_steps if evaluates else None,
        save_strategy="steps",
        save_steps=output.save_every_steps or steps.total_steps,
        save_total_limit=None,  # our callback removes old checkpoints once the new one is complete
        logging_strategy="steps",
        logging_steps=output.log_every_steps,
        logging_nan_inf_filter=False,  # a loss that is not finite is to be seen, not averaged away
        report_to="none",  # trackers come as callbacks of ours, so that their failure does not end the run
        run_name=output_dir.parent.name,
        project=PROJECT,
        disable_tqdm=True,
        remove_unused_columns=False,
        packing=False,  # rows come packed
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
