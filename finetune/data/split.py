"""Part samples into train and eval, find equal ones, and apply the weights of sources: index work, no tokens read.

Two samples are equal when the hash of their records' tokens is; of duplicates, labels and loss weights are equal too.
All pieces of a record that was split share its hash, so they always stay on one side. Everything here works on arrays
of one number a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from finetune.console import plural
from finetune.data.faults import EXAMPLES_SHOWN, Fault, faults_of_one_kind
from finetune.data.gate import Check
from finetune.data.ledger import Dropped, DropReason, Ledger
from finetune.data.store import SampleStore
from finetune.data.types import Origin
from finetune.errors import DataError

_ORIGINS = 5


def hold_out(store: SampleStore, *, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Chooses the samples to evaluate on: a share of the distinct records, by a hash of their tokens [N].

    The choice depends on the seed and the tokens alone, not on the order of the files.

    Raises:
        DataError: there are not two distinct records to part.
    """
    distinct = np.unique(store.digests)
    if len(distinct) < 2:
        raise DataError(
            f"the training data has {len(distinct)} distinct sample, so none can be held out for evaluation",
            place=store.paths[0],
            remedy="Add data, give `data.eval` files of its own, or leave `data.eval` out.",
        )
    count = min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    chosen = distinct[np.argsort(_mixed(distinct, seed), kind="stable")[:count]]
    return np.isin(store.digests, chosen)


def repeated(store: SampleStore) -> NDArray[np.bool_]:
    """Returns which samples belong to a record that equals an earlier one [N]; pieces of one record are no repeats."""
    if not len(store):
        return np.zeros(0, dtype=np.bool_)
    numbers = store.record_numbers
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))  # the first piece of each record
    _, earliest = np.unique(store.digests[firsts], return_index=True)
    is_first = np.zeros(len(firsts), dtype=np.bool_)
    is_first[earliest] = True
    return ~is_first[numbers]


def is_in(store: SampleStore, other: SampleStore) -> NDArray[np.bool_]:
    """Returns which samples are equal to a sample of the other store [N]."""
    return np.isin(store.digests, other.digests)


def first_equal(store: SampleStore, is_equal: NDArray[np.bool_], other: SampleStore) -> list[tuple[Origin, Origin]]:
    """Returns the places of the first equal records, each with that of its first equal in the other store."""
    found: list[tuple[Origin, Origin]] = []
    for index in _first_pieces(store, is_equal)[:EXAMPLES_SHOWN].tolist():
        match = int(np.flatnonzero(other.digests == store.digests[index])[0])
        found.append((store.origin(index), other.origin(match)))
    return found


