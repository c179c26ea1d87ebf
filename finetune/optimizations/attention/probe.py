"""The check at load: a tiny packed forward and backward of each kind of layer, against the reference.

It catches what signatures and versions do not tell: a kernel that is silently wrong at a head width, with grouped
queries, with a window, or on a card. It costs milliseconds where nothing has to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from finetune.data.packed_metadata import PackedMetadata, build_packed_metadata
from finetune.optimizations.attention.backends import Backend
from finetune.optimizations.attention.reference import attention_reference
from finetune.optimizations.attention.types import Attend, AttentionLayer, AttentionOptions

DOCUMENTS = (37, 130, 1, 75)
"""Tokens of the documents: none a multiple of 64, one of a single token, one longer than a tile."""
ROW_LENGTH = 256
MOST_DOCUMENTS = 320
"""Documents of the check where a batch may have many: next to all of them of one token."""
MARGIN = 2.0
"""How many times plain torch's own error in the same format a backend's may be."""
WINDOW = 40
"""A window is checked at this width at most, so that documents of the check are longer than it."""
FLOOR = 1e-5
"""Relative error that needs no reason; as little as one rounding step of the format does."""


@dataclass(frozen=True)
class ProbeResult:
    """How far a backend is from the reference on one kind of layer."""

    layer: AttentionLayer
    errors: dict[str, float]
    """Root mean square of the difference over that of the truth, for the output and each gradient."""
    allowed: dict[str, float]

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words."""
        return [
            f"{name} is off by {error:.1e} (allowed {self.allowed[name]:.1e})"
            for name, error in self.errors.items()
            if not error <= self.allowed[name]
        ]


def probe_backend(
    backend: Backend,
    layer: AttentionLayer,
    *,
    dtype: torch.dtype,
    device: torch.device,
    documents: Sequence[int] = DOCUMENTS,
) -> ProbeResult:
    """Compares output and gradients with the reference in fp32; plain torch in `dtype` says what rounding costs."""
    metadata = build_packed_metadata([documents], row_length=-(-sum(documents) // ROW_LENGTH) * ROW_LENGTH).to(device)
    if layer.window is not None:
        layer = replace(layer, window=min(layer.window, WINDOW))
    tensors = _tensors(layer, metadata.row_length, device)
    truth = _run(attention_reference, tensors, metadata, layer, torch.float32)
    plain = _run(attention_reference, tensors, metadata, layer, dtype)
    own = _run(backend.attend, tensors, metadata, layer, dtype)
    errors = {name: _error(own[name], truth[name]) for name in truth}
    floor = max(FLOOR, torch.finfo(dtype).eps)
    allowed = {name: max(MARGIN * _error(plain[name], truth[name]), floor) for name in truth}
    return ProbeResult(layer, errors, allowed)


def probed_documents(backend: Backend, *, most_documents: int) -> list[tuple[int, ...]]:
    """Returns the documents of each check: where a batch can have so many that the backend takes other kernels, those
    are checked too, and compiled here and not in the middle of the run."""
    if backend.many_documents is None or most_documents <= backend.many_documents:
        return [DOCUMENTS]
    assert backend.many_documents < MOST_DOCUMENTS
    return [DOCUMENTS, (*DOCUMENTS, *[1] * (MOST_DOCUMENTS - len(DOCUMENTS)))]


def _tensors(layer: AttentionLayer, row_length: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (1, row_length, layer.num_heads, layer.head_dim),
        "key": (1, row_length, layer.num_key_value_heads, layer.head_dim),
        "value": (1, row_length, layer.num_key_value_heads, layer.head_dim),
        "grad": (1, row_length, layer.num_heads, layer.head_dim),
    }
    if layer.has_sinks:
        shapes["sinks"] = (layer.num_heads,)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if layer.softcap is not None:
        drawn["query"] *= layer.softcap  # scores of about 1 would not feel the cap
    # Rounded to bf16, so that all formats begin with the same numbers.
    return {name: tensor.to(torch.bfloat16).float().to(device) for name, tensor in drawn.items()}


def _run(
    attend: Attend,
    tensors: dict[str, torch.Tensor],
    metadata: PackedMetadata,
    layer: AttentionLayer,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Output and gradients, in fp32."""
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items() if name != "grad"}
    options = AttentionOptions(layer.head_dim**-0.5, layer.window, layer.softcap, leaves.get("sinks"))
    with torch.enable_grad():
        out = attend(leaves["query"], leaves["key"], leaves["value"], boundaries=metadata, options=options)
        grads = torch.autograd.grad(out, list(leaves.values()), tensors["grad"].to(dtype))
    named = {"output": out.detach()} | {
        f"the gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)
    }
    return {name: tensor.float() for name, tensor in named.items()}


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth, or over a hundredth where the truth is next to nothing
    (inputs are of size 1); NaN where there is one."""
    return (_rms(found - true) / _rms(true).clamp(min=1e-2)).item()


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()
