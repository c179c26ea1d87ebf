"""Everything of a run that is settled before its weights are read: data, targets, steps, disk."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from finetune.data.build import Dataset, build_dataset, plan_rows
from finetune.data.references import render_prompts
from finetune.data.rows import RowDataset
from finetune.data.store import SampleStore
from finetune.data.types import PromptReference
from finetune.errors import RecipeError
from finetune.model.adapter import add_adapter
from finetune.model.config import ModelPlan, plan_model
from finetune.model.earlier import check_earlier_adapter
from finetune.model.earlier_tokens import check_earlier_tokens
from finetune.model.load import choose_pad_token, vocabulary_rows
from finetune.model.new_tokens import NewTokens, plan_new_tokens
from finetune.model.positions import position_limit
from finetune.model.targets import AdapterTargets, choose_targets
from finetune.model.tokenizer import load_tokenizer
from finetune.model.trainable import TrainableTable, trainable_table
from finetune.optimizations.apply import Applied, plan_metadata_cache
from finetune.optimizations.attention.choose import AttentionChoice, choose_attention
from finetune.optimizations.support import probe_hardware
from finetune.recipe.schema import DataSection, LoraAdapter, Recipe
from finetune.run.disk import require_disk_space
from finetune.trainer.held_out import HeldOut, num_answers
from finetune.trainer.schedule import StepPlan, explain_idle_early_stopping, plan_steps

_SHOWN_TOKENS = 5


@dataclass(frozen=True)
class TokenUses:
    """How often each new token occurs in the training samples."""

    counts: dict[str, int]

    @property
    def unused(self) -> list[str]:
        return [repr(text) for text, count in self.counts.items() if not count]

    def line(self) -> str:
        """Says in words how often; of many tokens, of the rarest."""
        rarest = sorted(self.counts.items(), key=lambda item: item[1])[:_SHOWN_TOKENS]
        what = "in the training data" if len(self.counts) <= _SHOWN_TOKENS else "in the training data, the rarest"
        return f"{what}: " + ", ".join(f"{text!r} {count:,} x" for text, count in rarest)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that could start now."""

    model: ModelPlan
    attention: AttentionChoice
    applied: tuple[Applied, ...]
    """What becomes of each flag of the optimizations."""
    targets: AdapterTargets | None
    new_tokens: NewTokens | None
    uses: TokenUses
    """Of the new tokens; empty without any."""
    table: TrainableTable
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    dataset: Dataset
    train_rows: RowDataset
    eval_rows: RowDataset | None
    steps: StepPlan
    idle_early_stopping: str
    """Why early stopping can never end this run; empty where it can, or is not asked for."""
    held_out: HeldOut
    is_packed: bool
    keeps_best: bool
    """Whether there are evaluations during training, of which the best weights are kept."""
    delivers: Literal["best", "last"]
    """Which weights are the result."""

    @property
    def most_documents(self) -> int:
        """Documents of a batch at most, pad tails included, in training and in evaluation."""
        parts = [rows for rows in (self.train_rows, self.eval_rows) if rows is not None]
        return max(rows.plan.most_documents(self.steps.rows_per_micro_batch) for rows in parts)

    def plan_dict(self) -> dict[str, object]:
        """The plan as the report and `--json` show it."""
        train = self.train_rows.plan
        return {
            "model": self.model.section.path,
            "architecture": type(self.model.skeleton).__name__,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.attention.name,
            "optimizations": [applied.as_dict() for applied in self.applied],
            "vocabulary_rows": vocabulary_rows(self.model.skeleton),
            "new_token_ids": list(self.new_tokens.ids) if self.new_tokens is not None else [],
            "new_token_uses": self.uses.counts,
            "samples": len(self.dataset.train),
            "rows": len(train),
            "row_length_tokens": train.max_length,
            "real_tokens": train.num_tokens,
            "fill": round(train.fill, 5),
            "eval_samples": len(self.dataset.eval) if self.dataset.eval is not None else 0,
            **self.steps.as_dict(),
            "checkpoint_bytes": self.table.checkpoint_bytes,
            "delivers": self.delivers,
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


def prepare(recipe: Recipe, *, say: Callable[[str], None], warn: Callable[[str], None] | None = None) -> Prepared:
    """Settles the run. Reads the config, the tokenizer and the data, but no weights; writes nothing but the
    tokenized data's cache.

    Args:
        say: prints a line.
        warn: prints a warning; None takes `say`.

    Raises:
        FinetuneError: whatever of model, data or recipe does not hold; each names its place and remedy.
    """
    plan = plan_model(recipe.model)
    _require_positions(recipe.data, plan)
    attention = _choose_attention(recipe, plan)
    tokenizer = load_tokenizer(recipe.model)
    new_tokens = plan_new_tokens(recipe.model, tokenizer, plan.skeleton)
    num_rows = vocabulary_rows(plan.skeleton)
    targets, table = _plan_trained(recipe, plan, new_tokens, tokenizer=tokenizer, warn=warn or say)
    _require_room(recipe, table)
    dataset = build_dataset(
        recipe.data,
        tokenizer=tokenizer,
        seed=recipe.training.seed,
        max_references=num_answers(recipe.evaluation),
        say=say,
    )
    train_rows = _rows(dataset.train, recipe, num_rows=num_rows)
    steps = plan_steps(recipe.training, num_rows=len(train_rows))
    return Prepared(
        model=plan,
        attention=attention,
        applied=(plan_metadata_cache(recipe.optimizations.packed_metadata_cache, attention),),
        targets=targets,
        new_tokens=new_tokens,
        uses=_count_uses(new_tokens, dataset.train),
        table=table,
        tokenizer=tokenizer,
        pad_token_id=choose_pad_token(tokenizer, num_rows=num_rows),
        dataset=dataset,
        train_rows=train_rows,
        eval_rows=None if dataset.eval is None else _rows(dataset.eval, recipe, num_rows=num_rows),
        steps=steps,
        idle_early_stopping=explain_idle_early_stopping(recipe.evaluation, total_steps=steps.total_steps),
        held_out=_held_out(recipe, dataset, tokenizer, say=say),
        keeps_best=recipe.evaluation.every_steps is not None,
        delivers=_delivers(recipe),
        is_packed=recipe.data.packing,
    )


def _held_out(
    recipe: Recipe, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, say: Callable[[str], None]
) -> HeldOut:
    references = _usable(dataset.references, recipe.data.max_length, say=say)
    return HeldOut.of(recipe.evaluation, references, _own_prompts(recipe, tokenizer, date=dataset.date))


def _choose_attention(recipe: Recipe, plan: ModelPlan) -> AttentionChoice:
    return choose_attention(
        recipe.model.attention,
        skeleton=plan.skeleton,
        stock=plan.attention,
        hardware=probe_hardware(plan.device),
        dtype=plan.dtype,
        packing=recipe.data.packing,
        row_length=recipe.data.max_length,
        num_rows=recipe.training.rows_per_micro_batch,
    )


def _rows(store: SampleStore, recipe: Recipe, *, num_rows: int) -> RowDataset:
    """Returns the rows of a store whose ids the embedding, of `num_rows` rows, has."""
    _require_tokens_in_vocabulary(store, num_rows)
    return RowDataset(store, plan_rows(store, recipe.data, seed=recipe.training.seed))


def _count_uses(new_tokens: NewTokens | None, train: SampleStore) -> TokenUses:
    if new_tokens is None:
        return TokenUses({})
    return TokenUses(dict(zip(new_tokens.texts, train.count_ids(new_tokens.ids), strict=True)))


def _delivers(recipe: Recipe) -> Literal["best", "last"]:
    """Which weights are the result: `auto` takes the best of a run that may be stopped for not getting better."""
    if recipe.output.deliver != "auto":
        return recipe.output.deliver
    return "best" if recipe.evaluation.early_stopping is not None else "last"


def _own_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, date: str | None) -> list[PromptReference]:
    """Renders the user's prompts, on the date that the training data are rendered on."""
    day = None if date is None else datetime.date.fromisoformat(date)
    prompts = render_prompts(recipe.evaluation.prompts, tokenizer=tokenizer, date=day)
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt.prompt_ids) >= recipe.data.max_length:
            raise RecipeError(
                f"prompt {number} has {len(prompt.prompt_ids)} tokens, which leaves no room for an answer in a row of "
                f"{recipe.data.max_length}",
                place="evaluation.prompts",
                remedy="Shorten it, or raise data.max_length.",
            )
    return prompts


