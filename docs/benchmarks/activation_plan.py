"""Times a step under the activation plan at several memory caps, beside plain checkpointing and offloaded inputs with
one and with two reload buffers, and sets what the plan predicted beside what was measured.

    python docs/benchmarks/activation_plan.py MODEL_FOLDER --nf4 --rows 4096:400,16384:400 --caps 12,23,139 \
        --modes plan,plain,host-1,host-2 --out FILE.jsonl

One JSON line a case: milliseconds of a step (median, lowest, highest of `--steps` after `--warmup`; forward, backward
and optimizer of one row), peak of allocated memory. Weights are random, drawn on the device; documents have geometric
lengths with the stated mean, the same for every case. A cap is a limit of this process's memory: it stands for a
smaller card's size, never for its speed.

Modes: `plan` is the planner's; `plain` keeps every layer's input on the device and remakes all else; `host-1` and
`host-2` put every input but the last layer's on the host, with one and two buffers; `whole` keeps everything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from packed_metadata import _batch, _build
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.optimizations.activations.describe import plan_dict
from finetune.optimizations.activations.planner import BudgetTooSmall
from finetune.optimizations.activations.runtime import Activations, Limits, Workload
from finetune.optimizations.activations.types import GIB, Group, LayerPlan, Place
from finetune.optimizations.apply import apply_attention
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.run.environment import collect_environment
from finetune.trainer.sft import SftTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json and tokenizer")
    parser.add_argument("--rows", required=True, help="SLOTS:MEAN_DOCUMENT_TOKENS, separated by commas")
    parser.add_argument("--caps", default="139", help="GiB, separated by commas")
    parser.add_argument("--modes", default="plan")
    parser.add_argument("--attention", default="varlen")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--host", type=float, help="GiB of host memory; none takes what is free")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        trainer, prepared, base = _build(options, Path(scratch))
        import dataclasses

        choice = dataclasses.replace(prepared.attention, backend=BACKENDS[options.attention])
        apply_attention(base, choice, dtype=prepared.model.dtype)
        trainer.metadata_feed = MetadataFeed(is_cached=True)
        environment = collect_environment()
        for row in options.rows.split(","):
            slots, mean = map(int, row.split(":"))
            for cap in map(float, options.caps.split(",")):
                for mode in options.modes.split(","):
                    if time.perf_counter() - begun > options.seconds:
                        print("out of time before", row, cap, mode)
                        return
                    case = {"model": Path(options.model).name, "slots": slots, "mean_document_tokens": mean}
                    case |= {"cap_gib": cap, "mode": mode, "attention": options.attention}
                    case |= {"nf4": options.nf4, "rank": options.rank}
                    result = _case(trainer, options, slots=slots, mean=mean, cap=cap, mode=mode)
                    _write(options.out, case | result | {"environment": environment})


def _case(trainer: SftTrainer, options: argparse.Namespace, *, slots: int, mean: int, cap: float, mode: str) -> dict:
    import numpy as np

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / total))
    layers = [module for module in trainer.trained.modules() if isinstance(module, GradientCheckpointingLayer)]
    limits = Limits(
        double_buffered=True,
        activation_bytes=None,
        host_bytes=None if options.host is None else int(options.host * GIB),
        optimizer="adamw_8bit",
        num_micro_batches=1,
    )
    activations = Activations(trainer.trained, layers, device=torch.device("cuda"), limits=limits, say=print)
    generator = np.random.default_rng(0)
    vocabulary = trainer.model.config.get_text_config().vocab_size
    batches = [_batch(slots, mean, generator, vocabulary) for _ in range(options.warmup + options.steps)]
    try:
        began = time.perf_counter()
        trainer.trained.train()
        activations.prepare(_workload(trainer, batches[0]))
        planning = time.perf_counter() - began
        _set_mode(activations, mode)
        return _measure(trainer, batches, options.warmup) | {
            "plan": plan_dict(activations.plan, activations.costs),
            "planning_seconds": planning,
            "pinned": True if activations.reload is None else activations.plan.host_bytes,
            "misses": activations.reload.num_misses if activations.reload else 0,
            "refused": activations.reload.num_refused if activations.reload else 0,
        }
    except (BudgetTooSmall, torch.OutOfMemoryError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    finally:
        activations.close()
        torch.cuda.set_per_process_memory_fraction(1.0)


def _set_mode(activations: Activations, mode: str) -> None:
    """Replaces the planner's choice where a mode asks for another."""
    assert activations.plan is not None
    number = len(activations.plan.layers)
    if mode in ("host-1", "host-2"):
        plans = [LayerPlan(places={Group.INPUT: Place.HOST})] * (number - 1) + [LayerPlan()]
        activations.use(plans, num_buffers=int(mode[-1]))
    elif mode == "plain":
        activations.use([LayerPlan()] * number, num_buffers=1)
        activations.outputs.skips_last = False
    elif mode == "whole":
        activations.use([LayerPlan(is_whole=True)] * number, num_buffers=1)


def _workload(trainer: SftTrainer, batch: dict) -> Workload:
    inputs = {key: value.to("cuda") for key, value in batch.items() if hasattr(value, "to")}

    def loss() -> torch.Tensor:
        with trainer.accelerator.autocast():
            return trainer._loss_sum(trainer.trained, inputs)[0]

    return Workload(forward=loss, loss=loss)


def _measure(trainer: SftTrainer, batches: list[dict], warmup: int) -> dict:
    times, peak = [], 0
    for number, batch in enumerate(batches):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        inputs = {key: value.to("cuda", non_blocking=True) for key, value in batch.items() if hasattr(value, "to")}
        with trainer.accelerator.autocast():
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=batch["num_supervised_tokens"])
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        torch.cuda.synchronize()
        if number >= warmup:
            times.append(1e3 * (time.perf_counter() - begun))
            peak = max(peak, torch.cuda.max_memory_allocated())
    return {
        "step_ms": {"median": statistics.median(times), "lowest": min(times), "highest": max(times)},
        "peak_memory_bytes": peak,
        "reserved_memory_bytes": torch.cuda.max_memory_reserved(),
    }


def _write(path: Path, record: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "environment"}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
