"""The activations of one model in training: measured, planned, put into effect, and planned again when memory runs
out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from finetune.optimizations.activations.assess import assess_plan
from finetune.optimizations.activations.capacity import HOST_SHARE, device_capacity, fixed_bytes
from finetune.optimizations.activations.checkpoint import Checkpointing
from finetune.optimizations.activations.copies import copies_for
from finetune.optimizations.activations.head import measure_head
from finetune.optimizations.activations.host_memory import allocate_pool, available_host_bytes
from finetune.optimizations.activations.measure import LayerCall, LayerMeter, capture_calls, kinds_of, measure_link
from finetune.optimizations.activations.planner import BudgetTooSmall, plan_activations, tighter
from finetune.optimizations.activations.reload import Reload, padded
from finetune.optimizations.activations.skipping import check_skipping
from finetune.optimizations.activations.stored_outputs import StoredOutputs
from finetune.optimizations.activations.tiles import LayerTiles, last_norm, tile_tokens_for
from finetune.optimizations.activations.types import ActivationPlan, Budget, Group, LayerPlan, Link, ModelCosts, Place

WORTH_A_BUFFER = 0.002
"""Share of a step that a second reload buffer has to save under `auto`."""
WORTH_TILES = 0.05
"""Share of a step that tiles have to save: they change the order of sums, and whole rows do not."""


@dataclass(frozen=True)
class Limits:
    """What the recipe allows. None leaves it to the machine."""

    double_buffered: bool | Literal["auto"]
    activation_bytes: int | None
    host_bytes: int | None
    optimizer: str
    num_micro_batches: int
    has_optimizer: bool = False
    """Whether the optimizer's state is there already, and so among the allocated memory."""


