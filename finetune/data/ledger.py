"""Account for every record and token between the data files and the samples that are trained on.

For each source and for all of them together:

    records   = records_kept + records_split + records_dropped
    tokens_in = tokens_kept + tokens_dropped + tokens_truncated

A truncated record counts as kept, and its cut tokens as truncated; a record that was split gives several samples, as
pieces of a long text or one for each turn. A malformed record has no tokens, as it was never read as text. What is set
aside for evaluation was kept before and is counted apart: `samples` = trained on + held out, before weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from finetune.console import plural
from finetune.data.types import Origin

DropReason = Literal["over_length", "no_label_after_truncation", "duplicate", "also_in_eval"]
"""Why a record that could be read is left out; a malformed one names its fault instead."""

_ORIGINS_KEPT = 5


@dataclass(frozen=True)
class Dropped:
    """The records that were left out for one reason."""

    reason: str
    """A `DropReason`, or "malformed: " and the kind of fault."""
    records: int
    tokens: int
    first_origins: tuple[Origin, ...]


@dataclass(frozen=True)
class LeftAside:
    """What was left aside in one record, and in how many of its learned turns; 0 where it is about the record."""

    what: str
    turns: int = 0


@dataclass(frozen=True)
class Note:
    """Something that was left aside inside records that could be read, such as a key that no format uses."""

    what: str
    records: int
    first_origins: tuple[Origin, ...]
    turns: int = 0
    """Learned turns that it is about, 0 where it is about whole records."""


@dataclass(frozen=True)
class SourceCount:
    """What one source gave; the sums of the module's docstring hold for each."""

    path: str
    format: str = ""
    weight: float | None = None
    """The source's weight in the recipe; none where it has none."""
    records: int = 0
    records_kept: int = 0
    records_split: int = 0
    records_dropped: int = 0
    records_truncated: int = 0
    samples: int = 0
    tokens_in: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    tokens_truncated: int = 0
    tokens_supervised: int = 0
    """Tokens of the kept samples that are learned."""
    tokens_weighted: int = 0
    """Those of them that have a weight other than 1 in the loss."""
    samples_taken: int | None = None
    """Of one pass over the data, like the ledger's; none where that has none."""

    def __post_init__(self) -> None:
        assert self.records == self.records_kept + self.records_split + self.records_dropped, self
        assert self.tokens_in == self.tokens_kept + self.tokens_dropped + self.tokens_truncated, self
        assert self.tokens_weighted <= self.tokens_supervised <= self.tokens_kept, self
        assert self.samples >= self.records_kept + self.records_split, self

    def plus(self, **counts: int) -> SourceCount:
        """Returns the count with these numbers added."""
        return replace(self, **{name: getattr(self, name) + count for name, count in counts.items()})


