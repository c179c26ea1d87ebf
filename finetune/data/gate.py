"""The gate: look at every tokenized record before a weight is loaded, and refuse what would be learned wrongly.

This is a second look, by the tokens alone: it does not trust the code that made the labels. `Gate.look` names what is
wrong with one record; `GateCounts` sums it up over all of them; `GateReport` is what the user sees. Faults stop the
run (`faults.py`); warnings are told with counts and places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from finetune.data.faults import EXAMPLES_SHOWN
from finetune.data.template import texts_in, turns_of
from finetune.data.types import IGNORE_INDEX, Conversation, Origin, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Finding = Literal[
    "nothing_learned",
    "end_not_learned",
    "end_left_out",
    "bos_doubled",
    "bos_missing",
    "bos_repeated",
    "unknown_text",
    "prompt_differs",
    "prompt_missing",
    "tools_hidden",
]

FAULTS: dict[Finding, tuple[str, str]] = {
    "nothing_learned": (
        "no token of this record would be learned",
        "Remove the record, or choose other tokens with `data.loss_on`.",
    ),
    "end_not_learned": (
        "an answer does not end in a learned end-of-turn token, so the model would not learn to stop",
        "Set `model.chat_template` to a template that ends each answer with an end-of-turn token of the tokenizer.",
    ),
    "bos_doubled": (
        "the record begins with two BOS tokens",
        "Remove BOS from the text, or from the chat template (`model.chat_template`).",
    ),
}
"""Findings that stop the run: what is wrong, and the remedy."""

WARNINGS: dict[Finding, str] = {
    "end_left_out": "the last part of each learned answer is not learned, and no end of turn with it",
    "bos_missing": "the tokenizer puts BOS before a text, and the chat template writes none",
    "bos_repeated": "BOS stands again inside the record; some chat templates write it before each turn",
    "prompt_differs": "generation's prompt ends otherwise than the text before the last learned answer, so that the "
    "model is asked after another text than it learned",
    "prompt_missing": "the chat template writes no generation prompt (`add_generation_prompt`), so that the model is "
    "asked without what stands before the learned answers",
    "tools_hidden": "tools are defined that the chat template does not show, so that the model is not told of them",
    "unknown_text": "the vocabulary lacks some of the text, which becomes the unknown token",
}
"""Findings that are told."""

_CONTROL_TEXT = re.compile(r"<\|[^\s|<>]{1,40}\|>|<\uff5c[^\s<>]{1,40}\uff5c>|\[/?INST\]|<(?:start|end)_of_turn>")
"""How control tokens of the common model families are written."""


class Gate:
    """Checks samples made with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, loss_on: str) -> None:
        self._loss_on = loss_on
        added = tokenizer.added_tokens_decoder
        self._names = {str(token) for token in added.values()}
        ends = {number for number, token in added.items() if token.special}
        self._eos, self._bos, self._unknown = (
            cast("int | None", number)
            for number in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
        )
        if self._eos is not None:
            ends.add(self._eos)
        self._ends = ends
        self._end_array = np.array(sorted(ends), dtype=np.int32)
        first = cast("list[int]", tokenizer("a", verbose=False)["input_ids"])[:1]
        self._adds_bos = self._bos is not None and first == [self._bos]
        # Where one token is both, it separates documents, and its number says nothing.
        self._counts_bos = self._bos is not None and self._bos != self._eos

    def look(self, samples: Sequence[Sample], *, conversation: Conversation) -> tuple[list[Finding], set[int]]:
        """Returns what is wrong with a record's whole samples (before any cut), mostly nothing, and what ends them: of
        each the last end token that is learned. Others may end a part of an answer only, such as a reasoning.

        Each learned stretch must end in an end token, but for those that the record itself ends inside a turn: a part
        of a content that is learned before one that is not.
        """
        found: list[Finding] = []
        ends: set[int] = set()
        without_end = 0
        for sample in samples:
            is_learned = sample.labels != IGNORE_INDEX
            if not is_learned.any():
                found.append("nothing_learned")
                continue
            last_of_stretch = sample.input_ids[is_learned & ~np.append(is_learned[1:], False)].tolist()
            if conversation.kind == "chat" and self._loss_on == "all":
                # All is one stretch, which may end in the line break after the last turn's end.
                last_of_stretch = sample.input_ids[is_learned].tolist()
                without_end += self._ends.isdisjoint(last_of_stretch)
            else:
                without_end += sum(token not in self._ends for token in last_of_stretch)
            ends.update(sample.labels[np.isin(sample.labels, self._end_array)][-1:].tolist())
            if self._counts_bos:
                found += self._bos_findings(sample)
            if self._unknown is not None and self._unknown != self._eos and (sample.input_ids == self._unknown).any():
                found.append("unknown_text")
        if without_end > _ends_inside_turns(conversation):
            found.append("end_not_learned")
        elif not ends and "nothing_learned" not in found:
            found.append("end_left_out")
        return list(dict.fromkeys(found)), ends

    def has_control_tokens_inside(self, samples: Sequence[Sample], *, conversation: Conversation) -> bool:
        """Tells whether a plain text, or a prompt and completion that are strings, holds control tokens of its own
        beside BOS at the start and EOS at the end."""
        if conversation.kind == "chat":
            return False
        return any(bool(np.isin(sample.input_ids[1:-1], self._end_array).any()) for sample in samples)

    def learns_an_end(self, pieces: Sequence[Sample]) -> bool:
        """Tells whether an end token is learned in what is trained of a record."""
        return any(bool(np.isin(piece.labels, self._end_array).any()) for piece in pieces)

    def unknown_control_token(self, conversation: Conversation) -> str | None:
        """Returns a text that is written like a control token but is none of this tokenizer's, or None."""
        # As templates take them: the arguments of a tool call as an object, where they are JSON text.
        for text in texts_in([conversation.text, conversation.completion, turns_of(conversation), conversation.tools]):
            for match in _CONTROL_TEXT.finditer(text) if "<" in text or "[" in text else ():
                if match.group() not in self._names:
                    return match.group()
        return None

    def _bos_findings(self, sample: Sample) -> list[Finding]:
        count = int((sample.input_ids == self._bos).sum())
        if count >= 2:
            is_doubled = sample.input_ids[0] == self._bos and sample.input_ids[1] == self._bos
            return ["bos_doubled" if is_doubled else "bos_repeated"]
        return ["bos_missing"] if count == 0 and self._adds_bos else []


