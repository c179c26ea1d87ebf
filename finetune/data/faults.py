"""Collect what is wrong with records, so that one run tells all of it: counts a kind, three examples, the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.ledger import DropReason
from finetune.data.types import Origin
from finetune.errors import DataError

EXAMPLES_SHOWN = 3
_KINDS_SHOWN = 12


@dataclass(frozen=True)
class Fault:
    """One record that cannot be used; plain texts, so that it passes between processes."""

    origin: Origin
    message: str
    remedy: str
    text: str = ""
    """The record's beginning as JSON, or of the line that is none."""
    kind: str = ""
    """The message without what differs from record to record; the message itself where nothing does."""
    can_be_dropped: bool = True
    """`data.malformed: drop` may leave the record out."""
    counts_as: DropReason | None = None
    """The reason that the ledger gives for a dropped record which is not malformed; the errors then offer their own
    remedies alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.message)

    @classmethod
    def of(cls, error: DataError, origin: Origin, *, text: str = "", counts_as: DropReason | None = None) -> Fault:
        """Returns the fault that an error tells of a record; `text` is the record's, where the error has none."""
        return cls(origin, error.message, error.remedy, error.text or text, error.kind, counts_as=counts_as)


@dataclass
class FaultGroup:
    """The records with one kind of fault."""

    kind: str
    first: Fault
    records: int = 0
    examples: list[Fault] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the group as plain JSON values."""
        examples = [
            {"place": str(fault.origin), "message": fault.message, "text": fault.text} for fault in self.examples
        ]
        return {"kind": self.kind, "records": self.records, "remedy": self.first.remedy, "examples": examples}


class DataFaults(DataError):
    """The gate stopped the run: one or many records are wrong. `groups` holds them by kind."""

    def __init__(self, message: str, *, place: str, remedy: str, groups: Sequence[FaultGroup]) -> None:
        super().__init__(message, place=place, remedy=remedy)
        self.groups = tuple(groups)

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "error": "DataError", "faults": [group.as_dict() for group in self.groups]}


def faults_of_one_kind(message: str, *, place: str, remedy: str, examples: Sequence[Fault], records: int) -> DataFaults:
    """Returns the error for `records` records with the same fault, told by a message of its own for all of them."""
    group = FaultGroup(examples[0].kind, examples[0], records, list(examples[:EXAMPLES_SHOWN]))
    return DataFaults(message, place=place, remedy=remedy, groups=[group])


class FaultList:
    """Faults in the order in which they were met; all are counted, three of a kind are kept."""

    def __init__(self) -> None:
        self.groups: dict[str, FaultGroup] = {}

    def __len__(self) -> int:
        return sum(group.records for group in self.groups.values())

    def add(self, fault: Fault) -> None:
        """Counts a fault."""
        group = self.groups.setdefault(fault.kind, FaultGroup(fault.kind, fault))
        group.records += 1
        if len(group.examples) < EXAMPLES_SHOWN:
            group.examples.append(fault)

    def add_groups(self, groups: Sequence[FaultGroup]) -> None:
        """Adds faults that were counted elsewhere, of kinds that are not here yet."""
        self.groups |= {group.kind: group for group in groups}

    def error(self) -> DataFaults:
        """Returns the error that tells all faults; there must be one."""
        groups = list(self.groups.values())
        first = groups[0].first
        drop = (
            "\nOr set `data.malformed` to drop to leave such records out, counted in the ledger."
            if any(group.first.can_be_dropped and group.first.counts_as is None for group in groups)
            else ""
        )
        if len(self) == 1:
            return DataFaults(first.message, place=str(first.origin), remedy=first.remedy + drop, groups=groups)
        lines = [f"{len(self):,} records cannot be used:"]
        for group in groups[:_KINDS_SHOWN]:
            lines.append(f"  {group.records:,} x {group.kind}")
            lines += [f"    {_example(fault)}" for fault in group.examples]
        if len(groups) > _KINDS_SHOWN:
            left_out = sum(group.records for group in groups[_KINDS_SHOWN:])
            lines.append(f"  {left_out:,} more of {len(groups) - _KINDS_SHOWN:,} other kinds")
        remedies = list(dict.fromkeys(group.first.remedy for group in groups[:_KINDS_SHOWN]))
        return DataFaults("\n".join(lines), place=str(first.origin), remedy="\n".join(remedies) + drop, groups=groups)


def _example(fault: Fault) -> str:
    text = f" in {fault.text}" if fault.text else ""
    return f"{fault.origin}: {fault.message}{text}"
