"""The seam to transformers: our backends as attention implementations of its public registry.

No mask function is registered beside them on purpose: transformers then builds no mask, where it would look for packed
documents on the device first and wait for the answer. A call that brings neither metadata nor the wish to rebuild it is
an error, so a padded batch cannot pass for a packed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from finetune.data.packed_metadata import PackedMetadata
from finetune.optimizations.attention.backends import BACKENDS, Backend
from finetune.optimizations.attention.rebuild import RebuildEachLayer
from finetune.optimizations.attention.types import Attend, AttentionOptions

_HARMLESS = frozenset({"position_ids", "cache_position", "input_ids"})
"""Tensors among a layer's keywords that attention itself has no use for."""


class MissingMetadata(TypeError):
    """A model under a packed backend was called without the batch's boundaries."""


def register_backends() -> None:
    """Makes all backends known to transformers; does nothing to any model."""
    for backend in BACKENDS.values():
        AttentionInterface.register(backend.registered, attention_function(backend))


def attention_function(backend: Backend) -> Callable[..., tuple[torch.Tensor, None]]:
    """Returns the backend as transformers calls attention: `[R, H, L, E]` in, `[R, L, H, E]` out."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        packed_metadata: PackedMetadata | RebuildEachLayer | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        _refuse_what_is_not_known(dropout, more)
        boundaries = packed_metadata.boundaries() if isinstance(packed_metadata, RebuildEachLayer) else packed_metadata
        if boundaries is None or query.shape[2] != key.shape[2]:
            raise MissingMetadata(
                f"attention `{backend.name}` serves training on packed rows and was called without packed_metadata; "
                "to generate, call model.set_attn_implementation('sdpa') (or 'eager') first"
            )
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        options = AttentionOptions(scale, sliding_window, softcap, s_aux)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return _in_one_format(backend.attend, q, k, v, boundaries, options), None

    return attend


def _refuse_what_is_not_known(dropout: float, more: dict[str, Any]) -> None:
    """A tensor under a name that is not known here would change attention, and be lost without a word."""
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; packed attention has none")
    if more.get("is_causal") is False:
        raise ValueError("the layer asks for attention to later tokens; packed attention is causal")
    unknown = [name for name, value in more.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
    if unknown:
        raise ValueError(f"the layer hands over `{unknown[0]}`, which packed attention does not know")


def _in_one_format(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Any, options: AttentionOptions
) -> torch.Tensor:
    """Under autocast, rotary or a norm can leave query and key in fp32 beside a 16-bit value; kernels want one."""
    kind = q.device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    return attend(q.to(wanted), k.to(wanted), v.to(wanted), boundaries=boundaries, options=options)


@contextmanager
def attention_set_to(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Runs a block under another attention implementation, such as a stock one while answers are generated."""
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
