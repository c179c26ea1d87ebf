"""Tiny models with an adapter, their layers under a plan, and one step of them: what the tests of activations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from finetune.data.packed_metadata import build_packed_metadata
from finetune.optimizations.activations.checkpoint import Checkpointing
from finetune.optimizations.activations.copies import Copies, copies_for
from finetune.optimizations.activations.host_memory import allocate_pool
from finetune.optimizations.activations.reload import Reload
from finetune.optimizations.activations.stored_outputs import StoredOutputs
from finetune.optimizations.activations.types import Group, LayerPlan, Place
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.interface import register_backends

SLOT_BYTES = 2**20
KEPT = LayerPlan()
ON_HOST = LayerPlan(places={Group.INPUT: Place.HOST})
WHOLE = LayerPlan(is_whole=True)


def plan_of(place: Place, *groups: Group) -> LayerPlan:
    """The input and these groups, all in one place."""
    return LayerPlan(places=dict.fromkeys((Group.INPUT, *groups), place))


@dataclass
class TinyModel:
    """A model of four layers with LoRA, in training mode."""

    kind: str
    model: nn.Module
    layers: list[nn.Module]
    device: torch.device
    outputs: StoredOutputs
    checkpointing: Checkpointing
    reload: Reload | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def install(
        self,
        plans: Sequence[LayerPlan],
        *,
        num_buffers: int = 2,
        slot_bytes: int = SLOT_BYTES,
        copies: Copies | None = None,
    ) -> Reload:
        pool = allocate_pool(slot_bytes * len(plans), device=self.device)
        self.reload = Reload(
            pool,
            [slot_bytes] * len(plans),
            num_buffers=num_buffers,
            copies=copies or copies_for(self.device),
            device=self.device,
        )
        self.checkpointing.install(plans, self.reload)
        return self.reload

    def attend_with(self, backend: str, *, lengths: Sequence[Sequence[int]]) -> None:
        """Takes one of our attention backends; rows are of these documents."""
        register_backends()
        base: Any = self.model.get_base_model()  # pyright: ignore[reportCallIssue]
        base.set_attn_implementation(BACKENDS[backend].registered)
        metadata = build_packed_metadata(lengths, row_length=sum(lengths[0])).to(self.device)
        self.extra |= {"packed_metadata": metadata, "position_ids": metadata.position_ids}

    def loss(self, *, length: int = 37, seed: int = 0) -> torch.Tensor:
        ids = torch.randint(0, 250, (2, length), generator=torch.Generator().manual_seed(seed)).to(self.device)
        return self.model(input_ids=ids, labels=ids, use_cache=False, **self.extra).loss

    def step(self, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and every gradient of one forward and backward."""
        self.model.zero_grad()
        loss = self.loss(**kwargs)
        loss.backward()
        return loss.detach(), self.grads()

    def grads(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def leased(self) -> list[int]:
        """Layers whose slot is some graph's."""
        assert self.reload is not None
        return [slot.layer for slot in self.reload._slots if slot.is_leased]


def tiny_model(
    kind: str,
    *,
    targets: Any = "all-linear",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    dropout: float = 0.0,
    **changes: Any,
) -> TinyModel:
    """Builds one, on its device; the same weights every time."""
    from peft import LoraConfig, get_peft_model
    from tiny import make_config
    from transformers import AutoModelForCausalLM

    if kind == "gpt_oss":
        changes = {"layer_types": ["sliding_attention", "full_attention"] * 2} | changes
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(make_config(kind, **({"num_hidden_layers": 4} | changes)), dtype=dtype)
    base = base.to(device)
    if prepare is not None:
        base = prepare(base)
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, init_lora_weights=False)
    model = get_peft_model(base, config).train()
    layers = list(model.get_base_model().model.layers)
    place = torch.device(device)
    return TinyModel(
        kind,
        model,
        layers,
        place,
        StoredOutputs(layers),
        Checkpointing(layers, device=place),
        extra={"output_router_logits": True} if kind in ("qwen3_moe", "gpt_oss") else {},
    )
