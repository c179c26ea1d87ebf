"""flash-attn-4 (`flash_attn.cute`) as an operation of ours, so that selective checkpointing and fake tensors see it.

Its own autograd function is opaque to both. For fp16 and bf16 on compute capability 9.0 and 10.x; the limits are in
`backends.py`. Sinks are its own argument, in fp32, with their gradient.

The operations are registered through `Library` and not `custom_op`: in short rows the host is slower than the device,
and the checks that `custom_op` makes at every call cost more host time than all the rest of a call.

Legend: T slots of the batch, H query heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from finetune.data.cache import cache_folder
from finetune.optimizations.attention.chunks import Chunk, attend_in_chunks
from finetune.optimizations.attention.operation import register_operation
from finetune.optimizations.attention.types import AttentionOptions, Boundaries
from finetune.optimizations.support import Support

MANY_DOCUMENTS = 256
"""Above so many documents in a call it takes other kernels (`BIN_BATCH_SEARCH_THRESH` of its interface)."""
DISTRIBUTION = "flash-attn-4"
"""Its name in the package index; the import name `flash_attn.cute` is shared with leftovers of flash-attn 2."""


@cache
def installed() -> Support:
    """Says whether the package is there and has what is used of it; imports it only when it is."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return Support(False, f"the package {DISTRIBUTION} is not installed (pip install 'finetune[flash]')")
    try:
        forward, _ = _kernels()
    except (ImportError, AttributeError) as error:
        return Support(False, f"{DISTRIBUTION} {version} cannot be imported: {error}")
    if "learnable_sink" not in inspect.signature(forward).parameters:
        return Support(False, f"{DISTRIBUTION} {version} is overlaid by older files; reinstall it last")
    return Support(True)


@cache
def _kernels() -> tuple[Any, Any]:
    # Compiling takes seconds for each kind of layer; the package keeps nothing unless told to before its import.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_kernel_folder()))
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports] - an optional package

    return interface._flash_attn_fwd, interface._flash_attn_bwd


def _kernel_folder() -> Path:
    """Returns the folder of compiled kernels, which only the user may enter, since what is in it is run as code.

    Its name has the versions of both packages that make the kernels; the package's own key leaves one of them out.
    """
    versions = "-".join(importlib.metadata.version(name) for name in (DISTRIBUTION, "quack-kernels"))
    folder = cache_folder().parent / "kernels" / f"{DISTRIBUTION}-{versions}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    return folder


@cache
def _capped(softcap: float) -> tuple[Any, Any]:
    """The functions of a capped score and of its gradient. Given a number, the package makes new ones at every call and
    looks its kernels up by a hash of their source."""
    from flash_attn.cute import utils  # pyright: ignore[reportMissingImports] - an optional package

    return utils.create_softcap_scoremod(softcap), utils.create_softcap_scoremod_bwd(softcap)


def attend_flash4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: Boundaries, options: AttentionOptions
) -> torch.Tensor:
    """See `Attend`."""
    sinks = None if options.sinks is None else options.sinks.float()

    def attend(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, part: Chunk) -> torch.Tensor:
        return _FORWARD(
            q_THE, k_TKE, v_TKE, sinks, part.cu_seqlens, part.max_seqlen, options.scale, options.window, options.softcap
        )[0]

    return attend_in_chunks(attend, query, key, value, boundaries=boundaries)


def _settings(
    sinks_H: torch.Tensor | None, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float, window: int | None
) -> dict[str, Any]:
    """The arguments that forward and backward share. A side without a limit is None: -1 would mask every key."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None else window - 1,
        "window_size_right": None if window is None else 0,
        "learnable_sink": sinks_H,
    }


def _forward(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp `[H, T]` (fp32, sinks included)."""
    settings = _settings(sinks_H, cu_seqlens, max_seqlen, scale, window)
    if softcap is not None:
        settings["score_mod"], _ = _capped(softcap)
    out, lse, *_ = _kernels()[0](q_THE, k_TKE, v_TKE, return_lse=True, **settings)
    return out, lse


def _backward(
    grad_THE: torch.Tensor,
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> list[torch.Tensor]:
    """Gradients of query, key and value, and of the sinks where there are some."""
    settings = _settings(sinks_H, cu_seqlens, max_seqlen, scale, window)
    if softcap is not None:
        settings["score_mod"], settings["score_mod_bwd"] = _capped(softcap)
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad = grad_THE.contiguous()
    return list(_kernels()[1](q_THE, k_TKE, v_TKE, out_THE, grad, lse_HT, deterministic=deterministic, **settings))


_NUMBERS = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt? window, float? softcap"
_FORWARD: Any = register_operation("flash_attn_4_varlen", _NUMBERS, forward=_forward, backward=_backward)
