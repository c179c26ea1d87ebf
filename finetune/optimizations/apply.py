"""The one switchboard: everything that is done to a loaded model, in order, with one line of report for each flag."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from finetune.errors import GateStopped
from finetune.optimizations.attention.choose import AttentionChoice
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.probe import probe_backend

State = Literal["on", "off", "not applicable"]


@dataclass(frozen=True)
class Applied:
    """What became of one flag."""

    flag: str
    state: State
    reason: str

    def is_on(self, flag: str) -> bool:
        """Says whether this is the line of `flag`, and it is on."""
        return self.flag == flag and self.state == "on"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def plan_metadata_cache(flag: bool | Literal["auto"], choice: AttentionChoice) -> Applied:
    """Says whether the boundaries of a batch are cached; it works with every backend, and costs nothing."""
    name = "packed_metadata_cache"
    if choice.backend is None:
        return Applied(name, "not applicable", f"{choice.stock} is transformers' own attention, with its own masks")
    if flag is False:
        return Applied(name, "off", "the recipe says so: each layer rebuilds its boundaries from the positions")
    return Applied(name, "on", f"boundaries are built once a batch, on the host, for attention `{choice.name}`")


@dataclass(frozen=True)
class Checked:
    """What the check at load found; `ok` is None where there was nothing of ours to check."""

    ok: bool | None
    reason: str


def apply_attention(model: PreTrainedModel, choice: AttentionChoice, *, dtype: torch.dtype) -> Checked:
    """Checks the chosen backend on the model's kinds of layers and sets it.

    Args:
        model: the base model, on its device, loaded with `choice.stock`.
        dtype: format that attention computes in.

    Raises:
        GateStopped: the backend is wrong for a kind of layer.
    """
    if choice.backend is None:
        return Checked(None, f"{choice.stock}: transformers' own")
    device = next(model.parameters()).device
    for layer in choice.layers:
        result = probe_backend(choice.backend, layer, dtype=dtype, device=device)
        if result.faults:
            raise GateStopped(
                f"attention `{choice.name}` is wrong on this device for layers of {layer.label}: "
                + "; ".join(result.faults),
                place="model.attention",
                remedy="Set model.attention to another backend, such as varlen, sdpa or segments.",
            )
    register_backends()
    model.set_attn_implementation(choice.backend.registered)
    kinds = "; ".join(layer.label for layer in choice.layers)
    return Checked(True, f"{choice.name}: output and gradients are as near to fp32's as plain torch's, for {kinds}")
