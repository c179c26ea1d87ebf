"""The table of what is trained, and the bytes that follow from it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from torch import nn

ADAPTER_TENSOR = re.compile(r"\.lora_[A-Za-z_]+(\.weight)?$")
LAYER_INDEX = re.compile(r"\.\d+(?=\.|$)")
ADAM_STATE_BYTES = 8
"""Two fp32 moments a weight, the most that the optimizers of the schema keep."""


@dataclass(frozen=True)
class TrainableGroup:
    """Trained tensors of one kind of module, over all layers."""

    name: str
    """The module's name with `*` for the layer's number, or the tensor's own where no adapter is."""
    num_tensors: int
    num_parameters: int
    dtype: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class TrainableTable:
    """What is trained, by group, beside the whole model."""

    groups: tuple[TrainableGroup, ...]
    num_trainable: int
    num_total: int
    trainable_bytes: int
    saved_bytes: int
    """Bytes of the trained weights in a file: PEFT writes a tied embedding at both of its ends."""

    @property
    def num_frozen(self) -> int:
        """Weights that stay as they are."""
        return self.num_total - self.num_trainable

    @property
    def num_base(self) -> int:
        """Weights of the base model: without the adapter, or all of them where there is none."""
        return self.num_frozen or self.num_total

    @property
    def share(self) -> float:
        """Trained weights over all weights, 0 to 1."""
        return self.num_trainable / self.num_total if self.num_total else 0.0

    @property
    def checkpoint_bytes(self) -> int:
        """Upper bound of one checkpoint: the trained weights and their optimizer state."""
        return self.saved_bytes + ADAM_STATE_BYTES * self.num_trainable


def trainable_table(model: nn.Module) -> TrainableTable:
    """Groups the parameters that require gradients. Quantized weights count as what they stand for."""
    tensors: dict[tuple[str, str], list[int]] = {}
    trainable = total = num_bytes = 0
    unique = dict(model.named_parameters())
    for name, parameter in unique.items():
        state = getattr(parameter, "quant_state", None)
        total += state.shape.numel() if state is not None else parameter.numel()
        if not parameter.requires_grad:
            continue
        key = (ADAPTER_TENSOR.sub("", layer_pattern(name)), str(parameter.dtype).removeprefix("torch."))
        tensors.setdefault(key, []).append(parameter.numel())
        trainable += parameter.numel()
        num_bytes += parameter.numel() * parameter.element_size()
    groups = tuple(TrainableGroup(name, len(sizes), sum(sizes), dtype) for (name, dtype), sizes in tensors.items())
    twice = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name not in unique and ".modules_to_save." in name
    )
    return TrainableTable(groups, trainable, total, num_bytes, num_bytes + twice)


def layer_pattern(name: str) -> str:
    """Returns a tensor's name with `*` for its layer and without PEFT's wrapping: `model.layers.*.mlp.up_proj`."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", "")
    plain = plain.replace(".modules_to_save", "").replace(".token_adapter.trainable_tokens_delta", " (new tokens)")
    return LAYER_INDEX.sub(".*", plain)
