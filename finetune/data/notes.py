"""What rendering did to the answers beyond labelling them, counted for the ledger; and the tokens that end turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.spans import TurnSpan
from finetune.data.types import IGNORE_INDEX, Origin, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_EXAMPLES = 3


@dataclass
class RenderNotes:
    """Counts over all samples that one Renderer made; turns are those that are learned.

    `reasoning_kept` and `reasoning_dropped` are turns whose data has reasoning that the template shows or leaves out,
    `reasoning_dropped_last` those of the dropped that are the last turn of their sample, where no template that knows
    reasoning leaves it out; `contents_dropped` are tool-calling turns whose content it leaves out. `date` is what the
    template prints as today's date, None where it prints none. The examples are the first records of each kind.
    """

    date: str | None = None
    turns_learned: int = 0
    reasoning_kept: int = 0
    reasoning_dropped: int = 0
    reasoning_dropped_last: int = 0
    contents_dropped: int = 0
    reasoning_examples: list[str] = field(default_factory=list)
    content_examples: list[str] = field(default_factory=list)

    def add_turn(self, origin: Origin, turn: TurnSpan, *, is_last: bool) -> None:
        """Counts one learned turn; `is_last` tells that no message follows it."""
        self.turns_learned += 1
        self.reasoning_kept += turn.is_reasoning_shown
        self.reasoning_dropped += turn.is_reasoning_dropped
        self.reasoning_dropped_last += turn.is_reasoning_dropped and is_last
        self.contents_dropped += turn.is_content_dropped
        if turn.is_reasoning_dropped and len(self.reasoning_examples) < _MAX_EXAMPLES:
            self.reasoning_examples.append(str(origin))
        if turn.is_content_dropped and len(self.content_examples) < _MAX_EXAMPLES:
            self.content_examples.append(str(origin))

    def merge(self, other: RenderNotes) -> None:
        """Adds the counts of another renderer, such as that of another process, whose records come later."""
        self.date = self.date or other.date
        self.turns_learned += other.turns_learned
        self.reasoning_kept += other.reasoning_kept
        self.reasoning_dropped += other.reasoning_dropped
        self.reasoning_dropped_last += other.reasoning_dropped_last
        self.contents_dropped += other.contents_dropped
        self.reasoning_examples = [*self.reasoning_examples, *other.reasoning_examples][:_MAX_EXAMPLES]
        self.content_examples = [*self.content_examples, *other.content_examples][:_MAX_EXAMPLES]

    def lines(self) -> list[str]:
        """Returns what a user should know, one line each; nothing where all went as the data says."""
        lines = []
        if self.date is not None:
            lines.append(f"the chat template prints a date: {self.date} (data.date)")
        if self.reasoning_dropped:
            total, examples = self.reasoning_kept + self.reasoning_dropped, ", ".join(self.reasoning_examples)
            line = f"the chat template leaves out the reasoning of {self.reasoning_dropped} of {total} learned turns "
            line += f"that have some, such as in {examples}"
            if self.reasoning_dropped_last == 0:
                line += "; `data.turns: separate` learns each turn as it is generated, with its reasoning"
            elif self.reasoning_kept == 0:
                line += "; it has no place for reasoning"
            lines.append(line)
        if self.contents_dropped:
            lines.append(
                f"the chat template leaves out the content beside the tool calls of {self.contents_dropped} learned "
                f"turns, such as in {', '.join(self.content_examples)}"
            )
        return lines

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as JSON values."""
        return {
            "date": self.date,
            "turns_learned": self.turns_learned,
            "reasoning_kept": self.reasoning_kept,
            "reasoning_dropped": self.reasoning_dropped,
            "reasoning_dropped_last": self.reasoning_dropped_last,
            "reasoning_examples": list(self.reasoning_examples),
            "contents_dropped": self.contents_dropped,
            "content_examples": list(self.content_examples),
        }


def turn_end_ids(samples: Iterable[Sample], *, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the special tokens that end the learned stretches of the samples: where generation should stop.

    A base model trained on chat ends its turns with the template's token, which is often not its EOS; generation and
    exported models must know it. A stretch that was cut ends with an ordinary token, which does not count.
    """
    added = tokenizer.added_tokens_decoder
    special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    ends: set[int] = set()
    for sample in samples:
        is_learned = np.append(sample.labels != IGNORE_INDEX, False)
        ends.update(sample.labels[np.flatnonzero(is_learned[:-1] & ~is_learned[1:])].tolist())
    return tuple(sorted(ends & special))
