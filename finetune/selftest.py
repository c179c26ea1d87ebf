"""`finetune selftest`: on the user's own device, packed rows give what separate documents give, on every backend.

For tiny models of each kind of attention it compares loss and gradients of a packed row with those of its documents
alone, changes one document and looks at its neighbours, and compares the metadata cache on with off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.data.packed_metadata import PackedMetadata, build_packed_metadata
from finetune.model.config import choose_device
from finetune.optimizations.attention.backends import BACKENDS, Backend
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.optimizations.attention.interface import register_backends
from finetune.optimizations.attention.layers import attention_layers
from finetune.optimizations.support import probe_hardware

LENGTHS = (37, 70, 1, 101)
"""Tokens of the documents, of which none is a multiple of a tile."""
ROW_LENGTH = 224
VOCABULARY = 256
MARGIN = 4.0
"""How many times the rounding of the format a relative difference may be, over all layers of the tiny model."""
_SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("qwen3", {}),
    "sliding window": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "sinks and window": (
        "gpt_oss",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 2,  # every token goes to every expert: rounding cannot change the routing
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@dataclass(frozen=True)
class SelftestResult:
    """One backend on one kind of model."""

    backend: str
    model: str
    dtype: str
    status: str
    """`ok`, `wrong`, or `not here`."""
    detail: str
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_selftest(*, say: Callable[[SelftestResult], None]) -> tuple[str, list[SelftestResult]]:
    """Tries every backend on every kind of model, on the CUDA device where there is one.

    Args:
        say: hears each result when it is there.

    Returns:
        The device's name, and all results.
    """
    device = choose_device("auto")
    register_backends()
    transformers.logging.set_verbosity_error()  # advice about rotary settings, which tiny models need not follow
    results = []
    for backend in BACKENDS.values():
        for result in _results(backend, device):
            say(result)
            results.append(result)
    return str(device), results


def _results(backend: Backend, device: torch.device) -> Iterator[SelftestResult]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shown = str(dtype).removeprefix("torch.")
    reasons: dict[str, list[str]] = {}
    for name in MODELS:
        began = time.perf_counter()
        model = _make_model(name, device, dtype)
        support = backend.supported(probe_hardware(device), dtype, attention_layers(model))
        if not support.ok:
            reasons.setdefault(support.reason, []).append(name)
            continue
        faults = _faults(model, backend, device, dtype)
        status = "wrong" if faults else "ok"
        detail = "; ".join(faults) or "packed = separate, neighbours unseen, cache on = off"
        yield SelftestResult(backend.name, name, shown, status, detail, time.perf_counter() - began)
    for reason, names in reasons.items():
        which = "every model" if len(names) == len(MODELS) else ", ".join(names)
        yield SelftestResult(backend.name, which, shown, "not here", reason)


def _make_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    architecture, changes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(_SMALL | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    return model.to(device).eval()


def _faults(model: PreTrainedModel, backend: Backend, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Returns what is wrong, in words."""
    ids = torch.randint(2, VOCABULARY, (1, ROW_LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    metadata = build_packed_metadata([LENGTHS], row_length=ROW_LENGTH).to(device)
    limit = MARGIN * max(1e-5, torch.finfo(dtype).eps)
    model.set_attn_implementation("eager")
    alone, alone_gradients = _loss_and_gradients(model, _separate_logits(model, ids), ids)
    model.set_attn_implementation(backend.registered)
    logits = _packed_logits(model, ids, metadata, is_cached=True)
    packed, gradients = _loss_and_gradients(model, logits, ids)
    differences = {"the loss": _difference(packed, alone)}
    for part, (found, true) in _by_kind(gradients, alone_gradients).items():
        differences[f"the gradients of {part}"] = _difference(found, true)
    faults = [
        f"{what} of packed and separate documents differ by {value:.1e} (limit {limit:.1e})"
        for what, value in differences.items()
        if not value <= limit
    ]
    return faults + _neighbour_faults(model, ids, metadata, logits, limit)


def _neighbour_faults(
    model: PreTrainedModel, ids: torch.Tensor, metadata: PackedMetadata, logits: torch.Tensor, limit: float
) -> list[str]:
    faults = []
    changed = ids.clone()
    changed[0, : LENGTHS[0]] = (changed[0, : LENGTHS[0]] + 7) % VOCABULARY
    others = slice(LENGTHS[0], sum(LENGTHS))
    after = _packed_logits(model, changed, metadata, is_cached=True)
    if not (seen := _difference(after[others], logits[others])) <= limit:
        faults.append(f"a document changes by {seen:.1e} when its neighbour does (limit {limit:.1e})")
    rebuilt = _packed_logits(model, ids, metadata, is_cached=False)[: sum(LENGTHS)]
    if not (off := _difference(rebuilt, logits[: sum(LENGTHS)])) <= limit:
        faults.append(f"logits with the metadata cache off differ by {off:.1e} from those with it (limit {limit:.1e})")
    return faults


def _packed_logits(
    model: PreTrainedModel, ids: torch.Tensor, metadata: PackedMetadata, *, is_cached: bool
) -> torch.Tensor:
    argument = MetadataFeed(is_cached=is_cached).argument(metadata)
    return model(
        input_ids=ids, position_ids=metadata.position_ids, packed_metadata=argument, use_cache=False
    ).logits[0]  # fmt: skip


def _separate_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    documents = ids[0, : sum(LENGTHS)].split(LENGTHS)
    return torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in documents])


def _loss_and_gradients(
    model: PreTrainedModel, logits: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean cross entropy of a fixed next id for every slot, and its gradients."""
    model.zero_grad()
    wanted = ids[0].roll(-1)[: sum(LENGTHS)]
    loss = torch.nn.functional.cross_entropy(logits[: sum(LENGTHS)].float(), wanted)
    loss.backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _by_kind(
    found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Groups gradients by the last parts of their names, such as `q_proj.weight`, over the layers."""
    names: dict[str, list[str]] = {}
    for name in true:
        names.setdefault(".".join(name.split(".")[-2:]), []).append(name)
    return {
        kind: tuple(torch.cat([grads[name].flatten() for name in group]) for grads in (found, true))  # type: ignore[misc]
        for kind, group in names.items()
    }


def _difference(found: torch.Tensor, true: torch.Tensor) -> float:
    """Norm of the difference over that of the truth."""
    return ((found.float() - true.float()).norm() / true.float().norm().clamp(min=1e-12)).item()
