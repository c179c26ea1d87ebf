"""What a preview holds, as plain values: made once, shown as text, page or JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.build import Dataset, plan_rows
from finetune.data.ledger import Ledger
from finetune.data.pack import PackPlan
from finetune.data.types import IGNORE_INDEX, Sample
from finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_BINS = 12


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens that are all learned with one weight, or all not."""

    text: str
    is_learned: bool
    num_tokens: int
    weight: float = 1.0
    """How much each of its tokens counts in the loss, where they are learned."""


@dataclass(frozen=True)
class Document:
    """One sample in a row; it sees only itself."""

    source: str
    tokens: list[int]
    mask: list[int]
    """1 where the token is learned."""
    text: str
    stretches: list[Stretch]

    @property
    def num_learned(self) -> int:
        return sum(self.mask)

    @property
    def has_weights(self) -> bool:
        """Whether some of it is learned with a weight other than 1."""
        return any(stretch.weight != 1.0 for stretch in self.stretches)


@dataclass(frozen=True)
class Row:
    """One row: its documents in the order in which they stand in it."""

    row: int
    documents: list[Document]

    @property
    def num_tokens(self) -> int:
        return sum(len(document.tokens) for document in self.documents)

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as one sequence, and its documents apart."""
        return {
            "row": self.row,
            "tokens": [token for document in self.documents for token in document.tokens],
            "mask": [mark for document in self.documents for mark in document.mask],
            "text": "".join(document.text for document in self.documents),
            "source": [document.source for document in self.documents],
            "documents": [
                {
                    **asdict(document),
                    "learned": [stretch.text for stretch in document.stretches if stretch.is_learned],
                }
                for document in self.documents
            ],
        }


@dataclass(frozen=True)
class Bin:
    """How many samples have a length from `start` to `end`, both included."""

    start: int
    end: int
    samples: int


@dataclass(frozen=True)
class Packing:
    """How the samples fill the rows."""

    is_packed: bool
    samples: int
    rows: int
    max_length: int
    tokens: int
    padding_tokens: int
    fill: float
    most_samples_in_a_row: int


@dataclass(frozen=True)
class Preview:
    """All that is shown."""

    recipe: str
    tokenizer: str
    rows: list[Row]
    lengths: list[Bin]
    packing: Packing
    learned_tokens: int
    eval_samples: int
    ledger: Ledger
    eval_ledger: Ledger | None
    gate: dict[str, Any]
    warnings: tuple[str, ...]
    """What `finetune train` would refuse, beside the data."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the object of `--json`."""
        return {
            "status": "ok",
            "tokenizer": self.tokenizer,
            "rows": [row.as_dict() for row in self.rows],
            "histogram": [asdict(each) for each in self.lengths],
            "packing": asdict(self.packing),
            "learned_tokens": self.learned_tokens,
            "eval_samples": self.eval_samples,
            "ledger": self.ledger.as_dict(),
            "eval_ledger": self.eval_ledger.as_dict() if self.eval_ledger is not None else None,
            "gate": self.gate,
            "warnings": list(self.warnings),
        }


def make_preview(
    recipe: Recipe,
    dataset: Dataset,
    *,
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int,
    position_limit: int | None = None,
) -> Preview:
    """Packs the training samples as training does, and takes the first rows apart.

    Args:
        position_limit: the model's positions, in tokens; None where its config is not at hand.
    """
    plan = plan_rows(dataset.train, recipe.data, seed=recipe.training.seed)
    rows = []
    for number in range(min(num_rows, len(plan))):
        samples = [dataset.train[index] for index in plan[number].sample_indices]
        rows.append(Row(number, [document_of(sample, tokenizer=tokenizer) for sample in samples]))
    return Preview(
        recipe=recipe.output.dir,
        tokenizer=recipe.model.path,
        rows=rows,
        lengths=histogram(dataset.train.lengths),
        packing=_packing(plan, is_packed=recipe.data.packing),
        learned_tokens=dataset.train.num_supervised_tokens,
        eval_samples=len(dataset.eval) if dataset.eval is not None else 0,
        ledger=dataset.ledger,
        eval_ledger=dataset.eval_ledger,
        gate=dataset.gate.as_dict(),
        warnings=_warnings(recipe, position_limit),
    )


def _warnings(recipe: Recipe, position_limit: int | None) -> tuple[str, ...]:
    max_length = recipe.data.max_length
    if position_limit is None or max_length <= position_limit:
        return ()
    return (
        f"`data.max_length` is {max_length:,}, but the model has positions up to {position_limit:,} only, so that "
        f"`finetune train` would refuse it: set `data.max_length` to at most {position_limit}",
    )


def document_of(sample: Sample, *, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Returns a sample's tokens, mask and text, the text cut where learning begins and ends or its weight changes."""
    is_learned = sample.labels != IGNORE_INDEX
    weights = is_learned.astype(np.float32) if sample.loss_weights is None else sample.loss_weights
    borders = [0, *(np.flatnonzero(weights[1:] != weights[:-1]) + 1).tolist(), len(sample)]
    ids: list[int] = sample.input_ids.tolist()
    # Each stretch is what its tokens add to the text before it: alone, some tokenizers drop the space at its start.
    texts = [_decode(tokenizer, ids[:border]) for border in borders]
    stretches = []
    for start, end, before, after in zip(borders[:-1], borders[1:], texts[:-1], texts[1:], strict=True):
        text = after[len(before) :] if after.startswith(before) else _decode(tokenizer, ids[start:end])
        weight = _weight(weights[start]) if is_learned[start] else 1.0
        stretches.append(Stretch(text, bool(is_learned[start]), end - start, weight))
    return Document(str(sample.origin), ids, is_learned.astype(int).tolist(), texts[-1], stretches)


def _weight(value: np.float32) -> float:
    """Returns a weight of a learned token as it was written: 0.1, not the nearest float32 to it."""
    return float(str(value))


def histogram(lengths: NDArray[np.int64]) -> list[Bin]:
    """Returns the lengths in at most twelve bins whose width is 1, 2 or 5 times a power of ten."""
    lowest, highest = int(lengths.min()), int(lengths.max())
    width = next(
        size
        for power in range(12)
        for size in (10**power, 2 * 10**power, 5 * 10**power)
        if highest // size - lowest // size < _MOST_BINS
    )
    first = lowest // width
    counts = np.bincount(lengths // width - first)
    return [
        Bin((first + number) * width, (first + number + 1) * width - 1, count)
        for number, count in enumerate(counts.tolist())
    ]


def _packing(plan: PackPlan, *, is_packed: bool) -> Packing:
    return Packing(
        is_packed=is_packed,
        samples=len(plan.sample_indices),
        rows=len(plan),
        max_length=plan.max_length,
        tokens=plan.num_tokens,
        padding_tokens=plan.num_pad_tokens,
        fill=round(plan.fill, 5),
        most_samples_in_a_row=int(np.diff(plan.row_starts).max()),
    )


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[assignment]
    return text
