"""From records to tokens, many at a time: what one process does with one batch of records.

A batch comes back as flat arrays with one small entry a record, which is cheap to pass between processes. Nothing is
decided here that depends on other records, so the result is the same for any number of processes and batch size.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat import LossOn, Renderer, Turns
from finetune.data.faults import Fault
from finetune.data.formats import Format, convert, unused_line
from finetune.data.gate import FAULTS, Finding, Gate
from finetune.data.ledger import DropReason, LeftAside
from finetune.data.load import Record
from finetune.data.loss_weights import WeightRuns, num_weighted
from finetune.data.over_length import CannotBeSplit, OverLength, Policy
from finetune.data.role_order import require_order
from finetune.data.shorten import shorten, shorten_record
from finetune.data.store import content_digest
from finetune.data.types import Conversation, Origin, Sample
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING_LEFT_OUT = "the chat template leaves reasoning out of learned turns (`data.turns: separate` keeps it)"
REASONING_WITHOUT_PLACE = "the chat template leaves reasoning out of learned turns, as it has no place for it"
WRITTEN_AFTER_PROMPT = "between generation's prompt and learned answers the chat template writes, not learned, "
CONTENT_LEFT_OUT = "the chat template leaves out content beside the tool calls of learned turns"
UNKNOWN_CONTROL_TOKEN = "the text holds a control token that this tokenizer does not have"
EMPTY_QUESTION = "a user message is empty"
CONTROL_TOKENS_IN_PLAIN_TEXT = "plain text holds control tokens of the tokenizer, which are read as such"
BLANK_LEFT_OUT = "the chat template leaves out white space at the ends of learned answers"
TOOLS_LEFT_OUT = "the chat template leaves out the definitions of tools"

_BATCH_RECORDS = 128
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Batch:
    """Some records of one source."""

    source: int
    """Number of the source in its list."""
    format: Format | None
    """None where no record was recognised, so that all are faults."""
    records: list[tuple[Origin, Record | Fault]]

    def __str__(self) -> str:
        return f"records {self.records[0][0]} to {self.records[-1][0]}"


@dataclass
class Result:
    """What became of one record: samples, or a reason for none, or a fault."""

    origin: Origin
    num_tokens: int = 0
    pieces: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    weighted: int = 0
    """Learned tokens of all pieces with a weight other than 1."""
    digest: int = 0
    label_digests: list[int] = field(default_factory=list)
    """Of each piece."""
    dropped: DropReason | None = None
    fault: Fault | None = None
    findings: list[Finding] = field(default_factory=list)
    end_ids: set[int] = field(default_factory=set)
    learns_an_end: bool = False
    notes: list[LeftAside] = field(default_factory=list)


@dataclass(frozen=True)
class BatchResult:
    """The results of a batch with the tokens of all their pieces, one after the other."""

    source: int
    results: list[Result]
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    weight_runs: WeightRuns
    over_length: OverLength


@dataclass(frozen=True)
class Settings:
    """What of the recipe changes tokens or labels."""

    loss_on: LossOn
    over_length: Policy
    max_length: int
    refuses_unknown_control_tokens: bool
    role_order: Literal["strict", "any"] = "strict"
    turns: Turns = "together"
    date: datetime.date | None = None
    """The date that a template which prints today's date writes."""


