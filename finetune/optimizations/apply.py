"""The one switchboard: everything that is done to a loaded model, in order, with one line of report for each flag."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from finetune.data.packed_metadata import build_packed_metadata
from finetune.errors import GateStopped
from finetune.model.load import vocabulary_rows
from finetune.optimizations.attention.backends import Backend
from finetune.optimizations.attention.choose import AttentionChoice
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.layers import packs_exactly
from finetune.optimizations.attention.probe import probe_backend, probed_documents
from finetune.optimizations.attention.types import AttentionLayer

DOCUMENTS_TOKENS = (96, 61)
"""Of the documents that are compared: packed under the backend, and each alone under transformers' own attention."""
STOCK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Median relative difference of the last hidden states, over all layers: rounding of the formats, which grows with the
layers. Tiny models of two layers differ by up to 1e-6, 0.002 and 0.02 of it."""

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


def apply_attention(
    model: PreTrainedModel, choice: AttentionChoice, *, dtype: torch.dtype, most_documents: int = 0
) -> Checked:
    """Checks the chosen backend on the model's kinds of layers and sets it.

    Args:
        model: the base model, on its device, loaded with `choice.stock`.
        dtype: format that attention computes in.
        most_documents: of a batch, pad tails included.

    Raises:
        GateStopped: the backend is wrong for a kind of layer.
    """
    if choice.backend is None:
        return Checked(None, f"{choice.stock}: transformers' own")
    try:
        faults = [
            fault
            for layer in choice.layers
            for documents in probed_documents(choice.backend, most_documents=most_documents)
            for fault in _layer_faults(choice.backend, layer, model, dtype, documents)
        ]
        difference = _difference_from_stock(model, choice)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _wrong(choice, f"it fails: {str(error).strip().splitlines()[0]}") from error
    if faults:
        raise _wrong(choice, "; ".join(faults))
    limit = STOCK_TOLERANCE.get(dtype, 0.1)
    if not difference <= limit:
        raise _wrong(choice, f"packed documents differ by {difference:.1e} from each alone under `{choice.stock}`")
    kinds = "; ".join(layer.label for layer in choice.layers)
    near = f"output and gradients are as near to fp32's as plain torch's, for {kinds}"
    same = f"packed documents differ from each alone under {choice.stock} by {difference:.1e}"
    return Checked(True, f"{choice.name}: {near}; {same}")


def _wrong(choice: AttentionChoice, what: str) -> GateStopped:
    return GateStopped(
        f"attention `{choice.name}` is wrong for this model on this device: {what}",
        place="model.attention",
        remedy="Set model.attention to another backend, such as varlen, sdpa or segments, or to eager.",
    )


def _layer_faults(
    backend: Backend, layer: AttentionLayer, model: PreTrainedModel, dtype: torch.dtype, documents: tuple[int, ...]
) -> list[str]:
    device = next(model.parameters()).device
    result = probe_backend(backend, layer, dtype=dtype, device=device, documents=documents)
    return [f"layers of {layer.label}, {len(documents)} documents: {fault}" for fault in result.faults]


@torch.no_grad()
def _difference_from_stock(model: PreTrainedModel, choice: AttentionChoice) -> float:
    """Sets the backend, and returns how far the last hidden states of packed documents are from those of each document
    alone under transformers' own attention: of each document the median over tokens of the difference's norm over the
    state's, and of these the largest. What a layer asks of attention and a backend does not hear (a chunk, a bias)
    shows here. A median, since in 16 bits a few tokens of an MoE may go to other experts."""
    assert choice.backend is not None
    register_backends()
    device = next(model.parameters()).device
    # A layer with a state carries it into the next document under any attention: it is trained unpacked only.
    documents = DOCUMENTS_TOKENS if packs_exactly(model).ok else DOCUMENTS_TOKENS[:1]
    slots = sum(documents)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary_rows(model), (1, slots), generator=generator).to(device)
    metadata = build_packed_metadata([documents], row_length=slots).to(device)
    arguments: dict[str, Any] = {"use_cache": False, "output_hidden_states": True}
    was_training = model.training
    model.eval()
    alone = [model(input_ids=part, **arguments).hidden_states[-1][0].float() for part in ids.split(documents, dim=1)]
    model.set_attn_implementation(choice.backend.registered)
    worst = []
    for is_cached in (True, False):
        argument = MetadataFeed(is_cached=is_cached).argument(metadata)
        packed = model(
            input_ids=ids, position_ids=metadata.position_ids, packed_metadata=argument, **arguments
        ).hidden_states[-1][0].float()  # fmt: skip
        for own, stock in zip(packed.split(documents), alone, strict=True):
            relative = (own - stock).norm(dim=-1) / stock.norm(dim=-1).clamp(min=1e-12)
            worst.append(relative.median())
    model.train(was_training)
    return torch.stack(worst).max().item()  # NaN where there is one
