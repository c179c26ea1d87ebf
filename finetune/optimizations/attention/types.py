"""What attention backends share: their one signature's arguments, and a model's kinds of attention layers.

Legend: R rows, L slots a row, T = R * L, H query heads, K key and value heads (H a multiple of K), E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from finetune.data.packed_metadata import PackedMetadata
from finetune.optimizations.attention.rebuild import RebuiltBoundaries

Boundaries = PackedMetadata | RebuiltBoundaries
"""Where the documents of a batch begin: as the collator built it, or found again from the positions."""


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of attention beside its tensors."""

    scale: float
    """Factor of the scores, 1 / sqrt(E) in most models."""
    window: int | None = None
    """Keys that a query sees at most, itself included: it sees key j from i where `0 <= i - j < window`."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: torch.Tensor | None = None
    """`[H]`: for each head a logit that takes part in the softmax and adds nothing to the output."""


class Attend(Protocol):
    """Causal attention inside each document."""

    def __call__(
        self,
        query: torch.Tensor,  # [R, L, H, E]
        key: torch.Tensor,  # [R, L, K, E]
        value: torch.Tensor,  # [R, L, K, E]
        *,
        boundaries: Boundaries,
        options: AttentionOptions,
    ) -> torch.Tensor:  # [R, L, H, E]
        ...


@dataclass(frozen=True)
class AttentionLayer:
    """One kind of attention layer of a model."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def label(self) -> str:
        """What messages call it, such as `64/8 heads of 64, window 128, sinks`."""
        parts = [f"{self.num_heads}/{self.num_key_value_heads} heads of {self.head_dim}"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.has_sinks else []
        return ", ".join(parts)