def _plan_trained(
    recipe: Recipe,
    plan: ModelPlan,
    new_tokens: NewTokens | None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    warn: Callable[[str], None],
) -> tuple[AdapterTargets | None, TrainableTable]:
    """Puts the adapter onto the skeleton: returns its targets (None in full fine-tuning) and the table of all that is
    trained."""
    adapter = recipe.adapter
    if not isinstance(adapter, LoraAdapter):
        return None, trainable_table(plan.skeleton)
    if adapter.dora and recipe.model.quantization == "int8" and plan.device.type == "cpu":
        # PEFT 0.21 puts a new int8 weight without its scales in place after each DoRA product on the CPU.
        raise RecipeError(
            "adapter.dora is true, but PEFT cannot train DoRA over int8 weights on the CPU",
            place="adapter.dora",
            remedy="Set adapter.dora=false, model.quantization=nf4, or train on a CUDA device.",
        )
    targets = choose_targets(plan.skeleton, adapter, is_quantized=recipe.model.quantization != "none")
    skeleton = add_adapter(plan.skeleton, adapter, targets=targets, new_tokens=new_tokens)
    if adapter.continue_from is not None and isinstance(skeleton, PeftModel):
        folder, base_path = adapter.continue_from, recipe.model.path
        warnings = check_earlier_adapter(skeleton, folder, base_path=base_path, new_tokens=new_tokens)
        for warning in [*warnings, *check_earlier_tokens(tokenizer, folder, new_tokens=new_tokens)]:
            warn(warning)
    return targets, trainable_table(skeleton)


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
    """Checkpoints that exist at once (one more than are kept, while an old one goes), the result, and the best weights
    (two of them while new ones replace the old)."""
    num_results = 1 if recipe.evaluation.every_steps is None else 3
    needed = (recipe.output.keep_checkpoints + 1) * table.checkpoint_bytes + num_results * table.saved_bytes
    require_disk_space(Path(recipe.output.dir), needed_bytes=needed, purpose="checkpoints and the result")


def _require_tokens_in_vocabulary(store: SampleStore, num_rows: int) -> None:
    largest = store.max_id
    if largest >= num_rows:
        raise RecipeError(
            f"the tokenizer gives the id {largest}, but the model's embedding has {num_rows} rows",
            place="model.path",
            remedy="Use the tokenizer that belongs to the model.",
        )
