"""Which attention a run computes with: the recipe's word, or the fastest that is right on this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.optimizations.attention.backends import BACKENDS, Backend, BackendName
from finetune.optimizations.attention.layers import attention_layers, packs_exactly, takes_backends
from finetune.optimizations.attention.types import AttentionLayer
from finetune.optimizations.support import Hardware

FLASH4_SLOTS = 8192
"""Slots of a micro-batch from which flash-attn-4 is faster than torch's own kernel: a step of Qwen3-14B took 1,004 ms
with the former and 974 with the latter at 4,096, and 3,454 and 3,501 at 16,384 (H200)."""
EAGER = "eager"
"""transformers' own plain attention, with its own masks."""
STOCK_MIXES_PACKED = ("gpt_oss",)
"""Architectures whose stock forward builds its mask without the positions, so that packed documents see each other.

transformers 5.17 and 5.24 leave `position_ids` out of the mask's arguments in `GptOssModel.forward`
(huggingface/transformers#39997).
"""


@dataclass(frozen=True)
class AttentionChoice:
    """What attention a run takes, and why."""

    backend: Backend | None
    """None: transformers' own attention, as the model was loaded."""
    stock: str
    """The implementation that the model is loaded with, and that generates answers: `sdpa` or `eager`."""
    layers: tuple[AttentionLayer, ...]
    reason: str
    faster: str = ""
    """What would be faster here, and how to get it; empty where nothing is known to be."""

    @property
    def name(self) -> str:
        """The recipe's name of what is used."""
        return self.backend.name if self.backend is not None else self.stock


def choose_attention(
    wanted: str,
    *,
    skeleton: PreTrainedModel,
    stock: str,
    hardware: Hardware,
    dtype: torch.dtype,
    packing: bool,
    row_length: int,
    num_rows: int,
) -> AttentionChoice:
    """Settles the attention before any weight is read.

    Args:
        wanted: `auto`, `eager`, or a backend's name.
        skeleton: the model on the meta device.
        stock: transformers' implementation that the model is loaded with.
        packing: rows hold several documents.
        row_length: slots of a row at most, L.
        num_rows: of a micro-batch, R.

    Raises:
        RecipeError: the architecture cannot have what is wanted, or cannot be packed.
        EnvironmentProblem: the device or a missing package rules the named backend out.
    """
    _require_packable(skeleton, packing=packing)
    takes = takes_backends(skeleton)
    if wanted == EAGER or (wanted == "auto" and not takes.ok):
        _require_stock_packs(skeleton, packing=packing)
        return AttentionChoice(None, stock, (), "named in the recipe" if wanted == EAGER else takes.reason)
    layers = tuple(attention_layers(skeleton))
    if not takes.ok:
        raise RecipeError(
            f"model.attention is {wanted}, but {takes.reason}",
            place="model.attention",
            remedy="Set model.attention to auto or eager.",
        )
    if wanted == "auto":
        return _automatic(layers, stock, hardware=hardware, dtype=dtype, row_length=row_length, num_rows=num_rows)
    backend = BACKENDS[wanted]
    if not (support := backend.supported(hardware, dtype, layers, row_length=row_length)).ok:
        fallback = _automatic(layers, stock, hardware=hardware, dtype=dtype, row_length=row_length, num_rows=num_rows)
        raise EnvironmentProblem(
            f"model.attention is {wanted}, which cannot be used here: {support.reason}",
            place="model.attention",
            remedy=f"Set model.attention to auto, which takes {fallback.name} here.",
        )
    return AttentionChoice(backend, stock, layers, "named in the recipe")


def preference(hardware: Hardware, dtype: torch.dtype, *, slots: int) -> tuple[BackendName, ...]:
    """Backends from the fastest on, for a device; those that it cannot have are left out by their limits.

    The order on 9.0 was measured: in short rows flash-attn-4 waits for the host. On 12.x its gradients are wrong.
    In fp32 only flex is faster than one call a document, and it compiles for tens of seconds.
    """
    if hardware.capability is None or hardware.capability < (8, 0) or dtype == torch.float32:
        return ("segments",)
    if hardware.capability[0] in (9, 10, 11) and slots >= FLASH4_SLOTS:
        return ("flash4", "flash3", "varlen", "flex", "segments")
    return ("varlen", "flash2", "flex", "segments")


def _automatic(
    layers: Sequence[AttentionLayer],
    stock: str,
    *,
    hardware: Hardware,
    dtype: torch.dtype,
    row_length: int,
    num_rows: int,
) -> AttentionChoice:
    passed: list[str] = []
    for name in preference(hardware, dtype, slots=num_rows * row_length):
        support = BACKENDS[name].supported(hardware, dtype, layers, row_length=row_length)
        if support.ok:
            reason = f"the fastest that is right on {hardware.label}"
            return AttentionChoice(BACKENDS[name], stock, tuple(layers), reason, "; ".join(passed))
        if name == "flash4":
            passed.append(f"{name} would be faster, but {support.reason}")
    raise AssertionError("segments works everywhere")


def _require_packable(skeleton: PreTrainedModel, *, packing: bool) -> None:
    if packing and not (support := packs_exactly(skeleton)).ok:
        raise RecipeError(
            f"data.packing is true, but {type(skeleton).__name__} cannot be packed: {support.reason}",
            place="data.packing",
            remedy="Set data.packing=false: one document a row, which is exact for every architecture.",
        )


def _require_stock_packs(skeleton: PreTrainedModel, *, packing: bool) -> None:
    if packing and skeleton.config.model_type in STOCK_MIXES_PACKED:
        raise RecipeError(
            f"data.packing is true, but transformers' own attention of {skeleton.config.model_type} builds its mask "
            "without the positions, so packed documents would see each other",
            place="model.attention",
            remedy="Set model.attention=auto, which packs it exactly, or data.packing=false.",
        )