@dataclass(frozen=True)
class Ledger:
    """What became of the records and tokens of a list of sources; the sums are asserted."""

    records: int
    records_kept: int
    records_split: int
    records_dropped: int
    records_truncated: int
    samples: int
    tokens_in: int
    tokens_kept: int
    tokens_dropped: int
    tokens_truncated: int
    tokens_supervised: int
    tokens_weighted: int
    dropped: tuple[Dropped, ...]
    notes: tuple[Note, ...]
    sources: tuple[SourceCount, ...]
    samples_held_out: int = 0
    """Kept samples that were set aside for evaluation."""
    tokens_held_out: int = 0
    samples_taken: int | None = None
    """Samples that one pass over the data trains on: kept, not held out, times the weights; none where each source has
    the weight 1."""
    tokens_taken: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            assert getattr(self, name) == sum(getattr(source, name) for source in self.sources), (name, self)
        assert self.records_dropped == sum(group.records for group in self.dropped), self
        assert self.tokens_dropped == sum(group.tokens for group in self.dropped), self
        assert 0 <= self.samples_held_out <= self.samples, self
        assert self.samples_taken in (None, sum(source.samples_taken or 0 for source in self.sources)), self

    def summary_lines(self) -> list[str]:
        """Returns the ledger as lines for the console; the first always, the others where there is something to say."""
        share = 100 * self.tokens_supervised / self.tokens_kept if self.tokens_kept else 0.0
        weighted = f", {self.tokens_weighted:,} of them with a weight other than 1" if self.tokens_weighted else ""
        lines = [
            f"{plural(self.records, 'record')} -> {plural(self.samples, 'sample')}, "
            f"{plural(self.tokens_kept, 'token')}, {self.tokens_supervised:,} learned ({share:.1f} %){weighted}"
        ]
        if len(self.sources) > 1:
            lines += [_source_line(source) for source in self.sources]
        for group in self.dropped:
            places = _places(group.first_origins, group.records)
            lines.append(f"  dropped {group.records:,} ({group.reason}), {plural(group.tokens, 'token')}: {places}")
        if self.records_truncated:
            cut = plural(self.tokens_truncated, "token")
            lines.append(f"  truncated {plural(self.records_truncated, 'record')}, {cut} cut")
        if self.records_split:
            pieces = plural(self.samples - self.records_kept, "sample")
            lines.append(f"  split {plural(self.records_split, 'record')} into {pieces}")
        if self.samples_held_out:
            tokens = plural(self.tokens_held_out, "token")
            lines.append(f"  held out {plural(self.samples_held_out, 'sample')}, {tokens}")
        if self.samples_taken is not None:
            tokens = plural(self.tokens_taken or 0, "token")
            lines.append(f"  one pass takes {plural(self.samples_taken, 'sample')}, {tokens}")
        for note in self.notes:
            records = plural(note.records, "record")
            count = f"{plural(note.turns, 'turn')} in {records}" if note.turns else records
            lines.append(f"  note: {note.what}: {count}: {_places(note.first_origins, note.records)}")
        return lines

    def with_held_out(self, *, samples: int, tokens: int) -> Ledger:
        """Returns the ledger with the part that was set aside for evaluation."""
        return replace(self, samples_held_out=samples, tokens_held_out=tokens)

    def with_taken(self, *, samples: Sequence[int], tokens: int) -> Ledger:
        """Returns the ledger with what one pass trains on: the samples of each source, the tokens of all."""
        pairs = zip(self.sources, samples, strict=True)
        sources = tuple(replace(source, samples_taken=count) for source, count in pairs)
        return replace(self, sources=sources, samples_taken=sum(samples), tokens_taken=tokens)

    def shallow_dict(self) -> dict[str, Any]:
        """Returns the fields by name, as they are."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def with_paths(self, paths: Mapping[str, str], *, sources: Sequence[str]) -> Ledger:
        """Returns the ledger with other names: `paths` from old files to new, `sources` for the sources in order."""

        def renamed(origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
            return tuple(Origin(paths[origin.path], origin.record, origin.line) for origin in origins)

        return replace(
            self,
            sources=tuple(replace(source, path=path) for source, path in zip(self.sources, sources, strict=True)),
            dropped=tuple(replace(group, first_origins=renamed(group.first_origins)) for group in self.dropped),
            notes=tuple(replace(note, first_origins=renamed(note.first_origins)) for note in self.notes),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the ledger as plain JSON values."""
        values = asdict(self)
        for name in ("dropped", "notes"):
            for group, own in zip(values[name], getattr(self, name), strict=True):
                group["first_origins"] = [origin.as_dict() for origin in own.first_origins]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """Reads what `as_dict` gave.

        Raises:
            KeyError, TypeError: a value is missing or unknown.
            AssertionError: the numbers do not add up.
        """
        dropped = tuple(Dropped(**{**group, "first_origins": _origins(group)}) for group in values["dropped"])
        notes = tuple(Note(**{**note, "first_origins": _origins(note)}) for note in values["notes"])
        sources = tuple(SourceCount(**source) for source in values["sources"])
        return cls(**{**values, "dropped": dropped, "notes": notes, "sources": sources})


_COUNTS = (
    "records",
    "records_kept",
    "records_split",
    "records_dropped",
    "records_truncated",
    "samples",
    "tokens_in",
    "tokens_kept",
    "tokens_dropped",
    "tokens_truncated",
    "tokens_supervised",
    "tokens_weighted",
)


def _origins(group: dict[str, Any]) -> tuple[Origin, ...]:
    return tuple(Origin.from_dict(origin) for origin in group["first_origins"])


