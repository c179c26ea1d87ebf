"""Account for every record and token between the data files and the samples that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from finetune.data.types import Origin, Sample

DropReason = Literal["over_length", "no_label_after_truncation"]

_ORIGINS_KEPT = 5


@dataclass(frozen=True)
class Dropped:
    """The records that were left out for one reason."""

    reason: DropReason
    records: int
    tokens: int
    first_origins: tuple[Origin, ...]


@dataclass(frozen=True)
class SourceCount:
    """What one data file gave."""

    path: str
    format: str
    records: int
    samples: int
    tokens: int
    """Tokens of the samples that were kept."""


@dataclass(frozen=True)
class Ledger:
    """What became of the records and tokens of a list of data files.

    records = kept + dropped; tokens_in = tokens_kept + tokens_dropped + tokens_truncated. A record that was split
    counts once as kept and gives several samples. Both sums are asserted.
    """

    records: int
    records_kept: int
    samples: int
    records_split: int
    records_truncated: int
    dropped: tuple[Dropped, ...]
    tokens_in: int
    tokens_kept: int
    tokens_dropped: int
    tokens_truncated: int
    tokens_supervised: int
    """Tokens of the kept samples that are learned."""
    sources: tuple[SourceCount, ...]
    samples_held_out: int = 0
    """Kept samples that were set aside for evaluation."""
    tokens_held_out: int = 0

    def __post_init__(self) -> None:
        assert self.records == self.records_kept + self.records_dropped, self
        assert self.tokens_in == self.tokens_kept + self.tokens_dropped + self.tokens_truncated, self
        assert self.tokens_dropped == sum(group.tokens for group in self.dropped), self
        assert self.records == sum(source.records for source in self.sources), self
        assert self.samples == sum(source.samples for source in self.sources), self
        assert self.tokens_kept == sum(source.tokens for source in self.sources), self
        assert self.tokens_supervised <= self.tokens_kept, self

    @property
    def records_dropped(self) -> int:
        return sum(group.records for group in self.dropped)

    def summary_lines(self) -> list[str]:
        """Returns the ledger as lines for the console; the first always, the others where there is something to say."""
        share = 100 * self.tokens_supervised / self.tokens_kept if self.tokens_kept else 0.0
        lines = [
            f"{self.records:,} records -> {self.samples:,} samples, {self.tokens_kept:,} tokens, "
            f"{self.tokens_supervised:,} learned ({share:.1f} %)"
        ]
        if len(self.sources) > 1:
            lines += [
                f"  {source.path} ({source.format}): {source.records:,} records, {source.samples:,} samples, "
                f"{source.tokens:,} tokens"
                for source in self.sources
            ]
        for group in self.dropped:
            origins = ", ".join(map(str, group.first_origins))
            more = ", ..." if group.records > len(group.first_origins) else ""
            lines.append(f"  dropped {group.records:,} ({group.reason}), {group.tokens:,} tokens: {origins}{more}")
        if self.records_truncated:
            lines.append(f"  truncated {self.records_truncated:,} records, {self.tokens_truncated:,} tokens cut")
        if self.records_split:
            pieces = self.samples - self.records_kept + self.records_split
            lines.append(f"  split {self.records_split:,} records into {pieces:,} samples")
        if self.samples_held_out:
            lines.append(f"  held out {self.samples_held_out:,} samples, {self.tokens_held_out:,} tokens")
        return lines

    def with_held_out(self, *, samples: int, tokens: int) -> Ledger:
        """Returns the ledger with the part that was set aside for evaluation."""
        return replace(self, samples_held_out=samples, tokens_held_out=tokens)

    def with_paths(self, paths: Sequence[str]) -> Ledger:
        """Returns the ledger with other names for its files, in the same order."""
        renamed = dict(zip((source.path for source in self.sources), paths, strict=True))
        return replace(
            self,
            sources=tuple(replace(source, path=path) for source, path in zip(self.sources, paths, strict=True)),
            dropped=tuple(
                replace(
                    group,
                    first_origins=tuple(Origin(renamed[origin.path], origin.record) for origin in group.first_origins),
                )
                for group in self.dropped
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the ledger as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """Reads what `as_dict` gave.

        Raises:
            KeyError, TypeError: a value is missing or unknown.
        """
        dropped = tuple(
            Dropped(**{**group, "first_origins": tuple(Origin(**origin) for origin in group["first_origins"])})
            for group in values["dropped"]
        )
        sources = tuple(SourceCount(**source) for source in values["sources"])
        return cls(**{**values, "dropped": dropped, "sources": sources})


@dataclass
class _Group:
    records: int = 0
    tokens: int = 0
    first_origins: list[Origin] = field(default_factory=list)


class LedgerBuilder:
    """Counts while the files are read; `Ledger` is the result."""

    def __init__(self) -> None:
        self._sources: list[SourceCount] = []
        self._dropped: dict[DropReason, _Group] = {}
        self._counts: dict[str, int] = dict.fromkeys(
            (
                "records_kept",
                "records_split",
                "records_truncated",
                "tokens_in",
                "tokens_kept",
                "tokens_dropped",
                "tokens_truncated",
                "tokens_supervised",
            ),
            0,
        )

    def open_source(self, path: str) -> None:
        """Starts a data file; what is counted from here on belongs to it."""
        self._sources.append(SourceCount(path, "", 0, 0, 0))

    def set_format(self, format: str) -> None:
        """Notes the format of the current file."""
        self._sources[-1] = replace(self._sources[-1], format=format)

    def keep(self, sample: Sample, *, pieces: Sequence[Sample]) -> None:
        """Counts a record that became one or several samples, maybe shorter than it was."""
        kept = sum(len(piece) for piece in pieces)
        lost = len(sample) - kept
        self._add(
            records_kept=1,
            records_split=int(len(pieces) > 1),
            records_truncated=int(lost > 0),
            tokens_in=len(sample),
            tokens_kept=kept,
            tokens_truncated=lost,
            tokens_supervised=sum(piece.num_supervised_tokens for piece in pieces),
        )
        source = self._sources[-1]
        self._sources[-1] = replace(
            source, records=source.records + 1, samples=source.samples + len(pieces), tokens=source.tokens + kept
        )

    def drop(self, sample: Sample, *, reason: DropReason) -> None:
        """Counts a record that is left out."""
        self._add(tokens_in=len(sample), tokens_dropped=len(sample))
        source = self._sources[-1]
        self._sources[-1] = replace(source, records=source.records + 1)
        group = self._dropped.setdefault(reason, _Group())
        group.records += 1
        group.tokens += len(sample)
        if len(group.first_origins) < _ORIGINS_KEPT:
            group.first_origins.append(sample.origin)

    def finish(self) -> Ledger:
        """Returns the ledger, its sums asserted."""
        dropped = tuple(
            Dropped(reason, group.records, group.tokens, tuple(group.first_origins))
            for reason, group in self._dropped.items()
        )
        return Ledger(
            records=sum(source.records for source in self._sources),
            samples=sum(source.samples for source in self._sources),
            dropped=dropped,
            sources=tuple(self._sources),
            **self._counts,
        )

    def _add(self, **counts: int) -> None:
        for name, count in counts.items():
            self._counts[name] += count