def _first_pieces(store: SampleStore, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the first chosen sample of each record that has one."""
    places = np.flatnonzero(chosen)
    return places[np.diff(store.record_numbers[places], prepend=-1) > 0]


def _equal_places(pairs: Sequence[tuple[Origin, Origin]]) -> tuple[str, ...]:
    return tuple(f"{origin} = {match}" for origin, match in pairs)


def _equal_faults(pairs: Sequence[tuple[Origin, Origin]], message: str, remedy: str) -> list[Fault]:
    return [Fault(origin, f"{message}: {match}", remedy, kind=message, can_be_dropped=False) for origin, match in pairs]


def apply_duplicates(
    store: SampleStore, ledger: Ledger, *, policy: Literal["keep", "drop", "error"]
) -> tuple[SampleStore, Ledger, Check]:
    """Keeps, leaves out or refuses the training records that equal an earlier one.

    Raises:
        DataFaults: there are some, and the policy is `error`.
    """
    name = "duplicates"
    told_apart = _with_labels_hashed(store)
    is_repeat = repeated(told_apart)
    if not is_repeat.any():
        return store, ledger, Check(name, "ok", "all records differ")
    total = int(store.record_numbers[-1]) + 1
    pairs = first_equal(told_apart, is_repeat, told_apart)
    examples = _equal_places(pairs)
    count = num_records(store, is_repeat)
    detail = f"{count:,} of {plural(total, 'record')} {'equals' if count == 1 else 'equal'} an earlier one"
    if policy == "error":
        remedy = "Remove them, or set `data.duplicates` to drop (learn each once) or keep."
        raise faults_of_one_kind(
            f"{detail}: {', '.join(examples)}",
            place=str(pairs[0][0]),
            remedy=remedy,
            examples=_equal_faults(pairs, "the record equals an earlier one", remedy),
            records=num_records(store, is_repeat),
        )
    if policy == "keep":
        detail = f"{detail} and {'is' if count == 1 else 'are'} learned again (`data.duplicates: drop` leaves them out)"
        return store, ledger, Check(name, "warning", detail, examples)
    store, ledger = without(store, is_repeat, ledger, reason="duplicate")
    return store, ledger, Check(name, "ok", f"{detail} and {'was' if count == 1 else 'were'} left out", examples)


def apply_leakage(
    store: SampleStore, ledger: Ledger, held_out: SampleStore, *, policy: Literal["error", "drop", "keep"]
) -> tuple[SampleStore, Ledger, Check]:
    """Refuses, leaves out or keeps the training records that equal a record of the evaluation data.

    Raises:
        DataFaults: there are some, and the policy is `error`.
        DataError: all are, and the policy is `drop`.
    """
    name = "rows equal in train and eval"
    is_leak = is_in(store, held_out)
    if not is_leak.any():
        return store, ledger, Check(name, "ok", "none")
    pairs = first_equal(store, is_leak, held_out)
    examples = _equal_places(pairs)
    count = num_records(store, is_leak)
    detail = f"{plural(count, 'training record')} {'equals' if count == 1 else 'equal'} a record of `data.eval`"
    place = str(pairs[0][0])
    if policy == "error":
        remedy = (
            "Remove them from one of the two, set `data.leakage` to drop (leaves them out of training) or keep, or "
            "give `data.eval` a fraction."
        )
        raise faults_of_one_kind(
            f"{detail}, so the evaluation would measure what was learned by heart: {', '.join(examples)}",
            place=place,
            remedy=remedy,
            examples=_equal_faults(pairs, "the record equals one of `data.eval`", remedy),
            records=num_records(store, is_leak),
        )
    if policy == "keep":
        return (
            store,
            ledger,
            Check(name, "warning", f"{detail} and {'is' if count == 1 else 'are'} learned (`data.leakage`)", examples),
        )
    if is_leak.all():
        raise DataError(
            "all training records equal a record of `data.eval`, so none is left to train on",
            place=place,
            remedy="Give `data.eval` other files, or a fraction.",
        )
    store, ledger = without(store, is_leak, ledger, reason="also_in_eval")
    return (
        store,
        ledger,
        Check(name, "ok", f"{detail} and {'was' if count == 1 else 'were'} left out of training", examples),
    )


def num_records(store: SampleStore, chosen: NDArray[np.bool_]) -> int:
    """Returns how many records the chosen samples come from."""
    return len(np.unique(store.record_numbers[chosen]))


def without(
    store: SampleStore, removed: NDArray[np.bool_], ledger: Ledger, *, reason: DropReason
) -> tuple[SampleStore, Ledger]:
    """Returns the store without some whole records, and the ledger with them as dropped.

    The store must be the one that the ledger tells of: its samples, source after source.
    """
    bounds = np.cumsum([0, *(source.samples for source in ledger.sources)])
    assert bounds[-1] == len(store) == ledger.samples, "the store is not the ledger's"
    pieces = np.bincount(store.record_numbers)[store.record_numbers] if len(store) else np.zeros(0, dtype=np.int64)
    sources, changes = [], dict.fromkeys(_MOVED, 0)
    for source, start, end in zip(ledger.sources, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        gone = np.flatnonzero(removed[start:end]) + start
        split = gone[pieces[gone] > 1]
        tokens, num_split = int(store.lengths[gone].sum()), len(np.unique(store.record_numbers[split]))
        records = len(np.unique(store.record_numbers[gone]))
        change = {
            "records_kept": num_split - records,
            "records_split": -num_split,
            "records_dropped": records,
            "samples": -len(gone),
            "tokens_kept": -tokens,
            "tokens_dropped": tokens,
            "tokens_supervised": -int(store.supervised[gone].sum()),
            "tokens_weighted": -int(store.weighted[gone].sum()),
        }
        sources.append(source.plus(**change))
        changes = {name: changes[name] + change[name] for name in _MOVED}
    origins = tuple(store.origin(index) for index in _first_pieces(store, removed)[:_ORIGINS].tolist())
    group = Dropped(reason, changes["records_dropped"], changes["tokens_dropped"], origins)
    counts = {name: getattr(ledger, name) + change for name, change in changes.items()}
    values = {**ledger.shallow_dict(), **counts, "dropped": (*ledger.dropped, group), "sources": tuple(sources)}
    return store.select(np.flatnonzero(~removed)), Ledger(**values)


_MOVED = (
    "records_kept",
    "records_split",
    "records_dropped",
    "samples",
    "tokens_kept",
    "tokens_dropped",
    "tokens_supervised",
    "tokens_weighted",
)


def source_numbers(ledger: Ledger) -> NDArray[np.int64]:
    """Returns the source of each sample of the ledger's store [N]."""
    return np.repeat(np.arange(len(ledger.sources)), [source.samples for source in ledger.sources])


def weighted(
    store: SampleStore, source_of: NDArray[np.int64], *, weights: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """Returns which samples are taken, by index, each record `weight` times.

    Weight 2.5 takes each record of a source twice and half of them, drawn by the seed, once more. Pieces of a record
    are taken together.
    """
    rng = np.random.default_rng(seed)
    times = np.zeros(len(store), dtype=np.int64)
    for number, weight in enumerate(weights):
        samples = np.flatnonzero(source_of == number)
        records, inverse = np.unique(store.record_numbers[samples], return_inverse=True)
        whole = int(weight)
        extra = round((weight - whole) * len(records))
        takes = np.full(len(records), whole, dtype=np.int64)
        takes[rng.permutation(len(records))[:extra]] += 1
        times[samples] = takes[inverse]
    return np.repeat(np.arange(len(store), dtype=np.int64), times)


def weight_check(ledger: Ledger, *, taken: Sequence[int]) -> list[Check]:
    """Returns a warning that names the sources of which the weights take nothing; none where there is no such source.

    Args:
        taken: samples of each source that the weights take.
    """
    empty = [source for source, count in zip(ledger.sources, taken, strict=True) if source.samples and not count]
    if not empty:
        return []
    detail = "the `weight` of a source rounds to none of its records, so nothing of it is learned; raise it"
    examples = (f"{source.path} (weight {source.weight:g}, {plural(source.samples, 'sample')})" for source in empty)
    return [Check("weights of sources", "warning", detail, tuple(examples))]


def _with_labels_hashed(store: SampleStore) -> SampleStore:
    """Returns the store with labels and loss weights in its records' hashes: equal texts of which other tokens are
    learned, or with other weights, are no repeats.

    Only there: a text of `data.eval` is learned by heart whatever its labels, so leaks are told by tokens alone.
    """
    numbers = store.record_numbers
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))  # the first piece of each record
    learned = store.label_digests.copy()
    samples, runs = store.weight_runs.of_samples(store.starts, store.starts + store.lengths)
    places = [borders.astype(np.uint64) for borders in (runs.starts, runs.ends)]
    bits = runs.values.view(np.uint32).astype(np.uint64)
    np.add.at(learned, samples, _mixed(_mixed(places[0], 1) + _mixed(places[1], 2) + _mixed(bits, 3), 4))
    pieces = (np.arange(len(store)) - firsts[numbers]).astype(np.uint64)
    hashes = np.zeros(len(firsts), dtype=np.uint64)
    np.add.at(hashes, numbers, _mixed(learned + _mixed(pieces, 5), 6))
    return replace(store, digests=store.digests + hashes[numbers])


def _mixed(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Returns the values scrambled by the seed, so that each seed orders them otherwise (the mixer of SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
