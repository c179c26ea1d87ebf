"""Times a step under the activation plan at several memory caps, beside plain checkpointing and offloaded inputs with
one and with two reload buffers, and sets what the plan predicted beside what was measured.

    python docs/benchmarks/activation_plan.py MODEL_FOLDER --nf4 --rows 4096:400,16384:400 --caps 12,23,139 \
        --modes plan,plain,host-1,host-2 --out FILE.jsonl
    python docs/benchmarks/activation_plan.py MODEL_FOLDER --nf4 --rank 32 --longest 23,31 --out FILE.jsonl

One JSON line a case: milliseconds of a step (median, lowest, highest of `--steps` after `--warmup`; forward, backward
and optimizer of one row), peak of allocated memory. Weights are random, drawn on the device; documents have geometric
lengths with the stated mean, a mean at or above the row's length makes one document of it. A cap is a limit of this
process's memory: it stands for a smaller card's size, never for its speed.

Modes: `plan` is the planner's; `plain` keeps every layer's input on the device and remakes all else; `host-1` and
`host-2` put every input but the last layer's on the host, with one and two buffers; `whole` keeps everything.

`--longest` finds the longest row, one document, that trains under each cap: all inputs but the last on the host, MLPs
in tiles, the full weights, `--layers` layers at true length (those left out need no memory of the device).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed_metadata import MOST_IDS, _batch, _build, _peak, _reset_peak, _write
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.data.collate import RowCollator
from finetune.data.rows import RowTokens
from finetune.optimizations.activations.describe import plan_dict, plan_lines
from finetune.optimizations.activations.planner import BudgetTooSmall
from finetune.optimizations.activations.runtime import Activations, Limits
from finetune.optimizations.activations.types import GIB, Group, LayerPlan, Place
from finetune.optimizations.apply import apply_attention
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.run.environment import collect_environment
from finetune.trainer.activations import workload_of
from finetune.trainer.sft import SftTrainer

TILE = 2048
SPARE = 0.98
"""Share of a cap that a row may fill: the rest lies between the allocator's blocks."""


def main() -> None:
    options = _options()
    ends = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        trainer, prepared, base = _build(options, Path(scratch))
        base.set_attn_implementation(prepared.attention.stock)  # what the check compares with
        choice = dataclasses.replace(prepared.attention, backend=BACKENDS[options.attention])
        apply_attention(base, choice, dtype=prepared.model.dtype)
        trainer.metadata_feed = MetadataFeed(is_cached=True)
        setting = {
            "model": Path(options.model).name, "attention": options.attention, "nf4": options.nf4, "rank": options.rank,
            "environment": collect_environment(),
        }  # fmt: skip
        cases: list[dict[str, Any]] = [
            {"slots": int(slots), "mean_document_tokens": int(mean), "cap_gib": float(cap), "mode": mode}
            for slots, _, mean in (row.partition(":") for row in options.rows.split(",") if row)
            for cap in options.caps.split(",")
            for mode in options.modes.split(",")
        ]
        for case in cases:
            if time.monotonic() > ends:
                _write(options.out, case | {"left_out": f"not begun in {options.seconds:g} seconds"})
                continue
            _write(options.out, setting | case | _case(trainer, options, case))
        for cap in (float(cap) for cap in options.longest.split(",") if cap):
            _write(options.out, setting | _longest(trainer, options, cap, ends))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json and tokenizer")
    parser.add_argument("--rows", default="", help="SLOTS:MEAN_DOCUMENT_TOKENS, separated by commas")
    parser.add_argument("--caps", default="1000", help="GiB, separated by commas")
    parser.add_argument("--modes", default="plan")
    parser.add_argument("--longest", default="", help="caps in GiB under which the longest row is looked for")
    parser.add_argument("--layers", type=int, default=2, help="layers that the longest row runs through")
    parser.add_argument("--step-tokens", type=int, default=4096, help="how fine the longest row is found")
    parser.add_argument("--tried-up-to", type=float, default=32, help="GiB up to which the longest row is run")
    parser.add_argument("--attention", default="varlen")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--host", type=float, help="GiB of host memory; none takes what is free")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


# --- steps under a plan


