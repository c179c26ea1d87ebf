"""The activations of one model in training: measured, planned, put into effect, and planned again when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from finetune.optimizations.activations.assess import assess_plan
from finetune.optimizations.activations.capacity import HOST_SHARE, device_capacity, fixed_bytes
from finetune.optimizations.activations.checkpoint import Checkpointing
from finetune.optimizations.activations.copies import copies_for
from finetune.optimizations.activations.head import measure_head
from finetune.optimizations.activations.host_memory import allocate_pool, available_host_bytes
from finetune.optimizations.activations.measure import LayerMeter, capture_calls, kinds_of, measure_link
from finetune.optimizations.activations.planner import plan_activations, tighter
from finetune.optimizations.activations.reload import Reload, padded
from finetune.optimizations.activations.skipping import check_skipping
from finetune.optimizations.activations.stored_outputs import StoredOutputs
from finetune.optimizations.activations.types import ActivationPlan, Budget, Group, LayerPlan, ModelCosts, Place


@dataclass(frozen=True)
class Limits:
    """What the recipe allows. None leaves it to the machine."""

    double_buffered: bool | Literal["auto"]
    activation_bytes: int | None
    host_bytes: int | None
    optimizer: str
    num_micro_batches: int


@dataclass(frozen=True)
class Workload:
    """A micro-batch of the run's own shape."""

    forward: Callable[[], object]
    """The model's forward on it, without gradients."""
    loss: Callable[[], torch.Tensor]
    """Its loss, with the graph and without an MoE's auxiliary loss."""


class Activations:
    """See the module.

    Args:
        model: on its device, in training mode; its parameters are counted.
        layers: its decoder layers.
        say: prints a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        *,
        device: torch.device,
        limits: Limits,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._layers, self._device, self._limits, self._say = model, list(layers), device, limits, say
        self.checkpointing = Checkpointing(layers, device=device)
        self.outputs = StoredOutputs(self._layers)
        self.costs: ModelCosts | None = None
        self.plan: ActivationPlan | None = None
        self.reload: Reload | None = None
        self._budget: Budget | None = None

    def prepare(self, workload: Workload) -> ActivationPlan:
        """Measures the model, plans and puts the plan into effect.

        Raises:
            BudgetTooSmall: nothing fits into what the machine has and the recipe allows.
            torch.OutOfMemoryError: one layer, or the LM head, does not fit.
        """
        self.costs = self._measure(workload)
        self._budget = self._find_budget(self.costs)
        return self._put_into_effect(plan_activations(self.costs, self._budget))

    def replan(self, *, by_bytes: int) -> ActivationPlan:
        """Plans again with less of the device's memory.

        Raises:
            BudgetTooSmall: there is no smaller plan.
        """
        assert self.costs is not None and self._budget is not None
        self._budget = tighter(self.costs, self._budget, by_bytes=by_bytes)
        return self._put_into_effect(plan_activations(self.costs, self._budget))

    def use(self, layers: Sequence[LayerPlan], *, num_buffers: int) -> ActivationPlan:
        """Puts a plan of one's own into effect, whatever the budgets are; for tests and measurements.

        Args:
            num_buffers: reload buffers on the device.
        """
        assert self.costs is not None
        self.costs = replace(self.costs, num_buffers=num_buffers)
        return self._put_into_effect(assess_plan(layers, self.costs))

    def close(self) -> None:
        """Leaves the model as it was."""
        self.checkpointing.remove()
        self.outputs.undo()
        self.reload = None

    # --- measuring

    def _measure(self, workload: Workload) -> ModelCosts:
        kinds = kinds_of(self._layers)
        self.checkpointing.remove()
        with torch.no_grad():
            calls = capture_calls(self._layers, kinds, workload.forward)
        meter = LayerMeter(self._layers, self.checkpointing, device=self._device)
        allowed = check_skipping(meter, self.outputs, calls)
        costs = tuple(meter.costs(call, allowed) for call in calls)
        self.checkpointing.remove()
        del calls
        head = measure_head(self._layers, workload.loss, device=self._device)
        link = measure_link(self._device)
        if self._device.type == "cpu" and self._limits.host_bytes is not None:
            link = replace(link, is_shared=False)  # asked for by name, it is done, if for nothing
        _release(self._device)
        return ModelCosts(
            kinds=costs,
            layers=kinds,
            fixed_bytes=fixed_bytes(self._device, self._model.parameters(), optimizer=self._limits.optimizer),
            head_seconds=head.seconds,
            head_peak_bytes=head.peak_bytes,
            optimizer_seconds=0.0,
            num_micro_batches=self._limits.num_micro_batches,
            link=link,
            num_buffers=1 if self._limits.double_buffered is False else 2,
        )

    def _find_budget(self, costs: ModelCosts) -> Budget:
        available = available_host_bytes()
        host = self._limits.host_bytes
        if host is None:
            # On a CPU there is nowhere else to go, unless the recipe asks for it.
            host = int(available * HOST_SHARE) if self._device.type == "cuda" else 0
        elif host > available:
            self._say(f"optimizations.host_memory is {host / 2**30:.1f} GiB, but only {available / 2**30:.1f} are free")
            host = available
        capacity = device_capacity(self._device, available_host=available)
        return Budget(
            device_bytes=capacity - costs.fixed_bytes, host_bytes=host, activation_bytes=self._limits.activation_bytes
        )

    # --- effect

    def _put_into_effect(self, plan: ActivationPlan) -> ActivationPlan:
        assert self.costs is not None
        self.reload = None
        self.checkpointing.remove()
        _release(self._device)
        slots = [
            sum(
                padded(self.costs.kinds[kind].groups[group].num_bytes) + _slack(group)
                for group, place in layer.places.items()
                if place is Place.HOST
            )
            for kind, layer in zip(self.costs.layers, plan.layers, strict=True)
        ]
        pool = allocate_pool(sum(slots), device=self._device)
        if pool.refusal:
            self._say(f"{pool.refusal}: activations are copied through pageable memory, which is slower")
        self.reload = Reload(
            pool.data, slots, num_buffers=self.costs.num_buffers, copies=copies_for(self._device), device=self._device
        )
        self.checkpointing.install(plan.layers, self.reload)
        self.plan = replace(plan, buffer_bytes=self.reload.buffer_bytes)
        return self.plan


def _slack(group: Group) -> int:
    """What alignment may add to a group of several tensors: three projections, an output and its log-sum-exp."""
    return 0 if group is Group.INPUT else 4 * padded(1)


def _release(device: torch.device) -> None:
    """Gives the allocator's unused blocks back, once, so that what was measured does not stay reserved."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
