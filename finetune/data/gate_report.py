"""Say what the gate looked at: one check a line, with shares and counts over the whole data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from finetune.console import plural
from finetune.data.gate import FAULTS, WARNINGS, Check, Finding, GateCounts, GateReport
from finetune.data.ledger import Ledger
from finetune.data.store import SampleStore

_LOW_SHARE = 0.01
_EXAMPLES = 3
_WARNING_NAMES: tuple[tuple[str, Finding], ...] = (
    ("BOS", "bos_missing"),
    ("BOS inside", "bos_repeated"),
    ("generation prompt", "prompt_differs"),
    ("no generation prompt", "prompt_missing"),
    ("definitions of tools", "tools_hidden"),
    ("text outside the vocabulary", "unknown_text"),
)
assert not {name for _, name in _WARNING_NAMES} & FAULTS.keys()


def gate_report(
    counts: Sequence[GateCounts],
    train: SampleStore,
    held_out: SampleStore | None,
    *,
    max_length: int,
    checks: Sequence[Check],
) -> GateReport:
    """Returns the report on data that passed; a fault would have stopped before.

    Args:
        counts: what was seen while tokenizing, of the training and of the evaluation sources.
        checks: on equal records, made where they were looked for.
    """
    documents = sum(count.documents for count in counts)
    stores = [train] if held_out is None else [train, held_out]
    longest = max(int(store.lengths.max()) for store in stores)
    return GateReport(
        (
            *_share_checks(train),
            *_weight_checks(stores),
            _end_check(counts, documents),
            *_warning_checks(counts, documents),
            Check("length", "ok", f"the longest sample has {longest:,} of {max_length:,} tokens"),
            *checks,
        )
    )


def cut_check(ledgers: Sequence[Ledger]) -> list[Check]:
    """Returns a warning where samples were cut: faults are looked for in whole records, so they do not show it."""
    num_cut = sum(ledger.records_truncated for ledger in ledgers)
    if not num_cut:
        return []
    were = "sample was" if num_cut == 1 else "samples were"
    detail = f"{num_cut:,} {were} cut at `data.max_length`; what is learned there may lack its end of turn"
    return [Check("cut answers", "warning", detail)]


def _share_checks(store: SampleStore) -> list[Check]:
    """Returns the share of each sample's tokens that is learned: lowest, median, highest, and whether some is tiny."""
    shares = store.supervised / store.lengths
    lowest, median, highest = (float(value) for value in np.quantile(shares, (0.0, 0.5, 1.0)))
    low = np.flatnonzero(shares < _LOW_SHARE)
    detail = f"{lowest:.1%} to {highest:.1%} of a sample's tokens, median {median:.1%}"
    status: Literal["ok", "warning"] = "ok"
    if len(low):
        status, detail = "warning", f"{detail}; {plural(len(low), 'sample')} below {_LOW_SHARE:.0%}"
    return [Check("learned share", status, detail, tuple(str(store.origin(int(index))) for index in low[:_EXAMPLES]))]


def _weight_checks(stores: Sequence[SampleStore]) -> list[Check]:
    """Returns how many learned tokens have a weight other than 1; nothing where none has."""
    weighted = sum(int(store.weighted.sum()) for store in stores)
    if not weighted:
        return []
    learned = sum(store.num_supervised_tokens for store in stores)
    return [Check("loss weights", "ok", f"{weighted:,} of {learned:,} learned tokens have a weight other than 1")]


def _end_check(counts: Sequence[GateCounts], documents: int) -> Check:
    """Returns in how many records an end is learned, and why in the others none is; `cut_check` warns of cut ones."""
    learned = sum(count.ends_learned for count in counts)
    left_out = [count.warnings["end_left_out"] for count in counts if "end_left_out" in count.warnings]
    num_left_out = sum(group.records for group in left_out)
    detail = f"learned in {learned:,} of {plural(documents, 'record')}"
    if cut := documents - learned - num_left_out:
        detail += f"; cut off in {cut:,}"
    if not num_left_out:
        return Check("end of turn", "ok", detail)
    origins = [str(origin) for group in left_out for origin in group.origins][:_EXAMPLES]
    detail += f"; in {num_left_out:,} {WARNINGS['end_left_out']}, so that they do not teach to stop"
    return Check("end of turn", "warning", detail, tuple(origins))


def _warning_checks(counts: Sequence[GateCounts], documents: int) -> list[Check]:
    checks: list[Check] = []
    for name, finding in _WARNING_NAMES:
        found = [count.warnings[finding] for count in counts if finding in count.warnings]
        if found:
            records = sum(group.records for group in found)
            origins = [str(origin) for group in found for origin in group.origins][:_EXAMPLES]
            detail = f"{WARNINGS[finding]} ({records:,} of {plural(documents, 'record')})"
            checks.append(Check(name, "warning", detail, tuple(origins)))
        elif finding == "bos_missing" and not any("bos_repeated" in count.warnings for count in counts):
            checks.append(Check(name, "ok", "at most one in each record, at its start"))
    return checks
