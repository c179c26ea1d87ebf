"""A plain training loop without TRL, PEFT's trainer or transformers' trainer: the reference for losses and gradients.

It runs each document alone under transformers' own attention, builds full logits, loops over micro-batches, divides by
the supervised tokens of the window (or the sum of their weights), clips, steps AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn


@dataclass
class Trace:
    """What each step saw: its loss and the gradient's norm before clipping."""

    losses: list[float]
    grad_norms: list[float]


def cosine_with_warmup(step: int, *, total: int, warmup: int) -> float:
    """The factor of the learning rate at a step, from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def train_plainly(
    model: nn.Module,
    windows: Sequence[Sequence[dict]],
    *,
    learning_rate: float,
    total_steps: int,
    warmup: int = 0,
    max_grad_norm: float = 1.0,
) -> Trace:
    """Trains on windows of micro-batches: `input_ids`, `labels`, maybe `loss_weights`, all `[R, L]`, and
    `packed_metadata`."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    trace = Trace([], [])
    model.train()
    for step, window in enumerate(windows[:total_steps]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * cosine_with_warmup(step, total=total_steps, warmup=warmup)
        divisor = sum(float(_weights(batch).sum()) for batch in window)
        step_loss = 0.0
        for batch in window:
            loss = torch.stack([_document_loss(model, *document) for document in _documents(batch)]).sum()
            loss = loss / divisor
            loss.backward()
            step_loss += loss.item()
        norm = nn.utils.clip_grad_norm_(trained, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(step_loss)
        trace.grad_norms.append(float(norm))
    return trace


def _weights(batch: dict) -> torch.Tensor:
    """The weight of each label, 0 where nothing is learned; `[R, L]`."""
    is_learned = (batch["labels"] != -100).float()
    return is_learned * batch["loss_weights"] if "loss_weights" in batch else is_learned


def _documents(batch: dict) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The ids, labels and weights of each document that has a label, `[1, T]`."""
    lengths = list(batch["packed_metadata"].lengths)
    tensors = (batch["input_ids"], batch["labels"], _weights(batch))
    for ids, labels, weights in zip(*(tensor.flatten().split(lengths) for tensor in tensors), strict=True):
        if (labels != -100).any():
            yield ids[None], labels[None], weights[None]


def _document_loss(
    model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits
    losses = nn.functional.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="none")
    return (weights[0, 1:] * losses).sum()
