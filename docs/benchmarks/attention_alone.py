"""Times packed attention alone, forward and backward, on each backend and on flash-attn-4 called bare.

    python docs/benchmarks/attention_alone.py > docs/benchmarks/attention_alone_h200.json

Milliseconds by CUDA events over windows of ten calls, median of five; `bare` calls flash-attn-4's own function with the
same offsets.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import torch

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.attention import flash4
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.types import AttentionLayer, AttentionOptions
from finetune.optimizations.support import probe_hardware
from finetune.run.environment import collect_environment

CASES = [
    (AttentionLayer(40, 8, 128), 4096, 400),
    (AttentionLayer(40, 8, 128), 16384, 100),
    (AttentionLayer(40, 8, 128), 16384, 400),
    (AttentionLayer(40, 8, 128), 16384, 2000),
    (AttentionLayer(32, 8, 128), 32768, 32768),
    (AttentionLayer(64, 8, 64, 128, None, True), 16384, 400),
    (AttentionLayer(64, 8, 64, None, None, True), 16384, 400),
]
NAMES = ("bare", "flash4", "varlen", "flex", "sdpa")
LONGEST_DENSE = 16384
CALLS, REPETITIONS = 10, 6


def main() -> None:
    results = []
    for layer, slots, document in CASES:
        case: dict[str, object] = {"layer": layer.label, "slots": slots, "document_tokens": document, "ms": {}}
        for name in NAMES:
            if name == "sdpa" and slots > LONGEST_DENSE:
                continue
            if (attend := _attend(name, layer, slots, document)) is not None:
                case["ms"][name] = _time(attend, layer, slots)  # type: ignore[index]
                print(layer.label, slots, document, name, case["ms"][name], file=sys.stderr, flush=True)  # type: ignore[index]
        results.append(case)
    print(json.dumps({"record_version": 1, "environment": collect_environment(), "cases": results}, indent=1))


def _attend(name: str, layer: AttentionLayer, slots: int, document: int) -> Callable[..., torch.Tensor] | None:
    lengths = [document] * (slots // document) + ([slots % document] if slots % document else [])
    metadata = build_packed_metadata([lengths], row_length=slots).to("cuda")
    hardware = probe_hardware(torch.device("cuda", 0))
    if not BACKENDS["flash4" if name == "bare" else name].supported(hardware, torch.bfloat16, [layer]).ok:
        return None
    scale = layer.head_dim**-0.5
    if name != "bare":
        return lambda q, k, v, sinks: BACKENDS[name].attend(
            q, k, v, boundaries=metadata, options=AttentionOptions(scale, layer.window, None, sinks)
        )
    assert flash4.installed().ok
    from flash_attn.cute import flash_attn_varlen_func

    window = (None, None) if layer.window is None else (layer.window - 1, 0)
    offsets, longest = metadata.cu_seqlens, metadata.max_seqlen
    return lambda q, k, v, sinks: flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scale, causal=True, window_size=window, learnable_sink=sinks,
    )[0]  # fmt: skip


def _time(attend: Callable[..., torch.Tensor], layer: AttentionLayer, slots: int) -> dict[str, float]:
    def make(heads: int) -> torch.Tensor:
        return torch.randn(1, slots, heads, layer.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = make(layer.num_heads), make(layer.num_key_value_heads), make(layer.num_key_value_heads)
    sinks = torch.randn(layer.num_heads, device="cuda", requires_grad=True) if layer.has_sinks else None
    grad = torch.randn_like(attend(q, k, v, sinks))
    for _ in range(2):  # compiles
        attend(q, k, v, sinks).backward(grad)

    def both() -> None:
        attend(q, k, v, sinks).backward(grad)

    return {"forward": _median(lambda: attend(q, k, v, sinks)), "forward_and_backward": _median(both)}


def _median(call: Callable[[], object]) -> float:
    """Milliseconds a call: median over windows of `CALLS`, so that the device and not the host is timed."""
    windows = []
    for _ in range(REPETITIONS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        marks[0].record()
        for _ in range(CALLS):
            call()
        marks[1].record()
        torch.cuda.synchronize()
        windows.append(marks[0].elapsed_time(marks[1]) / CALLS)
    return statistics.median(windows[1:])


if __name__ == "__main__":
    main()
