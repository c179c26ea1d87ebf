"""LoRA+: the B matrices of the adapters learn faster than everything else that is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def apply_loraplus(optimizer: torch.optim.Optimizer, model: nn.Module, *, ratio: float) -> None:
    """Splits each group of a new optimizer in two: the B matrices at `ratio` times its rate, all else at the rate.

    PEFT's `create_loraplus_optimizer` (0.21) takes every trained vector for a B matrix, so that saved norms and the
    magnitudes of DoRA would learn at the ratio too; here the name decides.

    Args:
        optimizer: without state yet, as no step was made with it.
    """
    of_b = {id(parameter) for name, parameter in model.named_parameters() if "lora_B" in name.split(".")}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for is_b, factor in ((False, 1.0), (True, ratio)):
            parameters = [parameter for parameter in group["params"] if (id(parameter) in of_b) == is_b]
            if parameters:  # an empty group only adds to what a checkpoint has to match
                groups.append({**group, "params": parameters, "lr": factor * group["lr"]})
    optimizer.param_groups = groups
