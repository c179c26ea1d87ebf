"""First values for a recipe, from what is known of model, card and data. Each is a place to start from, not a limit.

The memory rules are rough: the weights' bytes, and 2 GiB beside them for an adapter, its optimizer and one row.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from finetune.start.card import Card
from finetune.start.look import Look

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
_BESIDE_GIB = 2.0
_FULL_FACTOR = 6
"""Bytes of full fine-tuning over those of 16-bit weights: gradients, and both of the optimizer's sums."""
_MIN_STEPS = 20


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without loading anything; None where it is not known."""

    weight_gib: float | None = None
    max_positions: int | None = None


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Values for the keys of a recipe."""

    quantization: str
    dtype: str
    device: str
    rows_per_step: int
    rows_per_micro_batch: int
    max_length: int
    eval_fraction: float | None
    epochs: int
    learning_rate: str
    warnings: tuple[str, ...] = ()


def model_facts(folder: Path | None, name: str) -> ModelFacts:
    """Returns what a model's folder tells, or, of a hub id, what its name does: `Qwen3-14B` has 14 billion weights."""
    if folder is None:
        billions = [float(number) for number in _BILLIONS.findall(name)]
        return ModelFacts(weight_gib=max(billions) * 2e9 / 2**30 if billions else None)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run tells what is wrong with the folder; here it only tells nothing
        config = {}
    config = config if isinstance(config, dict) else {}
    text_config = config.get("text_config", config)
    positions = text_config.get("max_position_embeddings") if isinstance(text_config, dict) else None
    return ModelFacts(size / 2**30 if size else None, positions if isinstance(positions, int) else None)


def suggest(
    look: Look | None, *, card: Card, model: ModelFacts, adapter: str, max_length: int | None = None
) -> Suggestion:
    """Returns the values to start with.

    Args:
        look: what was seen of the data; None where they lie on the hub.
        adapter: `lora` or `none`.
        max_length: the user's own length in tokens, which is taken as it is.
    """
    warnings: list[str] = []
    length = max_length or _length(look, model, warnings)
    epochs = 3 if look is not None and look.is_whole and look.num_rows < 5_000 else 1
    rows_per_step = _rows_per_step(look, length, epochs)
    return Suggestion(
        quantization=_quantization(card, model, adapter, warnings),
        dtype="auto" if card.has_bf16 or adapter == "none" else "fp16",
        device="cpu" if card.is_cpu else "auto",
        rows_per_step=rows_per_step,
        rows_per_micro_batch=min(rows_per_step, _micro_batch(card, length)),
        max_length=length,
        eval_fraction=_eval_fraction(look),
        epochs=epochs,
        learning_rate="2.0e-4" if adapter == "lora" else "1.0e-5",
        warnings=tuple(warnings),
    )


def _length(look: Look | None, model: ModelFacts, warnings: list[str]) -> int:
    """The smallest usual length that the longest row fits into, as far as the model has positions."""
    longest = look.longest_tokens if look else 0
    fitting = next((length for length in _LENGTHS if length >= longest), _LENGTHS[-1]) if longest else 2048
    if model.max_positions is not None and fitting > model.max_positions:
        fitting = model.max_positions
    if longest > fitting:
        warnings.append(
            f"the longest row has about {longest:,} tokens, more than a row of {fitting:,}; see data.over_length"
        )
    return fitting


def _quantization(card: Card, model: ModelFacts, adapter: str, warnings: list[str]) -> str:
    if card.memory_gib is None:
        return "none"
    if adapter == "none":
        if model.weight_gib is not None and model.weight_gib * _FULL_FACTOR > card.memory_gib:
            warnings.append(
                f"training all weights needs about {model.weight_gib * _FULL_FACTOR:.0f} GiB, more than {card} has; "
                "adapter lora needs far less"
            )
        return "none"
    if model.weight_gib is None:
        return "nf4" if card.memory_gib <= 24 else "none"
    fits = model.weight_gib + _BESIDE_GIB <= 0.8 * card.memory_gib
    if not fits and model.weight_gib / 3.5 + _BESIDE_GIB > card.memory_gib:
        warnings.append(f"even in 4 bits the weights hardly fit: about {model.weight_gib / 3.5:.0f} GiB on {card}")
    return "none" if fits else "nf4"


def _micro_batch(card: Card, length: int) -> int:
    memory = card.memory_gib or 0
    rows = 4 if memory >= 80 else 2 if memory >= 40 or card.is_cpu else 1
    return rows if length <= 4096 else 1


def _rows_per_step(look: Look | None, length: int, epochs: int) -> int:
    """Eight rows, fewer where packing leaves so few rows that eight would make less than 20 steps."""
    rows = 8
    packed_rows = max(1, look.total_tokens // length) if look is not None and look.is_whole else 10_000
    while rows > 1 and packed_rows * epochs / rows < _MIN_STEPS:
        rows //= 2
    return rows


def _eval_fraction(look: Look | None) -> float | None:
    """A tenth of a small file, a fiftieth of a large one; of less than 10 rows nothing can be spared."""
    if look is None or not look.is_whole:
        return 0.02
    return None if look.num_rows < 10 else 0.1 if look.num_rows < 5_000 else 0.02