def _case(trainer: SftTrainer, options: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    slots, mean, mode = case["slots"], case["mean_document_tokens"], case["mode"]
    _cap(case["cap_gib"])
    activations = _activations(trainer, _layers(trainer.trained), options)
    generator = np.random.default_rng(0)
    vocabulary = trainer.model.config.get_text_config().vocab_size
    make = _one_document if mean >= slots else lambda *args: _batch(args[0], mean, *args[1:])
    batches = [make(slots, generator, vocabulary) for _ in range(options.warmup + options.steps)]
    began = time.perf_counter()
    error = ""
    try:
        trainer.trained.train()
        activations.prepare(workload_of(trainer, batches[0]))
        seconds = time.perf_counter() - began
        _set_mode(activations, mode)
        assert activations.plan is not None and activations.costs is not None and activations.reload is not None
        for line in plan_lines(activations.plan, activations.costs):
            print(line, flush=True)
        result = _measure(trainer, batches, options.warmup) | {"planning_seconds": seconds}
        plan = activations.plan
        result["predicted_peak_over_measured"] = plan.peak_bytes / max(1, result["peak_memory_bytes"])
        result["predicted_step_over_measured"] = 1000 * plan.step_seconds / result["step_ms"]["median"]
        return result | {
            "plan": plan_dict(plan, activations.costs),
            "misses": activations.reload.num_misses,
            "refused": activations.reload.num_refused,
        }
    except (BudgetTooSmall, torch.OutOfMemoryError) as problem:
        error = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
    finally:
        activations.close()
        trainer.trained.zero_grad()
        _cap(None)
    return {"error": error}


def _set_mode(activations: Activations, mode: str) -> None:
    """Replaces the planner's choice where a mode asks for another."""
    assert activations.plan is not None
    number = len(activations.plan.layers)
    if mode in ("host-1", "host-2"):
        activations.use(_inputs_on_host(number), num_buffers=int(mode[-1]))
    elif mode == "plain":
        activations.use([LayerPlan()] * number, num_buffers=1)
        activations.outputs.skips_last = False
    elif mode == "whole":
        activations.use([LayerPlan(is_whole=True, places={})] * number, num_buffers=1)


def _inputs_on_host(number: int) -> list[LayerPlan]:
    return [LayerPlan(places={Group.INPUT: Place.HOST})] * (number - 1) + [LayerPlan()]


def _measure(trainer: SftTrainer, batches: Sequence[dict], warmup: int) -> dict[str, Any]:
    times, peak = [], 0
    for number, batch in enumerate(batches):
        _synchronize()
        _reset_peak()
        begun = time.perf_counter()
        _forward_and_backward(trainer, batch)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        _synchronize()
        if number >= warmup:
            times.append(1e3 * (time.perf_counter() - begun))
            peak = max(peak, _peak())
    return {
        "step_ms": {"median": statistics.median(times), "lowest": min(times), "highest": max(times)},
        "peak_memory_bytes": peak,
    }


def _forward_and_backward(trainer: SftTrainer, batch: dict) -> None:
    device = trainer.args.device
    inputs = {key: value.to(device, non_blocking=True) for key, value in batch.items() if hasattr(value, "to")}
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=batch["num_supervised_tokens"])
    loss.backward()


# --- the longest row


def _longest(trainer: SftTrainer, options: argparse.Namespace, cap: float, ends: float) -> dict[str, Any]:
    """Draws a line through the peaks of two rows, and tries the row it gives for the cap, and shorter ones if that
    does not fit; above `--tried-up-to` GiB the line's word is taken, and said to be that."""
    first, second = (options.step_tokens * factor for factor in (4, 8))
    peaks = [_trains(trainer, options, None, tokens)["peak_memory_bytes"] for tokens in (first, second)]
    slope = (peaks[1] - peaks[0]) / (second - first)
    if slope <= 0:
        raise RuntimeError("the device does not tell what a row takes")
    tokens = int((cap * GIB * SPARE - peaks[0]) / slope) + first
    tokens = tokens // options.step_tokens * options.step_tokens
    tries: dict[int, Any] = {}
    while cap <= options.tried_up_to and tokens > 0 and time.monotonic() < ends:
        tries[tokens] = _trains(trainer, options, cap, tokens)
        if tries[tokens]["fits"]:
            break
        tokens -= options.step_tokens
    return {
        "cap_gib": cap, "mode": "longest", "longest_tokens": tokens, "is_tried": any(t["fits"] for t in tries.values()),
        "bytes_a_token": slope, "layers_run": options.layers, "tries": tries,
    }  # fmt: skip


def _trains(trainer: SftTrainer, options: argparse.Namespace, cap: float | None, tokens: int) -> dict[str, Any]:
    """Runs some layers of the full model forward and backward over one document."""
    inner = next(module for module in trainer.trained.modules() if hasattr(module, "layers"))
    every = inner.layers
    inner.layers = nn.ModuleList(every[: options.layers])
    layers = list(inner.layers)
    _cap(cap)
    activations = _activations(trainer, layers, options)
    batch = _one_document(tokens, np.random.default_rng(0), trainer.model.config.get_text_config().vocab_size)
    begun = time.perf_counter()
    fits, seconds = True, 0.0
    try:
        trainer.trained.train()
        sizes = [tokens * trainer.model.config.get_text_config().hidden_size * 2] * len(layers)
        activations.run_by_hand(_inputs_on_host(len(layers)), sizes, num_buffers=2, tile_tokens=TILE)
        _reset_peak()
        _forward_and_backward(trainer, batch)
        _synchronize()
        seconds = time.perf_counter() - begun
    except torch.OutOfMemoryError:
        fits = False
    finally:
        activations.close()
        trainer.trained.zero_grad()
        inner.layers = every
        peak = _peak()
        _cap(None)
    found = {"fits": fits, "seconds": seconds, "peak_memory_bytes": peak}
    print(cap, tokens, found, flush=True)
    return found


# --- parts


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _activations(trainer: SftTrainer, layers: Sequence[nn.Module], options: argparse.Namespace) -> Activations:
    limits = Limits(
        double_buffered=True,
        activation_bytes=None,
        host_bytes=None if options.host is None else int(options.host * GIB),
        optimizer="adamw_8bit" if torch.cuda.is_available() else "adamw",
        num_micro_batches=1,
        has_optimizer=True,
    )
    return Activations(trainer.trained, layers, device=trainer.args.device, limits=limits, say=print)


def _one_document(tokens: int, generator: np.random.Generator, vocabulary: int) -> dict:
    ids = generator.integers(0, min(vocabulary, MOST_IDS), tokens).astype(np.int32)
    row = RowTokens(row=0, input_ids=ids, labels=ids.copy(), lengths=np.array([tokens]))
    return dict(RowCollator(row_length=tokens, pad_token_id=0)([row]))


def _cap(gib: float | None) -> None:
    """Limits this process's memory of the device; None lifts the limit."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * GIB / total))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