def _ends_inside_turns(conversation: Conversation) -> int:
    """Returns how many learned stretches may end inside a turn, as a part that is not learned follows them there."""
    count = 0
    for message in conversation.messages:
        choices = [message.is_learned if part.is_learned is None else part.is_learned for part in message.parts]
        # Of two neighbours that leave the choice to the recipe, both are learned or none is.
        count += sum(left is not False and right is not True and left is not right for left, right in pairwise(choices))
    return count


@dataclass
class _Found:
    records: int = 0
    origins: list[Origin] = field(default_factory=list)


@dataclass
class GateCounts:
    """What the gate saw over all records of some sources that are not left out."""

    documents: int = 0
    ends_learned: int = 0
    """Records in which an end token is learned, after any cut."""
    end_ids: set[int] = field(default_factory=set)
    """The last control token that is learned of each sample, before any cut."""
    warnings: dict[str, _Found] = field(default_factory=dict)

    def add(self, findings: list[Finding], origin: Origin, *, end_ids: set[int], learns_an_end: bool) -> None:
        """Counts one document."""
        self.end_ids |= end_ids
        self.documents += 1
        self.ends_learned += learns_an_end
        for name in findings:
            if name in WARNINGS:
                found = self.warnings.setdefault(name, _Found())
                found.records += 1
                if len(found.origins) < EXAMPLES_SHOWN:
                    found.origins.append(origin)

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as plain JSON values."""
        return {**asdict(self), "end_ids": sorted(self.end_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, paths: Mapping[str, str]) -> GateCounts:
        """Reads what `as_dict` gave; `paths` maps the names that the files had to the ones that they have now.

        Raises:
            KeyError, TypeError: a value is missing or unknown.
        """
        warnings = {
            name: _Found(
                found["records"], [Origin(paths[origin["path"]], origin["record"]) for origin in found["origins"]]
            )
            for name, found in values["warnings"].items()
        }
        return cls(**{**values, "warnings": warnings, "end_ids": set(values["end_ids"])})


@dataclass(frozen=True)
class Check:
    """One thing that the gate looked at."""

    name: str
    status: Literal["ok", "warning"]
    detail: str
    examples: tuple[str, ...] = ()

    def line(self) -> str:
        """Returns the check as one line, without its status."""
        return f"{self.name}: {self.detail}" + (f": {', '.join(self.examples)}" if self.examples else "")


@dataclass(frozen=True)
class GateReport:
    """What the gate found; it exists only where no fault stopped the run."""

    checks: tuple[Check, ...]

    @property
    def warnings(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "warning")

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {"status": "warning" if self.warnings else "ok", "checks": [asdict(check) for check in self.checks]}

    def check_dicts(self) -> list[dict[str, Any]]:
        """Returns the checks as a run's report lists them: `ok` is false where one warns."""
        return [
            {
                "name": f"data: {check.name}",
                "ok": check.status == "ok",
                "status": check.status,
                "detail": check.line().partition(": ")[2],
            }
            for check in self.checks
        ]
