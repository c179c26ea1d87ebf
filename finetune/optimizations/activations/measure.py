"""What each kind of layer costs, measured once on the real model with a micro-batch of the run's own shape.

Each kind of layer is run alone, forward and backward, once for each thing that could be stored. The time that storing a
group saves is the difference of two such runs; bytes are counted, and the peaks of the device's memory are the
allocator's own. Gradients that came about are removed afterwards, and no random state moves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from finetune.optimizations.activations.checkpoint import Checkpointing
from finetune.optimizations.activations.copies import copies_for
from finetune.optimizations.activations.host_memory import allocate_pool
from finetune.optimizations.activations.record import LayerRecord
from finetune.optimizations.activations.reload import Reload
from finetune.optimizations.activations.types import Group, GroupCost, LayerCosts, LayerPlan, Link, Place

QUICK_SECONDS = 0.5
"""A run of a layer that takes longer than this is not repeated."""
REPETITIONS = 5
LESS_WORK = 0.99
"""A whole layer computes nothing twice, so it takes less than one with everything stored, whatever noise says."""
_LINK_BYTES = 64 * 2**20
_CPU_COPY_RATE = 1e10


@dataclass(frozen=True)
class LayerCall:
    """How the model calls one of its layers."""

    index: int
    hidden: torch.Tensor  # [R, L, H]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CannotPlan(Exception):
    """The model's layers are not called as transformers' checkpointed layers are; the message says how."""


class _Seen(Exception):
    """Every kind of layer was called; the rest of the forward is not needed."""


def kinds_of(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Numbers the kinds of layers: alike are those of one class with the same parameters' shapes and attention."""
    seen: dict[Any, int] = {}
    return tuple(seen.setdefault(_signature(layer), len(seen)) for layer in layers)


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    attention = getattr(layer, "attention_type", None)
    windows = tuple(getattr(module, "sliding_window", None) for module in layer.modules())
    return type(layer), shapes, attention, windows


