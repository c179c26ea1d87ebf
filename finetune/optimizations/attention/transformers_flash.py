"""flash-attn 2 and 3 as transformers calls them, where a user has them: no sinks, no copy of their interface here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from finetune.optimizations.attention.chunks import Chunk, attend_in_chunks
from finetune.optimizations.attention.types import Attend, AttentionOptions, Boundaries
from finetune.optimizations.support import Support


def installed(implementation: str) -> Support:
    """Says whether transformers finds the package of `flash_attention_2` or `flash_attention_3`."""
    checks: dict[str, Callable[[], bool]] = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
    }
    if checks[implementation]():
        return Support(True)
    package = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash_attn_3"}[implementation]
    return Support(False, f"the package {package} is not installed")


def attend_through_transformers(implementation: str) -> Attend:
    """Returns `Attend` over one of transformers' flash implementations."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        boundaries: Boundaries,
        options: AttentionOptions,
    ) -> torch.Tensor:
        def attend_chunk(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, part: Chunk) -> torch.Tensor:
            offsets: Any = part.cu_seqlens
            return _flash_attention_forward(
                q_THE[None], k_TKE[None], v_TKE[None], None,
                query_length=len(q_THE), is_causal=True, softmax_scale=options.scale, sliding_window=options.window,
                cu_seq_lens_q=offsets, cu_seq_lens_k=offsets,
                max_length_q=part.max_seqlen, max_length_k=part.max_seqlen,
                softcap=options.softcap, attn_implementation=implementation,
            )[0]  # fmt: skip

        return attend_in_chunks(attend_chunk, query, key, value, boundaries=boundaries)

    return attend
