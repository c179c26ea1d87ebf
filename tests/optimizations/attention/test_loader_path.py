"""Steps of the trainer's own loop: packing makes the host wait nowhere, from the loader to the last gradient.

On the GPU CUDA itself says so (`set_sync_debug_mode`); on the CPU the forward pass is watched for operations that would
wait on a GPU. Watched are the loader with its copies to the device, and the model from the embedding's output to the
final norm, forward, recompute and backward. The LM head of TRL, which picks the learned positions, is not packing's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import NoHostWait
from runs import build
from tiny import make_chat_file, make_model_folder, make_recipe

from finetune.trainer.sft import SftTrainer

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PLACES = [
    pytest.param("cpu", "sdpa", id="cpu-sdpa"),
    *[pytest.param("cuda", name, marks=ON_GPU, id=f"cuda-{name}") for name in ("varlen", "flash4", "flex", "sdpa")],
]


class CudaWatch:
    """Makes each host wait an error, in all threads, between `enter` and `leave`."""

    def enter(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def leave(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


class CpuWatch:
    """Looks at operations for ones that would wait. Autograd undoes modes set inside a backward pass: forward only."""

    def __init__(self) -> None:
        self._modes: list[NoHostWait] = []

    def enter(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._modes.append(NoHostWait())
            self._modes[-1].__enter__()

    def leave(self) -> None:
        if torch._C._current_graph_task_id() == -1 and self._modes:
            self._modes.pop().__exit__(None, None, None)


class Spans:
    """Enters the watch where a span begins and leaves it where it ends, from the second micro-batch on: the first
    compiles kernels and makes workspaces. Counts the spans that ended."""

    def __init__(self, device: str, model: Any) -> None:
        self.watch = CudaWatch() if device == "cuda" else CpuWatch()
        self.ended: dict[str, int] = {"loader": 0, "forward": 0, "backward": 0}
        self._batches = 0
        body = model.model
        body.embed_tokens.register_forward_hook(self._after_embedding)
        body.norm.register_forward_pre_hook(self._before_norm)

    @property
    def _is_warm(self) -> bool:
        return self._batches > 1

    def end(self, span: str) -> None:
        if self._is_warm:
            self.watch.leave()
            self.ended[span] += 1

    def begin(self) -> None:
        if self._is_warm:
            self.watch.enter()

    def _after_embedding(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self._batches += 1
        output.register_hook(lambda grad: self.end("backward"))
        self.begin()

    def _before_norm(self, module: Any, args: tuple[torch.Tensor]) -> None:
        self.end("forward")
        args[0].register_hook(lambda grad: self.begin())


class WatchedIterator:
    """The loader's iterator under the watch."""

    def __init__(self, batches: Iterator[Any], spans: Spans) -> None:
        self._batches, self._spans = batches, spans

    def __next__(self) -> Any:
        self._spans.begin()
        try:
            return next(self._batches)
        finally:
            self._spans.end("loader")


def watched_trainer(tmp_path: Path, device: str, attention: str, **changes: Any) -> tuple[SftTrainer, Spans]:
    folder = make_model_folder(tmp_path / "model", "qwen3_window", head_dim=64)
    made = make_recipe(folder, make_chat_file(tmp_path / "train.jsonl"), tmp_path / "run", adapter={"type": "none"})
    dtype = "fp32" if device == "cpu" else "bf16"
    made["model"] |= {"device": device, "dtype": dtype, "attention": attention}
    made["data"] |= {"max_length": 128}
    made["training"] |= {"rows_per_step": 4, "rows_per_micro_batch": 2, "max_steps": 3} | changes.pop("training", {})
    trainer, _ = build(made | changes)
    spans = Spans(device, trainer.model)
    plain_samples, plain_loss = trainer.get_batch_samples, trainer.compute_loss

    def get_batch_samples(iterator: Any, *args: Any) -> Any:
        return plain_samples(WatchedIterator(iterator, spans), *args)

    def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Any:
        assert {inputs[key].device.type for key in ("input_ids", "labels")} == {device}
        assert inputs["packed_metadata"].buffer.device.type == device
        assert inputs["packed_metadata"].num_rows == 2
        return plain_loss(model, inputs, *args, **more)

    trainer.get_batch_samples, trainer.compute_loss = get_batch_samples, compute_loss  # type: ignore[method-assign]
    return trainer, spans


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recompute", "kept"])
@pytest.mark.parametrize(("device", "attention"), PLACES)
def test_no_step_waits_for_the_device(tmp_path: Path, device: str, attention: str, checkpointing: bool) -> None:
    trainer, spans = watched_trainer(tmp_path, device, attention, training={"gradient_checkpointing": checkpointing})
    try:
        trainer.train()
    finally:
        spans.watch.leave()
    assert spans.ended["forward"] == spans.ended["backward"] == 2 * 3 - 1  # micro-batches but the first
    assert spans.ended["loader"] >= 2 * 2
    assert trainer.metadata_feed is not None and trainer.metadata_feed.num_builds == 2 * 3


@pytest.mark.parametrize(
    ("device", "attention"),
    [pytest.param("cpu", "sdpa", id="cpu-sdpa"), pytest.param("cuda", "varlen", marks=ON_GPU, id="cuda-varlen")],
)
def test_the_watch_hears_the_waits_of_rebuilding(tmp_path: Path, device: str, attention: str) -> None:
    trainer, spans = watched_trainer(tmp_path, device, attention, optimizations={"packed_metadata_cache": False})
    try:
        with pytest.raises((RuntimeError, AssertionError), match=r"waits for the device|synchronizing"):
            trainer.train()
    finally:
        spans.watch.leave()