def capture_calls(layers: Sequence[nn.Module], kinds: Sequence[int], run: Callable[[], object]) -> list[LayerCall]:
    """Runs the model until each kind of layer was called once; returns these calls, by kind.

    Args:
        run: a forward pass of the model, without gradients.

    Raises:
        CannotPlan: there are no layers, or they are called in another way.
    """
    if not layers:
        raise CannotPlan("the model has no layers that transformers can checkpoint")
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    calls: dict[int, LayerCall] = {}

    def note(kind: int, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not args or not isinstance(args[0], torch.Tensor):
                raise CannotPlan(f"{type(module).__name__} does not get its hidden states as its first argument")
            calls[kind] = LayerCall(index, args[0].detach().clone(), args[1:], kwargs)
            if len(calls) == len(first):
                raise _Seen

        return hook

    handles = [
        layers[index].register_forward_pre_hook(note(kind, index), with_kwargs=True) for kind, index in first.items()
    ]
    try:
        run()
    except _Seen:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return [calls[kind] for kind in sorted(calls)]


@dataclass(frozen=True)
class Pass:
    """One forward and backward of one layer."""

    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    """What lives between the two beside the output, which is the next layer's input."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    group_bytes: dict[Group, int]
    grads: tuple[torch.Tensor, ...]
    """Of the input and the trained weights."""


class LayerMeter:
    """Measures the layers of one model.

    Args:
        layers: decoder layers; `checkpointing` is theirs.
        context: what a forward of the run is inside of, such as autocast.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        checkpointing: Checkpointing,
        *,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._layers, self._checkpointing, self._device, self._context = list(layers), checkpointing, device, context
        nowhere, sizes = allocate_pool(0, device=device), [0] * len(self._layers)
        self._nothing = Reload(nowhere, sizes, num_buffers=1, copies=copies_for(device), device=device)

    def costs(self, call: LayerCall, allowed: frozenset[Group]) -> LayerCosts:
        """Measures one kind of layer.

        Args:
            allowed: the groups that can be stored.

        Raises:
            torch.OutOfMemoryError: not even a checkpointed layer fits.
        """
        everything = LayerPlan(places=dict.fromkeys(allowed, Place.DEVICE))
        bare = self.median(call, LayerPlan())
        stored = self.run(call, everything).group_bytes
        groups = {Group.INPUT: GroupCost(_bytes(call.hidden), 0.0)}
        for group in Group:
            num_bytes = stored.get(group, 0)
            if group is not Group.INPUT and num_bytes:
                places = {Group.INPUT: Place.DEVICE, group: Place.DEVICE}
                one = self.median(call, LayerPlan(places=places))
                groups[group] = GroupCost(num_bytes, bare.backward_seconds - one.backward_seconds)
        together = bare.backward_seconds - self.median(call, everything).backward_seconds
        groups = _shared_out(groups, together)
        saved = sum(cost.seconds for cost in groups.values())
        try:
            whole = self.median(call, LayerPlan(is_whole=True))
        except torch.OutOfMemoryError:
            whole = None
        return LayerCosts(
            groups=groups,
            forward_seconds=bare.forward_seconds,
            backward_seconds=bare.backward_seconds,
            whole_seconds=0.0 if whole is None else min(_seconds(whole), LESS_WORK * (_seconds(bare) - saved)),
            whole_bytes=None if whole is None else whole.kept_bytes,
            forward_peak_bytes=bare.forward_peak_bytes,
            backward_peak_bytes=bare.backward_peak_bytes,
            whole_peak_bytes=0 if whole is None else whole.backward_peak_bytes,
        )

    def autocast_dtype(self) -> torch.dtype:
        """Returns the format that products are computed in, as far as the run's context decides it."""
        with self._context():
            kind = self._device.type
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32

    def median(self, call: LayerCall, plan: LayerPlan) -> Pass:
        """Runs a layer several times, the host not waiting in between, after a first run that does not count.

        On a device that first run compiles and allocates. One that takes long is not repeated: it is slow for its
        length, and counts.
        """
        begun = time.perf_counter()
        first = self.run(call, plan)
        if time.perf_counter() - begun > QUICK_SECONDS:
            return first
        clocks = [self._timed(call, plan) for _ in range(REPETITIONS)]
        times = [clock.seconds() for clock in clocks]
        forward, backward = (statistics.median(one) for one in zip(*times, strict=True))
        return replace(first, forward_seconds=forward, backward_seconds=backward)

    def _timed(self, call: LayerCall, plan: LayerPlan) -> _Clock:
        """One pass without any wait, as in a step, where the host is ahead of the device if it can be."""
        clock = _Clock(self._device)
        output, wanted, _ = self._forward(call, plan)
        clock.mark()
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
        clock.mark()
        return clock

    def _forward(self, call: LayerCall, plan: LayerPlan) -> tuple[torch.Tensor, list[torch.Tensor], list[LayerRecord]]:
        """Runs a layer forward; returns its output, what gradients are asked of, and the record, if there is one.

        The layer gets a copy of the captured states that nothing else refers to, so what keeps it is seen to.
        """
        layer = self._layers[call.index]
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        records: list[LayerRecord] = []
        self._checkpointing.install([plan] * len(self._layers), self._nothing)
        self._checkpointing.on_record = records.append
        leaf = call.hidden.detach().requires_grad_()
        torch.manual_seed(0)  # runs that are compared draw the same dropout
        try:
            with self._context():
                output = layer(leaf.clone(), *call.args, **call.kwargs)
        finally:
            self._checkpointing.on_record = None
        return output[0] if isinstance(output, tuple) else output, [leaf, *trained], records

    def run(self, call: LayerCall, plan: LayerPlan) -> Pass:
        """Runs one layer forward and backward and looks at its memory."""
        layer = self._layers[call.index]
        start = self._mark()
        with CountedBytes(self._device, parameters=list(layer.parameters())) as counted:
            output, wanted, records = self._forward(call, plan)
        middle = self._mark()
        group_bytes = {group: record.num_bytes(group) for record in records for group in Group}
        kept = counted.kept(output, middle.allocated - start.allocated)
        del records
        upstream = torch.ones_like(output)
        self._reset_peak()
        grads = torch.autograd.grad(output, wanted, upstream, allow_unused=True)
        end = self._mark()
        return Pass(
            forward_seconds=middle.seconds - start.seconds,
            backward_seconds=end.seconds - middle.seconds,
            kept_bytes=kept,
            forward_peak_bytes=max(0, middle.peak - start.allocated - kept),
            backward_peak_bytes=max(0, end.peak - middle.allocated),
            group_bytes=group_bytes,
            grads=tuple(grad for grad in grads if grad is not None),
        )

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return _Mark(time.perf_counter(), 0, 0)
        torch.cuda.synchronize(self._device)
        mark = _Mark(
            time.perf_counter(),
            torch.cuda.memory_allocated(self._device),
            torch.cuda.max_memory_allocated(self._device),
        )
        self._reset_peak()
        return mark

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


class _Clock:
    """Takes the time of parts of what a device does, from its making on; on a CPU that of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Ends a part."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Waits for the device and returns the parts' times."""
        pairs = list(pairwise(self._marks))
        if self._device.type != "cuda":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def _seconds(one: Pass) -> float:
    return one.forward_seconds + one.backward_seconds


def _shared_out(groups: dict[Group, GroupCost], together: float) -> dict[Group, GroupCost]:
    """Scales what single groups save so that it adds up to what all save together: a host that is late hides some of
    it, and single differences are noisy."""
    alone = sum(max(0.0, cost.seconds) for cost in groups.values())
    factor = max(0.0, together) / alone if alone > 0 else 0.0
    return {group: replace(cost, seconds=max(0.0, cost.seconds) * factor) for group, cost in groups.items()}


@dataclass(frozen=True)
class _Mark:
    seconds: float
    allocated: int
    peak: int
    """Since the mark before."""


class CountedBytes:
    """What autograd keeps in a block: by the allocator on a CUDA device, elsewhere by looking at each saved tensor."""

    def __init__(self, device: torch.device, *, parameters: Sequence[nn.Parameter]) -> None:
        self._counts = device.type != "cuda"
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._seen: dict[int, int] = {}
        self._hooks: Any = None

    def __enter__(self) -> CountedBytes:
        if self._counts:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
            self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*error)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own and not isinstance(tensor, nn.Parameter):
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def kept(self, output: torch.Tensor, allocated: int) -> int:
        """Returns the bytes kept beside the output."""
        return sum(self._seen.values()) if self._counts else max(0, allocated - _bytes(output))


def measure_link(device: torch.device) -> Link:
    """Copies a pinned block there and back, and takes the best of four times each. A CPU copies within one memory."""
    if device.type != "cuda":
        return Link(_CPU_COPY_RATE, _CPU_COPY_RATE, is_shared=True)
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for source, target in ((there, host), (host, there)):
        best = 0.0
        for _ in range(4):
            torch.cuda.synchronize(device)
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            best = max(best, _LINK_BYTES / (time.perf_counter() - begun))
        rates.append(best)
    is_shared = bool(torch.cuda.get_device_properties(device).is_integrated)
    return Link(to_host_bytes_per_second=rates[0], to_device_bytes_per_second=rates[1], is_shared=is_shared)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