@dataclass(frozen=True)
class Workload:
    """A micro-batch of the run's own shape."""

    loss: Callable[[], torch.Tensor]
    """Its loss by the model's forward, without an MoE's auxiliary loss."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What the run's forward is inside of, such as autocast."""


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
        self.tiles = LayerTiles(self._layers, self.outputs, others=last_norm(model, self._layers))
        self.costs: ModelCosts | None = None
        self.plan: ActivationPlan | None = None
        self.reload: Reload | None = None
        self.base: ModelCosts | None = None
        """What is the same for every plan; without kinds of layers."""
        self._budget: Budget | None = None
        self._measured: dict[int | None, ModelCosts] = {}
        """Costs by the tokens of a tile; None: whole rows."""
        self._skips_last: dict[int | None, bool] = {}
        """Whether `down` may be left out of a recompute, by the same."""

    def prepare(self, workload: Workload) -> ActivationPlan:
        """Measures the model, plans and puts the plan into effect.

        Raises:
            CannotPlan: the model is built otherwise than transformers' decoders.
            BudgetTooSmall: nothing fits into what the machine has and the recipe allows.
            torch.OutOfMemoryError: one layer, or the LM head, does not fit.
        """
        self.checkpointing.remove()
        kinds = kinds_of(self._layers)
        with torch.no_grad():
            calls = capture_calls(self._layers, kinds, workload.loss)
        head = measure_head(self._model, self._layers, workload.loss, device=self._device)
        base = ModelCosts(
            kinds=(),
            layers=kinds,
            fixed_bytes=fixed_bytes(
                self._device,
                self._model.parameters(),
                optimizer=None if self._limits.has_optimizer else self._limits.optimizer,
            ),
            head_seconds=head.seconds,
            head_peak_bytes=head.peak_bytes,
            optimizer_seconds=0.0,
            num_micro_batches=self._limits.num_micro_batches,
            link=self._link(),
            num_buffers=1 if self._limits.double_buffered is False else 2,
        )
        self.base = base = replace(base, fixed_bytes=base.fixed_bytes - _bytes_of(calls))
        self._budget = self._find_budget(base)
        self._measure(calls, base, workload)
        del calls
        _release(self._device)
        return self._put_into_effect(*self._best())

    def replan(self, *, by_bytes: int) -> ActivationPlan:
        """Plans again with less of the device's memory.

        Raises:
            BudgetTooSmall: there is no smaller plan.
        """
        assert self.costs is not None and self._budget is not None
        self._budget = tighter(self.costs, self._budget, by_bytes=by_bytes)
        return self._put_into_effect(*self._best())

    def use(self, layers: Sequence[LayerPlan], *, num_buffers: int, tile_tokens: int | None = None) -> ActivationPlan:
        """Puts a plan of one's own into effect, whatever the budgets are; for tests and measurements.

        Args:
            num_buffers: reload buffers on the device.
            tile_tokens: of the MLPs' tiles, as they were measured; None: no tiles.
        """
        costs = replace(self._measured[tile_tokens], num_buffers=num_buffers)
        return self._put_into_effect(assess_plan(layers, costs), costs, tile_tokens)

    def run_by_hand(
        self, layers: Sequence[LayerPlan], slot_bytes: Sequence[int], *, num_buffers: int, tile_tokens: int | None
    ) -> None:
        """Puts plans into effect without any measuring, for rows that are too long to measure first.

        Args:
            slot_bytes: for each layer the most that it has on the host.
        """
        frozen = (parameter for parameter in self._layers[0].parameters() if not parameter.requires_grad)
        formats = [parameter.dtype for parameter in frozen if parameter.is_floating_point()]
        self.tiles.set(tile_tokens, dtype=formats[0] if formats else torch.float32)
        self._install(layers, slot_bytes, num_buffers=num_buffers)

    def close(self) -> None:
        """Leaves the model as it was."""
        self.checkpointing.remove()
        self.tiles.undo()
        self.outputs.undo()
        self.reload = None

    # --- measuring

    def _measure(self, calls: Sequence[LayerCall], base: ModelCosts, workload: Workload) -> None:
        """Fills `_measured`: with whole rows where they fit, and in tiles where memory is short."""
        assert self._budget is not None
        meter = LayerMeter(self._layers, self.checkpointing, device=self._device, context=workload.context)
        tokens = max(call.hidden.numel() // call.hidden.shape[-1] for call in calls)
        failure: torch.OutOfMemoryError | None = None
        for tile_tokens in (None, tile_tokens_for(tokens)):
            if tile_tokens is not None and (tokens <= tile_tokens or not self._is_short()):
                continue
            with workload.context():
                is_tiled = self.tiles.set(tile_tokens, dtype=calls[0].hidden.dtype)
            if tile_tokens is not None and not is_tiled:
                continue
            try:
                allowed = check_skipping(meter, self.outputs, calls) - self.tiles.groups_inside
                costs = tuple(meter.costs(call, allowed) for call in calls)
                self._measured[tile_tokens] = replace(base, kinds=costs)
                self._skips_last[tile_tokens] = self.outputs.skips_last
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)
            _release(self._device)
        self.checkpointing.remove()
        if not self._measured:
            assert failure is not None
            raise failure

    def _is_short(self) -> bool:
        """Whether memory is what keeps the plan for whole rows from being faster."""
        try:
            _, costs, _ = best = self._best()
        except BudgetTooSmall:
            return True
        return best[0].recomputed > 0 or best[0].host_bytes > 0 or costs.kinds[0].whole_bytes is None

    def _best(self) -> tuple[ActivationPlan, ModelCosts, int | None]:
        """Plans with each of the measured costs, and returns the fastest plan.

        Raises:
            BudgetTooSmall: none fits; it names the least that one of them needs.
        """
        assert self._budget is not None
        plans: list[tuple[ActivationPlan, ModelCosts, int | None]] = []
        refusals: list[BudgetTooSmall] = []
        for tile_tokens, measured in self._measured.items():
            try:
                plan, costs = self._planned(measured, self._budget)
                plans.append((plan, costs, tile_tokens))
            except BudgetTooSmall as error:
                refusals.append(error)
        if plans:
            return min(plans, key=lambda one: one[0].step_seconds * (1 if one[2] is None else 1 + WORTH_TILES))
        if not refusals:
            raise BudgetTooSmall(short=("device_bytes",), device_bytes=0, activation_bytes=None, host_bytes=None)
        raise min(refusals, key=lambda error: error.device_bytes)

    def _planned(self, costs: ModelCosts, budget: Budget) -> tuple[ActivationPlan, ModelCosts]:
        """Returns the plan, and the costs with as many buffers as it has."""
        plan = plan_activations(costs, budget)
        if self._limits.double_buffered != "auto" or plan.host_bytes == 0:
            return plan, costs
        alone = replace(costs, num_buffers=1)
        try:
            serial = plan_activations(alone, budget)
        except BudgetTooSmall:
            return plan, costs
        is_worth_it = serial.step_seconds > plan.step_seconds * (1 + WORTH_A_BUFFER)
        return (plan, costs) if is_worth_it else (serial, alone)

    def _link(self) -> Link:
        link = measure_link(self._device)
        if self._device.type == "cpu" and self._limits.host_bytes is not None:
            return replace(link, is_shared=False)  # asked for by name, it is done, if for nothing
        return link

    def _find_budget(self, costs: ModelCosts) -> Budget:
        available = available_host_bytes()
        host = self._limits.host_bytes
        if host is None:
            # On a CPU there is nowhere else to go, unless the recipe asks for it.
            host = int(available * HOST_SHARE) if self._device.type == "cuda" else 0
        elif host > available * HOST_SHARE:
            usable = int(available * HOST_SHARE)
            self._say(
                f"optimizations.host_memory is {host / 2**30:.1f} GiB, but only {available / 2**30:.1f} are free: "
                f"{usable / 2**30:.1f} are used at most"
            )
            host = usable
        capacity = device_capacity(self._device, available_host=available)
        return Budget(
            device_bytes=capacity - costs.fixed_bytes, host_bytes=host, activation_bytes=self._limits.activation_bytes
        )

    # --- effect

    def _put_into_effect(self, plan: ActivationPlan, costs: ModelCosts, tile_tokens: int | None) -> ActivationPlan:
        self.reload = None
        self.checkpointing.remove()
        _release(self._device)
        self.tiles.set(tile_tokens)
        self.outputs.skips_last = self._skips_last[tile_tokens]
        slots = [
            sum(
                padded(costs.kinds[kind].groups[group].num_bytes) + _slack(group)
                for group, place in layer.places.items()
                if place is Place.HOST
            )
            for kind, layer in zip(costs.layers, plan.layers, strict=True)
        ]
        reload = self._install(plan.layers, slots, num_buffers=costs.num_buffers)
        self.costs = costs
        self.plan = replace(plan, buffer_bytes=reload.buffer_bytes, tile_tokens=tile_tokens)
        return self.plan

    def _install(self, layers: Sequence[LayerPlan], slot_bytes: Sequence[int], *, num_buffers: int) -> Reload:
        pool = allocate_pool(sum(slot_bytes), device=self._device)
        if pool.refusal:
            self._say(f"{pool.refusal}: activations are copied through pageable memory, which is slower")
        copies = copies_for(self._device)
        self.reload = Reload(pool, slot_bytes, num_buffers=num_buffers, copies=copies, device=self._device)
        self.checkpointing.install(layers, self.reload)
        return self.reload


def _slack(group: Group) -> int:
    """What alignment may add to a group of several tensors: three projections, an output and its log-sum-exp."""
    return 0 if group is Group.INPUT else 4 * padded(1)


def _bytes_of(calls: Sequence[LayerCall]) -> int:
    """What the captured calls hold on the device: copies of hidden states that training does not have."""
    return sum(call.hidden.numel() * call.hidden.element_size() for call in calls if call.hidden.is_cuda)


def _release(device: torch.device) -> None:
    """Gives the allocator's unused blocks back, so that what was measured does not stay reserved."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
