"""Build the data set of a run: files -> conversations -> samples, through the gate, with a ledger and a cache.

Records are streamed: at any time a few batches of them are in memory, beside the index of all samples. Tokens past a
limit go to disk, and come back mapped. What depends on all samples at once (equal ones, the split, weights) is index
work on the finished store, so that a change of it needs no tokenizing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import numpy as np

from finetune.console import Say
from finetune.data.entry import Tokenized
from finetune.data.gate import Check, GateReport
from finetune.data.gate_report import cut_check, gate_report
from finetune.data.ledger import Ledger
from finetune.data.pack import PackPlan, one_sample_a_row, pack
from finetune.data.prepared import PreparedSources, date_of, prepare_sources
from finetune.data.references import read_references
from finetune.data.split import apply_duplicates, apply_leakage, hold_out, source_numbers, weight_check, weighted
from finetune.data.store import SampleStore
from finetune.data.template import prints_today
from finetune.data.types import PromptReference
from finetune.errors import DataError
from finetune.recipe.schema import DataSection, EvalFraction, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Dataset:
    """The samples of a run.

    `ledger` accounts for the sources of `data.train`, with what was held out of them. `eval_ledger` accounts for those
    of `data.eval`, and is None when evaluation uses a fraction of the training data or does not happen. `gate` tells
    what was checked; a fault would have been an error.
    """

    train: SampleStore
    eval: SampleStore | None
    references: list[PromptReference]
    ledger: Ledger
    eval_ledger: Ledger | None
    gate: GateReport
    end_ids: tuple[int, ...]
    """Control tokens that end the samples' last answers: where generation should stop, whatever the model's EOS is."""
    date: str | None
    """The date (YYYY-MM-DD) that the chat template writes, in every sample; None where it writes none."""
    hub_commits: dict[str, str]
    """The commit of each dataset of the hub that was read, by `pin_name` of its source."""


def build_dataset(
    data: DataSection,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    say: Say,
    max_references: int = 0,
    workers: int | None = None,
) -> Dataset:
    """Reads, renders, checks and splits the data of a recipe.

    Args:
        seed: decides which samples are held out when `data.eval` is a fraction, and which a weight takes.
        say: takes one line of progress at a time, such as the format recognised and the cache's hit or miss.
        max_references: prompts with their answers to return at most, from the first evaluation samples on.
        workers: processes that tokenize; none takes what cores and free memory allow. The result is the same.

    Raises:
        DataError: a file or record is wrong, nothing is left to train or evaluate on, or a sample is too long.
        EnvironmentProblem: a process that tokenizes died.
    """
    if data.date is None and prints_today(tokenizer.chat_template):
        data = data.model_copy(update={"date": date.today().isoformat()})  # one date for all that is rendered below

    def prepared(sources: Sequence[Source]) -> PreparedSources:
        return prepare_sources(sources, data=data, tokenizer=tokenizer, say=say, workers=workers)

    source = prepared(data.train)
    held_out_source = prepared(data.eval) if isinstance(data.eval, list) else source
    parts = _part(source, held_out_source.store if isinstance(data.eval, list) else None, data=data, seed=seed)
    references = []
    if parts.held_out is not None:
        references = read_references(
            parts.held_out, held_out_source, tokenizer=tokenizer, date=date_of(data), limit=max_references, say=say
        )
    has_own_eval = held_out_source is not source
    counts = [source.counts, held_out_source.counts] if has_own_eval else [source.counts]
    checks = [*parts.checks, *cut_check([source.ledger, held_out_source.ledger] if has_own_eval else [source.ledger])]
    return Dataset(
        train=parts.train,
        eval=parts.held_out,
        references=references,
        ledger=parts.ledger,
        eval_ledger=held_out_source.ledger if has_own_eval else None,
        gate=gate_report(counts, parts.train, parts.held_out, max_length=data.max_length, checks=checks),
        end_ids=tuple(sorted(source.counts.end_ids)),
        date=data.date,
        hub_commits=source.hub_commits | held_out_source.hub_commits,
    )


@dataclass(frozen=True)
class _Parts:
    train: SampleStore
    held_out: SampleStore | None
    ledger: Ledger
    checks: list[Check]


def _part(source: Tokenized, held_out: SampleStore | None, *, data: DataSection, seed: int) -> _Parts:
    """Parts the training sources into what is trained on and what is held out; all of it is index work.

    Raises:
        DataError: equal records are refused, or nothing is left to train on.
    """
    train, ledger, duplicates = apply_duplicates(source.store, source.ledger, policy=data.duplicates)
    checks = [duplicates]
    if held_out is not None:
        train, ledger, leakage = apply_leakage(train, ledger, held_out, policy=data.leakage)
        checks.append(leakage)
    is_held_out = np.zeros(len(train), dtype=np.bool_)
    if isinstance(data.eval, EvalFraction):
        is_held_out = hold_out(train, fraction=data.eval.fraction, seed=seed)
        held_out = train.select(np.flatnonzero(is_held_out))
        ledger = ledger.with_held_out(samples=len(held_out), tokens=held_out.num_tokens)
        checks.append(Check("rows equal in train and eval", "ok", "none can be: equal samples are held out together"))
    weights, source_of = [each.weight for each in data.train], source_numbers(ledger)
    taken = weighted(train, source_of, weights=weights, seed=seed)
    checks += weight_check(ledger, taken=np.bincount(source_of[taken], minlength=len(weights)).tolist())
    taken = taken[~is_held_out[taken]]
    train = train.select(taken)
    if not len(train):
        raise DataError(
            "no sample is left to train on",
            place=data.train[0].path,
            remedy="Raise the sources' `weight`, or hold out less with `data.eval`.",
        )
    if any(weight != 1 for weight in weights):
        samples = np.bincount(source_of[taken], minlength=len(weights)).tolist()
        ledger = ledger.with_taken(samples=samples, tokens=train.num_tokens)
    return _Parts(train, held_out, ledger, checks)


def plan_rows(store: SampleStore, data: DataSection, *, seed: int) -> PackPlan:
    """Packs the samples of a store, or gives each a row of its own."""
    if data.packing:
        return pack(store.lengths, max_length=data.max_length, seed=seed)
    return one_sample_a_row(store.lengths, max_length=data.max_length)
