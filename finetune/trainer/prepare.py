"""Everything of a run that is settled before its weights are read: data, targets, steps, disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.build import Dataset, build_dataset, plan_rows
from finetune.data.rows import RowDataset
from finetune.data.store import SampleStore
from finetune.data.types import PromptReference
from finetune.errors import RecipeError
from finetune.model.adapter import AdapterTargets, add_adapter, choose_targets
from finetune.model.config import ModelPlan, plan_model
from finetune.model.load import choose_pad_token, vocabulary_rows
from finetune.model.positions import position_limit
from finetune.model.tokenizer import load_tokenizer
from finetune.model.trainable import TrainableTable, trainable_table
from finetune.recipe.schema import DataSection, LoraAdapter, Recipe
from finetune.run.disk import require_disk_space
from finetune.trainer.held_out import HeldOut, num_answers
from finetune.trainer.schedule import StepPlan, plan_steps


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that could start now."""

    model: ModelPlan
    targets: AdapterTargets | None
    table: TrainableTable
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    dataset: Dataset
    train_rows: RowDataset
    eval_rows: RowDataset | None
    steps: StepPlan
    held_out: HeldOut
    is_packed: bool

    def plan_dict(self) -> dict[str, object]:
        """The plan as the report and `--json` show it."""
        train = self.train_rows.plan
        return {
            "model": self.model.section.path,
            "architecture": type(self.model.skeleton).__name__,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.attention,
            "samples": len(self.dataset.train),
            "rows": len(train),
            "row_length_tokens": train.max_length,
            "real_tokens": train.num_tokens,
            "fill": round(train.fill, 5),
            "eval_samples": len(self.dataset.eval) if self.dataset.eval is not None else 0,
            **self.steps.as_dict(),
            "checkpoint_bytes": self.table.checkpoint_bytes,
            "date_in_template": self.dataset.date,
            "hub_commits": self.dataset.hub_commits,
        }

    def ledgers_dict(self) -> dict[str, dict[str, object]]:
        """What became of each record and token."""
        ledgers = {"train": self.dataset.ledger.as_dict()}
        if self.dataset.eval_ledger is not None:
            ledgers["eval"] = self.dataset.eval_ledger.as_dict()
        return ledgers

    def data_digest(self) -> str:
        """Hash of all samples, in order, by which a continued run knows its data again.

        It is made of the hashes of the samples' records and labels, their numbers of tokens, and their loss weights
        other than 1; no token is read for it, and samples that were left out have no part in it.
        """
        digest = hashlib.blake2b(digest_size=16)
        for store in (self.dataset.train, self.dataset.eval):
            if store is not None:
                for array in (store.digests, store.lengths, store.label_digests):
                    digest.update(np.ascontiguousarray(array).data)
                samples, runs = store.weight_runs.of_samples(store.starts, store.starts + store.lengths)
                if len(runs):
                    for array in (samples, runs.starts, runs.ends, runs.values):
                        digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def trained_dict(self) -> dict[str, object]:
        """What is trained, for the report and `--json`."""
        return {
            "trainable_parameters": self.table.num_trainable,
            "total_parameters": self.table.num_total,
            "share": self.table.share,
            "groups": [group.as_dict() for group in self.table.groups],
        }


def prepare(recipe: Recipe, *, say: Callable[[str], None]) -> Prepared:
    """Settles the run. Reads the config, the tokenizer and the data, but no weights; writes nothing but the
    tokenized data's cache.

    Raises:
        FinetuneError: whatever of model, data or recipe does not hold; each names its place and remedy.
    """
    plan = plan_model(recipe.model, packing=recipe.data.packing)
    _require_positions(recipe.data, plan)
    targets = choose_targets(plan.skeleton, recipe.adapter) if isinstance(recipe.adapter, LoraAdapter) else None
    tokenizer = load_tokenizer(recipe.model)
    num_rows = vocabulary_rows(plan.skeleton)
    table = trainable_table(add_adapter(plan.skeleton, recipe.adapter, targets=targets))
    _require_room(recipe, table)
    dataset = build_dataset(
        recipe.data,
        tokenizer=tokenizer,
        seed=recipe.training.seed,
        max_references=num_answers(recipe.evaluation),
        say=say,
    )
    _require_tokens_in_vocabulary(dataset.train, num_rows)
    train_rows = RowDataset(dataset.train, plan_rows(dataset.train, recipe.data, seed=recipe.training.seed))
    eval_rows = None
    if dataset.eval is not None:
        _require_tokens_in_vocabulary(dataset.eval, num_rows)
        eval_rows = RowDataset(dataset.eval, plan_rows(dataset.eval, recipe.data, seed=recipe.training.seed))
    return Prepared(
        model=plan,
        targets=targets,
        table=table,
        tokenizer=tokenizer,
        pad_token_id=choose_pad_token(tokenizer, num_rows=num_rows),
        dataset=dataset,
        train_rows=train_rows,
        eval_rows=eval_rows,
        steps=plan_steps(recipe.training, num_rows=len(train_rows)),
        held_out=HeldOut.of(recipe.evaluation, _usable(dataset.references, recipe.data.max_length, say=say)),
        is_packed=recipe.data.packing,
    )


def _usable(
    references: Sequence[PromptReference], max_length: int, *, say: Callable[[str], None]
) -> list[PromptReference]:
    """Leaves out prompts that fill a row, of which training too sees no answer."""
    usable = [reference for reference in references if len(reference.prompt_ids) < max_length]
    if len(usable) < len(references):
        count = len(references) - len(usable)
        what = "prompt is" if count == 1 else "prompts are"
        say(f"{count:,} held-out {what} longer than data.max_length and will not be answered")
    return usable


def _require_positions(data: DataSection, plan: ModelPlan) -> None:
    limit = position_limit(plan.config)
    if limit is not None and data.max_length > limit:
        raise RecipeError(
            f"data.max_length is {data.max_length:,}, but the model has positions up to {limit:,} only",
            place="data.max_length",
            remedy=f"Set data.max_length to at most {limit}.",
        )


def _require_room(recipe: Recipe, table: TrainableTable) -> None:
    """Checkpoints that exist at once (one more than are kept, while an old one goes) and the result."""
    needed = (recipe.output.keep_checkpoints + 1) * table.checkpoint_bytes + table.trainable_bytes
    require_disk_space(Path(recipe.output.dir), needed_bytes=needed, purpose="checkpoints and the result")


def _require_tokens_in_vocabulary(store: SampleStore, num_rows: int) -> None:
    largest = store.max_id
    if largest >= num_rows:
        raise RecipeError(
            f"the tokenizer gives the id {largest}, but the model's embedding has {num_rows} rows",
            place="model.path",
            remedy="Use the tokenizer that belongs to the model.",
        )
