"""Times a packed step with the metadata cache on and off, on each attention backend, in one process.

    python docs/benchmarks/packed_metadata.py MODEL_FOLDER --rows 4096:400,16384:400 --nf4 --out FILE.jsonl
    python docs/benchmarks/packed_metadata.py MODEL_FOLDER --cases 4096:400:varlen,4096:400:stock --out FILE.jsonl

One JSON line a case: forward, backward and step in milliseconds (median, lowest, highest of `--steps` after
`--warmup`), peak memory, builds of boundaries in a step. Which of a pair goes first alternates: on, off, off, on. The
weights are random, drawn on the device; documents have geometric lengths with the stated mean, the same for every case
of a row length. `stock` is TRL's own trainer on the same model and documents, with its packing and transformers' SDPA;
it comes last, since it adds its own LM head to the model. After `--seconds` no further case is begun; those left out
are named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from transformers import TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

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

STOCK = "stock"
FULL = 0.9
"""Share of a row's slots that TRL must have filled for its step to count; its rows have no pad tail."""
MOST_IDS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json and tokenizer")
    parser.add_argument("--rows", default="", help="SLOTS:MEAN_DOCUMENT_TOKENS, separated by commas")
    parser.add_argument("--backends", default="varlen,flash4,sdpa", help=f"of every row; `{STOCK}` is TRL's own")
    parser.add_argument("--cases", default="", help="SLOTS:MEAN:BACKEND, separated by commas, beside those of --rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cases = _cases(options)
    if not cases:
        parser.error("name --rows or --cases")
    ends = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        trainer, prepared, base = _build(options, Path(scratch))
        setting = {
            "nf4": options.nf4, "rank": options.rank, "targets": options.targets, "environment": collect_environment(),
        }  # fmt: skip
        for slots, mean, name in cases:
            case = {
                "model": Path(options.model).name, "slots": slots, "mean_document_tokens": mean, "attention": name,
            }  # fmt: skip
            if time.monotonic() > ends:
                _write(options.out, case | {"left_out": f"not begun in {options.seconds:g} seconds"})
                continue
            if name == STOCK:
                base.set_attn_implementation("sdpa")
                _write(options.out, case | _stock(trainer, options, slots, mean, Path(scratch)) | setting)
                continue
            backend, layers = BACKENDS[name], prepared.attention.layers
            hardware = probe_hardware(prepared.model.device)
            support = backend.supported(hardware, prepared.model.dtype, layers, row_length=slots)
            if not support.ok:
                _write(options.out, case | {"left_out": support.reason})
                continue
            base.set_attn_implementation(prepared.attention.stock)  # what the check compares with
            apply_attention(
                base,
                dataclasses.replace(prepared.attention, backend=backend),
                dtype=prepared.model.dtype,
                most_documents=slots // mean,
            )
            for result in _pair(trainer, options, slots, mean):
                _write(options.out, case | result | setting)


def _cases(options: argparse.Namespace) -> list[tuple[int, int, str]]:
    """Row length, mean tokens of a document, backend; those of TRL last."""
    wanted = [f"{row}:{name}" for row in options.rows.split(",") if row for name in options.backends.split(",")]
    wanted += [case for case in options.cases.split(",") if case]
    parts = [case.split(":") for case in dict.fromkeys(wanted)]
    return sorted(((int(slots), int(mean), name) for slots, mean, name in parts), key=lambda case: case[2] == STOCK)


def _build(options: argparse.Namespace, scratch: Path):
    data = scratch / "data.jsonl"
    data.write_text('{"text": "one two three four"}\n' * 2)
    recipe = Recipe.model_validate(
        {
            "model": {
                "path": str(Path(options.model).resolve()), "init": "random",
                "dtype": "bf16" if torch.cuda.is_available() else "fp32",
                "quantization": "nf4" if options.nf4 else "none", "attention": "auto",
            },
            "adapter": {"rank": options.rank, "targets": options.targets},
            "data": {"train": [{"path": str(data)}], "max_length": 64, "cache": False},
            "training": {"rows_per_step": 1, "optimizer": _optimizer(), "router_aux_loss": 0.0},
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


def _optimizer() -> str:
    return "adamw_8bit" if torch.cuda.is_available() else "adamw"


def _pair(trainer: SftTrainer, options: argparse.Namespace, slots: int, mean: int) -> list[dict[str, object]]:
    feeds = {state: MetadataFeed(is_cached=state == "on") for state in ("on", "off")}
    times: dict[str, list[tuple[float, float, float]]] = {state: [] for state in feeds}
    builds, peaks = dict.fromkeys(feeds, 0), dict.fromkeys(feeds, 0)
    generator = np.random.default_rng(0)
    for step in range(options.warmup + options.steps):
        batch = _batch(slots, mean, generator, trainer.model.config.get_text_config().vocab_size)
        for state in ("on", "off") if step % 2 == 0 else ("off", "on"):
            trainer.metadata_feed = feed = feeds[state]
            _reset_peak()
            before = feed.num_builds
            measured = _step(trainer, batch)
            if step >= options.warmup:
                times[state].append(measured)
                builds[state], peaks[state] = feed.num_builds - before, _peak()
    return [
        {
            "packed_metadata_cache": state,
            **_spreads(times[state]),
            "metadata_builds": builds[state],
            "peak_memory_bytes": peaks[state],
            "documents": len(batch["packed_metadata"].lengths),
        }
        for state in feeds
    ]


def _step(trainer: SftTrainer, batch: dict) -> tuple[float, float, float]:
    """Forward, backward and whole step in milliseconds; the batch crosses to the device inside the step."""
    device = trainer.args.device
    marks = [_mark()]
    inputs = {key: value.to(device, non_blocking=True) for key, value in batch.items() if hasattr(value, "to")}
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=batch["num_supervised_tokens"])
    marks.append(_mark(waits=False))
    loss.backward()
    marks.append(_mark(waits=False))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    marks.append(_mark(waits=False))
    return _milliseconds(marks)


class _StockTrainer(SFTTrainer):
    """TRL's trainer with marks at the begin and end of forward and backward."""

    marks: ClassVar[list[Any]] = []
    slots: ClassVar[int] = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        _StockTrainer.slots = inputs["input_ids"].numel()
        loss = super().compute_loss(model, inputs, *args, **more)
        self.marks.append(_mark(waits=False))
        return loss

    def training_step(self, *args: Any, **more: Any) -> Any:
        loss = super().training_step(*args, **more)
        self.marks.append(_mark(waits=False))
        return loss


class _Clock(TrainerCallback):
    """Takes the time of each step of TRL's trainer, and the slots of its row."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float, float]] = []
        self.slots: list[int] = []

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        _StockTrainer.marks = [_mark()]

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.times.append(_milliseconds([*_StockTrainer.marks, _mark(waits=False)]))
        self.slots.append(_StockTrainer.slots)


def _stock(trainer: SftTrainer, options: argparse.Namespace, slots: int, mean: int, scratch: Path) -> dict[str, object]:
    """Times TRL's own trainer: the same model, adapters and documents, its packing, its loader, its collator."""
    generator = np.random.default_rng(0)
    vocabulary = trainer.model.config.get_text_config().vocab_size
    documents = []
    for _ in range(options.warmup + options.steps + 1):  # one more, since TRL may fill rows better
        for length in _lengths(slots, mean, generator):
            documents.append(generator.integers(0, min(vocabulary, MOST_IDS), length).tolist())
    clock, on_cuda = _Clock(), torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(scratch / "stock"), max_steps=options.warmup + options.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=1, packing=True, max_length=slots, gradient_checkpointing=True,
        optim="adamw_bnb_8bit" if on_cuda else "adamw_torch", bf16=on_cuda, use_cpu=not on_cuda, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    stock = _StockTrainer(
        model=trainer.model, args=arguments, train_dataset=datasets.Dataset.from_dict({"input_ids": documents}),
        processing_class=trainer.processing_class, callbacks=[clock],
    )  # fmt: skip
    _reset_peak()
    stock.train()
    # The last row of a packing may be next to empty.
    steps = list(zip(clock.times, clock.slots, strict=True))[options.warmup :]
    full = [times for times, filled in steps if filled >= FULL * slots]
    return {
        "packed_metadata_cache": "trl",
        **_spreads(full),
        "steps": len(full),
        "peak_memory_bytes": _peak(),
    }


def _mark(*, waits: bool = True) -> Any:
    """A point in time, on the device where there is one; the first of a step waits until the device is idle."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    if waits:
        torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(marks: list[Any]) -> tuple[float, float, float]:
    """Forward, backward, and all between the first mark and the last."""
    begin, forward, backward, end = marks
    if not torch.cuda.is_available():
        return (forward - begin) * 1000, (backward - forward) * 1000, (end - begin) * 1000
    torch.cuda.synchronize()
    return begin.elapsed_time(forward), forward.elapsed_time(backward), begin.elapsed_time(end)


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _lengths(slots: int, mean: int, generator: np.random.Generator) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < slots:
        lengths.append(min(int(generator.geometric(1 / mean)) + 1, slots - sum(lengths)))
    return lengths


def _batch(slots: int, mean: int, generator: np.random.Generator, vocabulary: int) -> dict:
    lengths = _lengths(slots, mean, generator)
    ids = generator.integers(0, min(vocabulary, MOST_IDS), slots).astype(np.int32)
    row = RowTokens(row=0, input_ids=ids, labels=ids.copy(), lengths=np.array(lengths))
    batch = dict(RowCollator(row_length=slots, pad_token_id=0)([row]))
    if not torch.cuda.is_available():
        return batch
    return {key: value.pin_memory() if hasattr(value, "pin_memory") else value for key, value in batch.items()}


def _spreads(times: list[tuple[float, float, float]]) -> dict[str, object]:
    parts = zip(("forward_ms", "backward_ms", "step_ms"), zip(*times, strict=True), strict=True)
    return {part: _spread(list(values)) for part, values in parts}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _write(path: Path, record: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "environment"}), flush=True)


if __name__ == "__main__":
    main()
