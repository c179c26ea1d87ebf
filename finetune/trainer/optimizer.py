"""LoRA+: the B matrices of the adapters learn faster than the A matrices."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from torch import nn


def create_loraplus(
    model: nn.Module, kind: type[torch.optim.Optimizer], options: dict[str, Any], *, ratio: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Returns an optimizer of `kind` with PEFT's groups: A matrices, and B matrices at `ratio` times the rate.

    Args:
        options: what transformers would make the optimizer with, `lr` among it.
    """
    assert isinstance(model, PeftModel)
    options = dict(options)
    optimizer = create_loraplus_optimizer(
        model, kind, lr=options.pop("lr"), loraplus_lr_ratio=ratio, loraplus_weight_decay=weight_decay, **options
    )
    # PEFT makes groups for embeddings and biases too; an empty one only adds to what a checkpoint has to match.
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return optimizer
