"""Times packed attention alone, forward and backward, on each backend and on flash-attn-4 called bare.

    python docs/benchmarks/attention_alone.py --out docs/benchmarks/attention_alone_h200.json

Milliseconds by CUDA events over windows of ten calls, median of five, for every case alike; `bare` calls flash-attn-4's
own function with the same offsets. `--only sinks,flex` takes the cases and backends named, in that order: words are
parts of a case's name (`layer, slots, document`) or backends. When `--seconds` are over it stops, and what it has is
written with `"ended_early": true`; each case is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.attention import flash4
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.types import AttentionLayer, AttentionOptions
from finetune.optimizations.support import probe_hardware
from finetune.run.environment import collect_environment

LONGEST_DENSE = 16384
CALLS, REPETITIONS = 10, 6
NAMES = ("bare", "flash4", "varlen", "flex", "sdpa", "segments")


@dataclass(frozen=True)
class Case:
    """One layer over one batch of a single row."""

    layer: AttentionLayer
    slots: int
    document: int
    """Tokens of each document."""

    @property
    def name(self) -> str:
        return f"{self.layer.label}, {self.slots}, {self.document}"


CASES = [
    Case(AttentionLayer(40, 8, 128), 4096, 400),
    Case(AttentionLayer(40, 8, 128), 16384, 100),
    Case(AttentionLayer(40, 8, 128), 16384, 400),
    Case(AttentionLayer(40, 8, 128), 16384, 2000),
    Case(AttentionLayer(32, 8, 128), 32768, 32768),
    Case(AttentionLayer(64, 8, 64, 128, None, True), 16384, 400),
    Case(AttentionLayer(64, 8, 64, None, None, True), 16384, 400),
]
TOY = [Case(AttentionLayer(4, 2, 16), 128, 40), Case(AttentionLayer(4, 2, 16, 16, None, True), 128, 40)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of cases (sinks, 4096) and backends, separated by commas")
    parser.add_argument("--seconds", type=float, default=200.0, help="stop after so many")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="tiny cases, on the CPU where there is no GPU")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ends = time.monotonic() + options.seconds
    record = {"record_version": 1, "environment": collect_environment(), "ended_early": False, "cases": {}}
    for case, name in selected(TOY if options.toy else CASES, options.only.split(",") if options.only else []):
        if time.monotonic() > ends:
            record["ended_early"] = True
            break
        measured = measure(name, case, device)
        if measured is None:
            continue
        entry = record["cases"].setdefault(case.name, {})
        entry |= {"layer": case.layer.label, "slots": case.slots, "document_tokens": case.document}
        entry.setdefault("ms", {})[name] = measured
        print(case.name, name, measured, file=sys.stderr, flush=True)
        write(options.out, record)
    write(options.out, record)


def selected(cases: list[Case], words: list[str]) -> Iterator[tuple[Case, str]]:
    """Yields what to measure, first what the earlier words name: a case by a part of its name, a backend by its name.

    A word of cases takes all backends, unless backends are named too; a word of backends all cases, unless cases are.
    """
    backends = [word for word in words if word in NAMES] or list(NAMES)
    parts = [word for word in words if word not in NAMES]
    chosen = [case for part in parts for case in cases if part in case.name] if parts else cases
    if parts and not chosen:
        sys.exit(f"--only {','.join(parts)} names no case; there are: {'; '.join(case.name for case in cases)}")
    yield from ((case, name) for case in dict.fromkeys(chosen) for name in backends)


def measure(name: str, case: Case, device: torch.device) -> dict[str, float] | None:
    """Returns milliseconds of forward and of both; None where the backend does not compute the case here."""
    if name in ("sdpa", "segments") and (case.slots > LONGEST_DENSE or (name == "segments" and device.type == "cuda")):
        return None
    attend = make_attend(name, case, device)
    return None if attend is None else time_calls(attend, case, device)


def make_attend(name: str, case: Case, device: torch.device) -> Callable[..., torch.Tensor] | None:
    layer, slots, document = case.layer, case.slots, case.document
    lengths = [document] * (slots // document) + ([slots % document] if slots % document else [])
    metadata = build_packed_metadata([lengths], row_length=slots).to(device)
    backend = BACKENDS["flash4" if name == "bare" else name]
    if not backend.supported(probe_hardware(device), torch.bfloat16, [layer]).ok:
        return None
    scale = layer.head_dim**-0.5
    if name != "bare":
        return lambda q, k, v, sinks: backend.attend(
            q, k, v, boundaries=metadata, options=AttentionOptions(scale, layer.window, None, sinks)
        )
    assert flash4.installed().ok
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    window = (None, None) if layer.window is None else (layer.window - 1, 0)
    offsets, longest = metadata.cu_seqlens, metadata.max_seqlen
    return lambda q, k, v, sinks: flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scale, causal=True, window_size=window, learnable_sink=sinks,
    )[0]  # fmt: skip


def time_calls(attend: Callable[..., torch.Tensor], case: Case, device: torch.device) -> dict[str, float]:
    layer = case.layer

    def make(heads: int) -> torch.Tensor:
        shape = (1, case.slots, heads, layer.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = make(layer.num_heads), make(layer.num_key_value_heads), make(layer.num_key_value_heads)
    sinks = torch.randn(layer.num_heads, device=device, requires_grad=True) if layer.has_sinks else None
    grad = torch.randn_like(attend(q, k, v, sinks))
    for _ in range(2):  # compiles
        attend(q, k, v, sinks).backward(grad)

    def both() -> None:
        attend(q, k, v, sinks).backward(grad)

    return {
        "forward": _median(lambda: attend(q, k, v, sinks), device),
        "forward_and_backward": _median(both, device),
    }


def _median(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds a call: median over windows of `CALLS`, so that the device and not the host is timed."""
    return statistics.median([_window(call, device) for _ in range(REPETITIONS)][1:])


def _window(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - began) * 1000 / CALLS
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    marks[0].record()
    for _ in range(CALLS):
        call()
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) / CALLS


def write(path: Path, record: dict) -> None:
    path.write_text(json.dumps(record | {"cases": list(record["cases"].values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
