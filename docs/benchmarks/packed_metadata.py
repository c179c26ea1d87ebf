"""Times a packed step with the metadata cache on and off, on each attention backend, in one process and one order.

    python docs/benchmarks/packed_metadata.py MODEL_FOLDER --rows 4096:400,16384:400 --nf4 --out FILE.jsonl

One JSON line a case: forward, backward and step in milliseconds (median, lowest, highest of `--steps` after
`--warmup`), peak memory, builds of boundaries in a step. Pairs are interleaved: on, off, on, off. The weights are
random, drawn on the device; documents have geometric lengths with the stated mean, the same for every case of a row
length.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from finetune.data.collate import RowCollator
from finetune.data.rows import RowTokens
from finetune.optimizations.apply import apply_attention
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.optimizations.support import probe_hardware
from finetune.recipe.schema import Recipe
from finetune.run.environment import collect_environment
from finetune.run.folder import RunFolder
from finetune.trainer.build import build_model, build_trainer
from finetune.trainer.ending import Ending
from finetune.trainer.prepare import prepare
from finetune.trainer.sft import SftTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json and tokenizer")
    parser.add_argument("--rows", required=True, help="SLOTS:MEAN_DOCUMENT_TOKENS, separated by commas")
    parser.add_argument("--backends", default="varlen,flash4,sdpa")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trainer, prepared, base = _build(options, Path(scratch))
        environment = collect_environment()
        for row in options.rows.split(","):
            slots, mean = map(int, row.split(":"))
            for name in options.backends.split(","):
                backend = BACKENDS[name]
                layers = prepared.attention.layers
                support = backend.supported(probe_hardware(prepared.model.device), prepared.model.dtype, layers)
                case = {
                    "model": Path(options.model).name,
                    "slots": slots,
                    "mean_document_tokens": mean,
                    "attention": name,
                }
                if not support.ok:
                    _write(options.out, case | {"left_out": support.reason})
                    continue
                choice = dataclasses.replace(prepared.attention, backend=backend)
                apply_attention(base, choice, dtype=prepared.model.dtype)
                for result in _pair(trainer, options, slots, mean):
                    _write(
                        options.out,
                        case
                        | result
                        | {"nf4": options.nf4, "rank": options.rank}
                        | {"targets": options.targets, "environment": environment},
                    )


def _build(options: argparse.Namespace, scratch: Path):
    data = scratch / "data.jsonl"
    data.write_text('{"text": "one two three four"}\n' * 2)
    recipe = Recipe.model_validate(
        {
            "model": {
                "path": str(Path(options.model).resolve()), "init": "random", "dtype": "bf16",
                "quantization": "nf4" if options.nf4 else "none", "attention": "auto",
            },
            "adapter": {"rank": options.rank, "targets": options.targets},
            "data": {"train": [{"path": str(data)}], "max_length": 64, "cache": False},
            "training": {"rows_per_step": 1, "optimizer": "adamw_8bit", "router_aux_loss": 0.0},
            "evaluation": {"samples": 0},
            "output": {"dir": str(scratch / "run")},
        }
    )  # fmt: skip
    prepared = prepare(recipe, say=print)
    model = build_model(recipe, prepared, say=print, ending=Ending(0.0))
    run = RunFolder(scratch / "run")
    run.path.mkdir()
    trainer = build_trainer(recipe, prepared, model=model, run=run, callbacks=[])
    trainer.train()  # one step: gradient checkpointing, the optimizer and its state are there afterwards
    return trainer, prepared, model.get_base_model()


def _pair(trainer: SftTrainer, options: argparse.Namespace, slots: int, mean: int) -> list[dict[str, object]]:
    feeds = {state: MetadataFeed(is_cached=state == "on") for state in ("on", "off")}
    times: dict[str, list[tuple[float, float, float]]] = {state: [] for state in feeds}
    builds, peaks = dict.fromkeys(feeds, 0), dict.fromkeys(feeds, 0)
    generator = np.random.default_rng(0)
    for step in range(options.warmup + options.steps):
        batch = _batch(slots, mean, generator, trainer.model.config.get_text_config().vocab_size)
        for state, feed in feeds.items():
            trainer.metadata_feed = feed
            torch.cuda.reset_peak_memory_stats()
            before = feed.num_builds
            measured = _step(trainer, batch)
            if step >= options.warmup:
                times[state].append(measured)
                builds[state], peaks[state] = feed.num_builds - before, torch.cuda.max_memory_allocated()
    return [
        {
            "packed_metadata_cache": state,
            **{
                f"{part}_ms": _spread([one[index] for one in times[state]])
                for index, part in enumerate(("forward", "backward", "step"))
            },
            "metadata_builds": builds[state],
            "peak_memory_bytes": peaks[state],
            "documents": len(batch["packed_metadata"].lengths),
        }
        for state in feeds
    ]


def _step(trainer: SftTrainer, batch: dict) -> tuple[float, float, float]:
    """Forward, backward and whole step in milliseconds; the batch crosses to the device inside the step."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    marks[0].record()
    inputs = {key: value.to("cuda", non_blocking=True) for key, value in batch.items() if hasattr(value, "to")}
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=batch["num_supervised_tokens"])
    marks[1].record()
    loss.backward()
    marks[2].record()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    marks[3].record()
    torch.cuda.synchronize()
    first, second, _ = (marks[i].elapsed_time(marks[i + 1]) for i in range(3))
    return first, second, marks[0].elapsed_time(marks[3])


def _batch(slots: int, mean: int, generator: np.random.Generator, vocabulary: int) -> dict:
    lengths: list[int] = []
    while sum(lengths) < slots:
        lengths.append(min(int(generator.geometric(1 / mean)) + 1, slots - sum(lengths)))
    ids = generator.integers(0, min(vocabulary, 100_000), slots).astype(np.int32)
    row = RowTokens(row=0, input_ids=ids, labels=ids.copy(), lengths=np.array(lengths))
    batch = dict(RowCollator(row_length=slots, pad_token_id=0)([row]))
    return {key: value.pin_memory() if hasattr(value, "pin_memory") else value for key, value in batch.items()}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _write(path: Path, record: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "environment"}), flush=True)


if __name__ == "__main__":
    main()