def _places(origins: Sequence[Origin], count: int) -> str:
    """Returns places as one text; a file that was just named is not named again."""
    texts = []
    for index, origin in enumerate(origins):
        is_same = index > 0 and origins[index - 1].path == origin.path
        texts.append(str(origin).removeprefix(origin.path).lstrip(": ") if is_same else str(origin))
    return ", ".join(texts) + (", ..." if count > len(origins) else "")


def _source_line(source: SourceCount) -> str:
    weight = f", weight {source.weight:g}" if source.weight not in (None, 1.0) else ""
    lost = f", {source.records_dropped:,} dropped" if source.records_dropped else ""
    taken = f", {source.samples_taken:,} taken by one pass" if source.samples_taken is not None else ""
    return (
        f"  {source.path} ({source.format}{weight}): {plural(source.records, 'record')}{lost}, "
        f"{plural(source.samples, 'sample')}, {plural(source.tokens_kept, 'token')}{taken}"
    )


@dataclass
class _Group:
    records: int = 0
    tokens: int = 0
    turns: int = 0
    first_origins: list[Origin] = field(default_factory=list)

    def add(self, origin: Origin, *, tokens: int = 0, turns: int = 0) -> None:
        self.records += 1
        self.tokens += tokens
        self.turns += turns
        if len(self.first_origins) < _ORIGINS_KEPT:
            self.first_origins.append(origin)


class LedgerBuilder:
    """Counts while the sources are read; `Ledger` is the result."""

    def __init__(self) -> None:
        self._sources: list[SourceCount] = []
        self._dropped: dict[str, _Group] = {}
        self._notes: dict[str, _Group] = {}
        self._pending: dict[str, int] = dict.fromkeys(_COUNTS, 0)

    def open_source(self, path: str, *, weight: float | None = None) -> None:
        """Starts a source; what is counted from here on belongs to it."""
        self._close_source()
        self._sources.append(SourceCount(path, weight=weight))

    def set_format(self, format: str) -> None:
        """Notes the format of the current source."""
        self._sources[-1] = replace(self._sources[-1], format=format)

    def keep(self, num_tokens: int, *, pieces: Sequence[int], supervised: int, weighted: int = 0) -> None:
        """Counts a record of `num_tokens` that became samples of these lengths, `supervised` tokens of them learned and
        `weighted` of these with a weight other than 1."""
        kept, count = sum(pieces), self._pending
        count["records"] += 1
        count["records_split" if len(pieces) > 1 else "records_kept"] += 1
        count["records_truncated"] += int(kept < num_tokens)
        count["samples"] += len(pieces)
        count["tokens_in"] += num_tokens
        count["tokens_kept"] += kept
        count["tokens_truncated"] += num_tokens - kept
        count["tokens_supervised"] += supervised
        count["tokens_weighted"] += weighted

    def drop(self, origin: Origin, *, num_tokens: int, reason: str) -> None:
        """Counts a record that is left out."""
        for name, number in (("records", 1), ("records_dropped", 1)):
            self._pending[name] += number
        self._pending["tokens_in"] += num_tokens
        self._pending["tokens_dropped"] += num_tokens
        self._dropped.setdefault(reason, _Group()).add(origin, tokens=num_tokens)

    def note(self, what: LeftAside, origin: Origin) -> None:
        """Counts a record of which a part was left aside."""
        self._notes.setdefault(what.what, _Group()).add(origin, turns=what.turns)

    def finish(self) -> Ledger:
        """Returns the ledger, its sums asserted."""
        self._close_source()
        return Ledger(
            **{name: sum(getattr(source, name) for source in self._sources) for name in _COUNTS},
            dropped=tuple(
                Dropped(reason, group.records, group.tokens, tuple(group.first_origins))
                for reason, group in self._dropped.items()
            ),
            notes=tuple(
                Note(what, group.records, tuple(group.first_origins), group.turns)
                for what, group in self._notes.items()
            ),
            sources=tuple(self._sources),
        )

    def _close_source(self) -> None:
        """Adds what was counted to the source; once for each source, as a frozen count a record would be slow."""
        if self._sources:
            self._sources[-1] = self._sources[-1].plus(**self._pending)
        self._pending = dict.fromkeys(_COUNTS, 0)