class BatchTokenizer:
    """Renders, checks and cuts the records of one batch after the other."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self._renderer = Renderer(tokenizer, date=settings.date)
        self._gate = Gate(tokenizer, loss_on=settings.loss_on)
        self._settings = settings

    def __call__(self, batch: Batch) -> BatchResult:
        """Returns the results in the order of the records; a record's fault is a result, not an error."""
        policy = OverLength(self._settings.over_length, self._settings.max_length)
        results: list[Result] = []
        samples: list[Sample] = []
        for origin, record in batch.records:
            result = Result(origin)
            results.append(result)
            if isinstance(record, Fault):
                result.fault = record
                continue
            try:
                samples += self._tokenize(batch, record, policy, result)
            except DataError as error:
                counts_as = "over_length" if isinstance(error, CannotBeSplit) else None
                result.fault = Fault.of(error, origin, text=shorten_record(record), counts_as=counts_as)
        empty = [np.empty(0, dtype=np.int32)]
        return BatchResult(
            batch.source,
            results,
            np.concatenate([sample.input_ids for sample in samples] or empty),
            np.concatenate([sample.labels for sample in samples] or empty),
            _weight_runs(samples),
            policy,
        )

    def _tokenize(self, batch: Batch, record: Record, policy: OverLength, result: Result) -> list[Sample]:
        """Returns the samples of a record and fills its result.

        Raises:
            DataError: the record is malformed.
        """
        assert batch.format is not None, "a record without a format is a fault"
        conversation = convert(record, format=batch.format, origin=result.origin)
        if self._settings.role_order == "strict":
            require_order(conversation)
        if conversation.unused_keys:
            result.notes.append(LeftAside(unused_line(conversation.unused_keys)))
        if conversation.calls_undefined_tools:
            result.notes.append(LeftAside("tools are called and the record defines none"))
        if any(message.role == "user" and not message.content.strip() for message in conversation.messages):
            result.notes.append(LeftAside(EMPTY_QUESTION))
        if self._settings.refuses_unknown_control_tokens:
            self._refuse_unknown_control_token(conversation, record, result)
            if result.fault is not None:
                return []
        samples = self._rendered(conversation, result)
        self._look(samples, conversation, record, result)
        if result.fault is not None:
            return []
        pieces = _cut(samples, conversation, policy, result)
        result.learns_an_end = self._gate.learns_an_end(pieces)
        return pieces

    def _look(self, samples: list[Sample], conversation: Conversation, record: Record, result: Result) -> None:
        """Passes the samples of a record through the gate; what it finds goes into the result."""
        result.findings, result.end_ids = self._gate.look(samples, conversation=conversation)
        if self._gate.has_control_tokens_inside(samples, conversation=conversation):
            result.notes.append(LeftAside(CONTROL_TOKENS_IN_PLAIN_TEXT))
        beside = self._renderer.beside_prompt
        if None in beside:
            result.findings.append("prompt_differs")
        if not self._renderer.has_prompt and any(text and text.strip() for text in beside):
            result.findings.append("prompt_missing")
        if self._renderer.left_out.hides_tools:
            result.findings.append("tools_hidden")
        for name in result.findings:
            if name in FAULTS and result.fault is None:
                message, remedy = FAULTS[name]
                result.fault = Fault(result.origin, message, remedy, shorten_record(record), can_be_dropped=False)

    def _rendered(self, conversation: Conversation, result: Result) -> list[Sample]:
        """Renders a conversation and notes what its template left out of it."""
        samples = self._renderer.render_all(conversation, loss_on=self._settings.loss_on, turns=self._settings.turns)
        left_out = self._renderer.left_out
        helped = left_out.reasoning_turns_with_place if self._settings.turns == "together" else 0
        if helped:
            result.notes.append(LeftAside(REASONING_LEFT_OUT, helped))
        if left_out.reasoning_turns > helped:
            result.notes.append(LeftAside(REASONING_WITHOUT_PLACE, left_out.reasoning_turns - helped))
        between = {text for text in self._renderer.beside_prompt if text and text.strip()}
        result.notes += [LeftAside(f"{WRITTEN_AFTER_PROMPT}{shorten(text)}") for text in sorted(between)]
        if left_out.content_turns:
            result.notes.append(LeftAside(CONTENT_LEFT_OUT, left_out.content_turns))
        if left_out.trimmed_turns:
            result.notes.append(LeftAside(BLANK_LEFT_OUT, left_out.trimmed_turns))
        if left_out.hides_tools:
            result.notes.append(LeftAside(TOOLS_LEFT_OUT))
        return samples

    def _refuse_unknown_control_token(self, conversation: Conversation, record: Record, result: Result) -> None:
        found = self._gate.unknown_control_token(conversation)
        if found is not None:
            result.fault = Fault(
                result.origin,
                f"{UNKNOWN_CONTROL_TOKEN}: {found}",
                "Remove it from the text (the chat template writes the model's own), or set "
                "`data.unknown_control_tokens` to keep to learn it as plain text.",
                shorten_record(record),
                UNKNOWN_CONTROL_TOKEN,
                can_be_dropped=False,
            )


def _cut(samples: list[Sample], conversation: Conversation, policy: OverLength, result: Result) -> list[Sample]:
    """Applies the policy for long samples, and writes into the result what is left of the record.

    Raises:
        CannotBeSplit: the policy is `split` and the record is not plain text.
    """
    result.num_tokens = sum(map(len, samples))
    pieces: list[Sample] = []
    for sample in samples:
        kept = policy.apply(sample, conversation=conversation)
        if isinstance(kept, str):
            result.dropped = kept
        else:
            pieces += kept
    if not pieces:
        return []
    result.dropped = None  # of a conversation with a sample a turn, what fits stays and the rest counts as cut
    # A cut sample is what is left of it; the pieces of a split record stand for the whole, and stay together.
    whole = pieces if len(pieces) == 1 else samples
    result.digest = content_digest(np.concatenate([sample.input_ids for sample in whole]))
    result.pieces = [len(piece) for piece in pieces]
    result.supervised = [piece.num_supervised_tokens for piece in pieces]
    result.weighted = sum(num_weighted(piece.loss_weights) for piece in pieces)
    result.label_digests = [content_digest(piece.labels) for piece in pieces]
    return pieces


def _weight_runs(samples: list[Sample]) -> WeightRuns:
    """Returns where the tokens of some samples, one after the other, have weights other than 1."""
    if all(sample.loss_weights is None for sample in samples):
        return WeightRuns.none()
    weights = [
        np.zeros(len(sample), dtype=np.float32) if sample.loss_weights is None else sample.loss_weights
        for sample in samples
    ]
    return WeightRuns.of(np.concatenate(weights))


def batches_of(
    records: Iterable[tuple[Origin, Record | Fault]], *, source: int, format_of: Callable[[], Format | None]
) -> Iterator[Batch]:
    """Groups records so that a batch is small in memory, whatever the records' size.

    Args:
        format_of: returns the source's format; asked once a batch is full, as the first records settle it.
    """
    batch: list[tuple[Origin, Record | Fault]] = []
    characters = 0
    for origin, record in records:
        batch.append((origin, record))
        characters += num_characters(record)
        if len(batch) >= _BATCH_RECORDS or characters >= _BATCH_CHARACTERS:
            yield Batch(source, format_of(), batch)
            batch, characters = [], 0
    if batch:
        yield Batch(source, format_of(), batch)


def num_characters(value: Any) -> int:
    """Returns the characters of all texts in a record, for an estimate of its size."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, value.values()))
    return sum(map(num_characters, value)) if isinstance(value, list) else 1
