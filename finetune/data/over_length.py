"""What to do with a sample that is longer than a row: refuse, drop, truncate or split."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from finetune.console import plural
from finetune.data.faults import EXAMPLES_SHOWN, DataFaults, Fault, faults_of_one_kind
from finetune.data.ledger import DropReason
from finetune.data.loss_weights import weights_beside
from finetune.data.types import IGNORE_INDEX, Conversation, Origin, Sample
from finetune.errors import DataError

Policy = Literal["error", "drop", "truncate", "split"]

_ORIGINS_SHOWN = 5


class CannotBeSplit(DataError):
    """A sample of the policy `split` is too long and no plain text; the record is sound."""


@dataclass
class OverLength:
    """Applies the policy to one sample after the other, and counts the ones that were too long.

    With `error` all are kept until `error()` tells of them: the samples of the whole data set are looked at before
    refusing, so that the message can say how many are too long and how long a row would have to be.
    """

    policy: Policy
    max_length: int
    count: int = 0
    records: int = 0
    """Records with at least one sample that is too long."""
    longest: int = 0
    answer_tokens_beyond: int = 0
    first_origins: list[Origin] = field(default_factory=list)
    examples: list[tuple[Origin, int]] = field(default_factory=list)
    """The first such records, each with the tokens of its first sample that is too long."""
    _last: Origin | None = field(default=None, repr=False)

    def apply(self, sample: Sample, *, conversation: Conversation) -> list[Sample] | DropReason:
        """Returns the samples that stand for this one, or the reason why there is none.

        Raises:
            CannotBeSplit: the policy is `split` and the sample is not plain text.
        """
        if len(sample) <= self.max_length:
            return [sample]
        self._note(sample)
        if self.policy == "drop":
            return "over_length"
        if self.policy == "truncate":
            cut = _piece(sample, 0, self.max_length)
            return [cut] if cut.num_supervised_tokens else "no_label_after_truncation"
        if self.policy == "split":
            if conversation.kind != "text":
                raise CannotBeSplit(
                    f"a sample of {len(sample):,} tokens does not fit into a row of {self.max_length:,}, and only "
                    "plain text can be split",
                    place=str(sample.origin),
                    remedy="Raise `data.max_length`, or set `data.over_length` to drop or truncate.",
                    kind="a sample does not fit into a row, and only plain text can be split",
                )
            return _split(sample, self.max_length)
        return [sample]

    def merge(self, other: OverLength) -> None:
        """Adds what was counted for later records; none of them may have been seen before."""
        self.count += other.count
        self.records += other.records
        self.examples = (self.examples + other.examples)[:EXAMPLES_SHOWN]
        self.longest = max(self.longest, other.longest)
        self.answer_tokens_beyond += other.answer_tokens_beyond
        self.first_origins = (self.first_origins + other.first_origins)[:_ORIGINS_SHOWN]

    def error(self) -> DataFaults | None:
        """Returns the error that the policy `error` collected; None where it has nothing to refuse."""
        if self.policy != "error" or not self.count:
            return None
        origins = ", ".join(map(str, self.first_origins))
        more = ", ..." if self.count > len(self.first_origins) else ""
        samples = "1 sample is" if self.count == 1 else f"{self.count:,} samples are"
        remedy = (
            f"Set `data.max_length` to {self.longest} or more, or `data.over_length` to drop or truncate "
            "(for plain text also split)."
        )
        return faults_of_one_kind(
            f"{samples} longer than `max_length` {self.max_length:,}, the longest {self.longest:,} tokens; truncating "
            f"would lose {plural(self.answer_tokens_beyond, 'learned token')}: {origins}{more}",
            place=str(self.first_origins[0]),
            remedy=remedy,
            examples=[
                Fault(
                    origin,
                    f"a sample is longer than `data.max_length`: {length:,} tokens",
                    remedy,
                    kind="a sample is longer than `data.max_length`",
                    can_be_dropped=False,
                )
                for origin, length in self.examples
            ],
            records=self.records,
        )

    def _note(self, sample: Sample) -> None:
        self.count += 1
        if sample.origin != self._last:  # the samples of one record follow each other
            self._last = sample.origin
            self.records += 1
            if len(self.examples) < EXAMPLES_SHOWN:
                self.examples.append((sample.origin, len(sample)))
        self.longest = max(self.longest, len(sample))
        self.answer_tokens_beyond += int((sample.labels[self.max_length :] != IGNORE_INDEX).sum())
        if len(self.first_origins) < _ORIGINS_SHOWN:
            self.first_origins.append(sample.origin)


def _piece(sample: Sample, start: int, end: int) -> Sample:
    """Returns tokens [start, end) as a document of its own, whose first token is not learned."""
    labels = sample.labels[start:end].copy()
    labels[:1] = IGNORE_INDEX
    weights = sample.loss_weights
    if weights is not None:
        weights = weights_beside(labels, weights[start:end])
    return Sample(sample.input_ids[start:end], labels, sample.origin, weights)


def _split(sample: Sample, max_length: int) -> list[Sample]:
    """Cuts into pieces of `max_length` tokens.

    A last piece of one token would have nothing to learn, so the piece before it leaves one of its own to it.
    """
    borders = [*range(0, len(sample), max_length), len(sample)]
    if borders[-1] - borders[-2] == 1:
        borders[-2] -= 1
    return [_piece(sample, start, end) for start, end in pairwise(borders)]
