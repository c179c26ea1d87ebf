"""The attention backends by name, each with its limits, stated before a run.

Which one is fastest where it is right was measured on compute capability 9.0 only; for other cards the limits come from
the kernels' sources, and the check at load (`probe.py`) has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from finetune.optimizations.attention import flash4, transformers_flash
from finetune.optimizations.attention.chunks import most_slots
from finetune.optimizations.attention.dense import attend_sdpa, attend_segments
from finetune.optimizations.attention.flash4 import attend_flash4
from finetune.optimizations.attention.flex import attend_flex
from finetune.optimizations.attention.transformers_flash import attend_through_transformers
from finetune.optimizations.attention.types import Attend, AttentionLayer
from finetune.optimizations.attention.varlen import attend_varlen
from finetune.optimizations.support import Hardware, Support

BackendName = Literal["flash4", "flash3", "flash2", "varlen", "flex", "sdpa", "segments"]
HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
"""Widest head of the flash kernels."""
Limits = Callable[[Hardware, torch.dtype, Sequence[AttentionLayer]], Support]


@dataclass(frozen=True)
class Backend:
    """One way to compute packed attention."""

    name: BackendName
    registered: str
    """Its name in transformers' registry, where `flash`, `sdpa` and `flex_attention` inside a name have a meaning."""
    attend: Attend
    limits: Limits
    counts_in_32_bits: bool = True
    """Its kernels number the elements of a call in 32 bits; batches are cut for it, but not inside a document (`flex`:
    a row)."""
    many_documents: int | None = None
    """Above so many documents in a batch it takes other kernels, which are compiled and can be wrong by themselves."""

    def supported(
        self, hardware: Hardware, dtype: torch.dtype, layers: Sequence[AttentionLayer], *, row_length: int = 0
    ) -> Support:
        """Says whether the backend is right for these layers on this device, in rows of `row_length` slots, and if not,
        why."""
        numbers_a_slot = max((layer.num_heads * layer.head_dim for layer in layers), default=1)
        if self.counts_in_32_bits and row_length > (limit := most_slots(numbers_a_slot)):
            return Support(
                False,
                f"a row of {row_length} slots with {numbers_a_slot} numbers each passes the 2^31 that it can count; "
                f"it takes data.max_length up to {limit}",
            )
        return self.limits(hardware, dtype, layers)


def _anywhere(hardware: Hardware, dtype: torch.dtype, layers: Sequence[AttentionLayer]) -> Support:
    return Support(True)


def _half_precision_on_cuda(hardware: Hardware, dtype: torch.dtype, *, least: tuple[int, int]) -> Support:
    if hardware.capability is None:
        return Support(False, "it needs a CUDA device")
    if hardware.capability < least:
        return Support(False, f"it needs compute capability {least[0]}.{least[1]}, and {hardware.label} has less")
    if dtype not in HALF:
        return Support(False, f"it computes in fp16 and bf16, not in {str(dtype).removeprefix('torch.')}")
    return Support(True)


def _flash_widths(layers: Sequence[AttentionLayer]) -> Support:
    for layer in layers:
        if layer.head_dim > FLASH_HEAD_DIM or layer.head_dim % 8:
            return Support(
                False, f"heads are {layer.head_dim} wide, and it takes multiples of 8 up to {FLASH_HEAD_DIM}"
            )
    return Support(True)


def _varlen(hardware: Hardware, dtype: torch.dtype, layers: Sequence[AttentionLayer]) -> Support:
    checks = (_half_precision_on_cuda(hardware, dtype, least=(8, 0)), _flash_widths(layers), _no_softcap(layers))
    return next((check for check in checks if not check.ok), Support(True))


def _no_softcap(layers: Sequence[AttentionLayer]) -> Support:
    if any(layer.softcap for layer in layers):
        return Support(False, "the model caps its scores (softcap), which it cannot")
    return Support(True)


def _no_sinks(layers: Sequence[AttentionLayer]) -> Support:
    if any(layer.has_sinks for layer in layers):
        return Support(False, "the model has attention sinks, which it cannot train through transformers")
    return Support(True)


def _flex(hardware: Hardware, dtype: torch.dtype, layers: Sequence[AttentionLayer]) -> Support:
    if hardware.capability is None:
        return Support(False, "its CPU version has no backward")
    for layer in layers:
        if layer.head_dim < 16 or layer.head_dim & (layer.head_dim - 1):
            return Support(False, f"heads are {layer.head_dim} wide, and it takes powers of two from 16 on")
    return Support(True)


def _flash4(hardware: Hardware, dtype: torch.dtype, layers: Sequence[AttentionLayer]) -> Support:
    """Limits of flash-attn-4 4.0.0b36, from its source; each is silent or late there."""
    half = _half_precision_on_cuda(hardware, dtype, least=(9, 0))
    if hardware.capability is not None and hardware.capability < (9, 0):
        return Support(False, f"it has no backward on {hardware.label}; compute capability 9.0 or 10.x is needed")
    if not half.ok:
        return half
    if not (package := flash4.installed()).ok:
        return package
    assert hardware.capability is not None
    for layer in layers:
        if not (support := _flash4_layer(hardware.capability[0], layer)).ok:
            return support
    return Support(True)


def _flash4_layer(major: int, layer: AttentionLayer) -> Support:
    width = layer.head_dim
    if major == 12:
        return Support(False, "on compute capability 12.x its gradients of packed rows are wrong")
    if major == 9 and (width % 32 or width > 192):
        return Support(
            False, f"heads are {width} wide; on compute capability 9.0 it is right for multiples of 32 to 192"
        )
    if major in (10, 11) and (width % 8 or width > 128):
        return Support(False, f"heads are {width} wide; on compute capability 10.x it takes multiples of 8 up to 128")
    return Support(True)


def _through_transformers(
    hardware: Hardware,
    dtype: torch.dtype,
    layers: Sequence[AttentionLayer],
    *,
    implementation: str,
    least: tuple[int, int],
    only_major: int | None = None,
) -> Support:
    if only_major is not None and hardware.capability is not None and hardware.capability[0] != only_major:
        return Support(False, f"it runs on compute capability {only_major}.x only")
    checks = (
        _half_precision_on_cuda(hardware, dtype, least=least),
        transformers_flash.installed(implementation),
        _flash_widths(layers),
        _no_sinks(layers),
    )
    return next((check for check in checks if not check.ok), Support(True))


_FLASH2, _FLASH3 = "flash_attention_2", "flash_attention_3"
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("flash4", "packed_fa4", attend_flash4, _flash4, many_documents=flash4.MANY_DOCUMENTS),
        Backend(
            "flash3", "packed_fa3", attend_through_transformers(_FLASH3),
            partial(_through_transformers, implementation=_FLASH3, least=(9, 0), only_major=9),
        ),
        Backend(
            "flash2", "packed_fa2", attend_through_transformers(_FLASH2),
            partial(_through_transformers, implementation=_FLASH2, least=(8, 0)),
        ),
        Backend("varlen", "packed_varlen", attend_varlen, _varlen),
        Backend("flex", "packed_flex", attend_flex, _flex),
        Backend("sdpa", "packed_dense", attend_sdpa, _anywhere, counts_in_32_bits=False),
        Backend("segments", "packed_segments", attend_segments, _anywhere, counts_in_32_bits=False),
    )
}  # fmt: skip
