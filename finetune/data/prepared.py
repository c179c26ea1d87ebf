"""Tokenize the sources of one list (`data.train`, `data.eval`), or take them from the cache."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.console import Say, plural
from finetune.data.cache import DATA_VERSION, CacheKey, FileState, cache_folder, template_digest, tokenizer_digest
from finetune.data.entry import Tokenized, entry_lock, open_entry, write_entry
from finetune.data.faults import FaultList
from finetune.data.gate import GateCounts
from finetune.data.hub_commit import note_commit
from finetune.data.ledger import Ledger, LedgerBuilder
from finetune.data.over_length import OverLength
from finetune.data.pool import choose_workers, map_ordered
from finetune.data.reading import Reading, open_source
from finetune.data.sources import hashed_files, hub_of, pin_name, source_files
from finetune.data.store import StoreBuilder
from finetune.data.tokenize import Batch, BatchResult, BatchTokenizer, Result, Settings
from finetune.errors import DataError
from finetune.recipe.schema import DataSection, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PROGRESS_SECONDS = 5.0
_BYTES_WORTH_WORKERS = 4 << 20
"""Starting processes takes longer than tokenizing less than this."""
_ROWS_WORTH_WORKERS = 4096
"""The same for the rows of a dataset whose size is not known."""


@dataclass(frozen=True)
class PreparedSources(Tokenized):
    """Tokenized sources with what is needed to read some of their records again."""

    sources: tuple[Source, ...]
    hub_commits: dict[str, str]
    """The commit of each dataset of the hub, by `pin_name` of its source."""
    key: CacheKey | None
    """The key of the cache entry that holds them; none where no entry does."""


def prepare_sources(
    sources: Sequence[Source],
    *,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    say: Say,
    workers: int | None = None,
) -> PreparedSources:
    """Returns the samples of some sources, from the cache where it has them.

    Raises:
        DataError: a file or record is wrong, a file changed meanwhile, or no sample is left.
        EnvironmentProblem: a dataset of the hub cannot be reached, or a process that tokenizes died.
    """
    files = [path for source in sources for path in source_files(source)]
    hashed = [path for source in sources for path in hashed_files(source)]
    names = [source.path for source in sources]
    commits = _commits(sources, data, say)
    pins = {pin_name(source): sha for source, sha in zip(sources, commits, strict=True) if sha is not None}

    def tokenized() -> Tokenized:
        return _tokenize(sources, files, data=data, tokenizer=tokenizer, say=say, workers=workers)

    # A missing file is left to the reader, which names it better than a failed hash.
    if not data.cache or not all(map(os.path.isfile, hashed)):
        found = tokenized()
        return PreparedSources(found.store, found.ledger, found.counts, found.shapes, tuple(sources), pins, None)
    states = [FileState.of(path) for path in hashed]
    key = _cache_key(sources, states, commits, data=data, tokenizer=tokenizer)
    with ExitStack() as held:
        held.enter_context(entry_lock(key, say=say))
        found = open_entry(key, files=files, sources=names, say=say)
        if found is None:
            found = tokenized()
            for state in states:
                state.require_unchanged()
            if not write_entry(key, found, files=files, say=say):
                key = None
    return PreparedSources(found.store, found.ledger, found.counts, found.shapes, tuple(sources), pins, key)


def date_of(data: DataSection) -> datetime.date | None:
    """Returns the date that templates write, where the recipe or the start of the run gives one."""
    return datetime.date.fromisoformat(data.date) if data.date is not None else None


def _commits(sources: Sequence[Source], data: DataSection, say: Say) -> list[str | None]:
    """Returns the commit of each source that is a dataset of the hub, None for the others; says which."""
    found: list[str | None] = []
    for source in sources:
        hub = hub_of(source)
        commit = hub.commit() if hub is not None else None
        if hub is not None and commit is not None:
            say(f"{hub.label}: commit {commit.sha[:12]} ({commit.origin})")
            if data.cache:
                note_commit(hub.id, hub.revision, commit, say=say)
        found.append(commit.sha if commit is not None else None)
    return found


def _cache_key(
    sources: Sequence[Source],
    states: Sequence[FileState],
    commits: Sequence[str | None],
    *,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
) -> CacheKey:
    import tokenizers
    import transformers

    parts: dict[str, Any] = {
        "files": [state.sha256 for state in states],
        "file_types": ["".join(Path(state.path).suffixes[-2:]).lower() for state in states],
        "hub_commits": [sha and f"{source.path}@{sha}" for source, sha in zip(sources, commits, strict=True)],
        "hub_libraries": _hub_libraries() if any(commits) else "",
        "files_of_sources": [len(source_files(source)) for source in sources],
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer),
        "data_version": DATA_VERSION,
        "libraries": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
    }
    # A commit stands for the revision that led to it. Streamed rows may differ from downloaded ones (see `hub.py`).
    left_out = {"path", "weight", "revision"}
    for name in [name for name in Source.model_fields if name not in left_out]:
        parts["formats" if name == "format" else name] = [source.model_dump(mode="json")[name] for source in sources]
    # Whatever is no index work on the finished store counts; a new field of the section counts until it is named here.
    after = {"train", "eval", "packing", "cache", "duplicates", "leakage"}
    return CacheKey(parts | data.model_dump(mode="json", exclude=after))


def _hub_libraries() -> str:
    """Returns the versions of what makes rows of the files of a commit."""
    import datasets
    import pyarrow

    return f"datasets {datasets.__version__}, pyarrow {pyarrow.__version__}"


def _tokenize(
    sources: Sequence[Source],
    files: Sequence[str],
    *,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    say: Say,
    workers: int | None,
) -> Tokenized:
    settings = Settings(
        data.loss_on,
        data.over_length,
        data.max_length,
        refuses_unknown_control_tokens=data.unknown_control_tokens == "error",
        role_order=data.role_order,
        turns=data.turns,
        date=date_of(data),
    )
    if workers is None:
        workers = choose_workers() if _is_worth_workers(sources, files) else 1
    collected = _Collected(data, files, say)
    work = BatchTokenizer(tokenizer, settings)
    for result in map_ordered(work, collected.batches(sources), workers=workers, describe=str):
        collected.add(result)
    return collected.finish(sources)


def _is_worth_workers(sources: Sequence[Source], files: Sequence[str]) -> bool:
    """Says whether there is much to tokenize; how large a dataset of the hub is shows only once it is read."""
    if any(hub_of(source) and (source.max_rows or _ROWS_WORTH_WORKERS) >= _ROWS_WORTH_WORKERS for source in sources):
        return True
    return sum(Path(path).stat().st_size for path in files if os.path.isfile(path)) >= _BYTES_WORTH_WORKERS


def _remedy_for(ledger: Ledger) -> str:
    """Returns what brings records back that were left out, one remedy for each reason."""
    reasons = {group.reason.partition(":")[0] for group in ledger.dropped}
    remedies = []
    if reasons & {"over_length", "no_label_after_truncation"}:
        remedies.append("Raise `data.max_length`: the records are longer.")
    if "malformed" in reasons:
        remedies.append("Set `data.malformed` to error, which tells the fault and the remedy of each kind of record.")
    return "\n".join(remedies) or "Check that the files hold what they should."


class _Collected:
    """Puts the batches' results together, in the order of the records."""

    def __init__(self, data: DataSection, files: Sequence[str], say: Say) -> None:
        self._data, self._say = data, say
        folder = cache_folder() if data.cache else None
        self._store = StoreBuilder(folder=folder if folder is not None and folder.is_dir() else None)
        for path in files:
            self._store.add_path(path)
        self._ledger, self._counts, self._faults = LedgerBuilder(), GateCounts(), FaultList()
        self._policy = OverLength(data.over_length, data.max_length)
        self._readings: dict[int, Reading] = {}
        self._source = -1
        self._started = self._said = time.monotonic()
        self._records = 0

    def batches(self, sources: Sequence[Source]) -> Iterator[Batch]:
        """Yields the batches of all sources; reading runs ahead of what `add` has seen."""
        for number, source in enumerate(sources):
            reading = self._readings[number] = open_source(source, number, say=self._say)
            yield from reading.batches()

    def add(self, batch: BatchResult) -> None:
        """Adds one batch's results."""
        self._open_source(batch.source)
        self._store.add_tokens(batch.input_ids, batch.labels, weight_runs=batch.weight_runs)
        self._policy.merge(batch.over_length)
        for result in batch.results:
            self._add_result(result)
        self._records += len(batch.results)
        self._say_progress()

    def finish(self, sources: Sequence[Source]) -> Tokenized:
        """Returns all of it.

        Raises:
            DataError: records cannot be used, samples are too long, or nothing is left.
        """
        self._open_source(len(sources) - 1)
        too_long = self._policy.error()
        if too_long is not None and not len(self._faults):
            raise too_long
        if len(self._faults):
            if too_long is not None:
                self._faults.add_groups(too_long.groups)
            raise self._faults.error()
        ledger = self._ledger.finish()
        if ledger.samples == 0:
            raise DataError(
                "no sample is left: " + "; ".join(line.strip() for line in ledger.summary_lines()),
                place=sources[0].path,
                remedy=_remedy_for(ledger),
            )
        shapes = tuple(self._readings[number].shape for number in range(len(sources)))
        return Tokenized(self._store.finish(), ledger, self._counts, shapes)

    def _open_source(self, number: int) -> None:
        while self._source < number:
            self._source += 1
            reading = self._readings[self._source]
            self._ledger.open_source(reading.source.path, weight=reading.source.weight)
            self._ledger.set_format(reading.format or "")

    def _add_result(self, result: Result) -> None:
        if result.fault is not None:
            if self._data.malformed == "drop" and result.fault.can_be_dropped:
                reason = result.fault.counts_as or f"malformed: {result.fault.kind}"
                self._ledger.drop(result.origin, num_tokens=result.num_tokens, reason=reason)
            else:
                self._faults.add(result.fault)
            return
        if result.dropped is not None:
            self._ledger.drop(result.origin, num_tokens=result.num_tokens, reason=result.dropped)
            return
        self._counts.add(result.findings, result.origin, end_ids=result.end_ids, learns_an_end=result.learns_an_end)
        for note in result.notes:
            self._ledger.note(note, result.origin)
        supervised = sum(result.supervised)
        self._ledger.keep(result.num_tokens, pieces=result.pieces, supervised=supervised, weighted=result.weighted)
        pieces = zip(result.pieces, result.supervised, result.label_digests, strict=True)
        for number, (length, supervised, labels) in enumerate(pieces):
            self._store.add_entry(
                length,
                supervised=supervised,
                digest=result.digest,
                label_digest=labels,
                origin=result.origin,
                is_next_piece=number > 0,
            )

    def _say_progress(self) -> None:
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            rate = self._records / (now - self._started)
            self._say(f"tokenizing: {plural(self._records, 'record')}, {rate:,.0f} a second")
