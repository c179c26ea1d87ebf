"""Which layer takes which option, once it is known how many take each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from finetune.optimizations.activations.assess import LayerFigures, reload_waits

_MAX_TRIES = 40
_FEW_LAYERS = 12


@dataclass(frozen=True)
class LayerClass:
    """Layers of one kind with the same choice; any of them may take any option."""

    positions: tuple[int, ...]
    """Their places among all layers, in forward order."""
    options: tuple[LayerFigures, ...]


def arrange(
    classes: Sequence[LayerClass], counts: Sequence[Sequence[int]], *, bytes_per_second: float, num_buffers: int
) -> list[LayerFigures]:
    """Returns the options in forward order: offloaded layers spread evenly, the most on the device in late layers.

    Args:
        counts: for each class, how many of its layers take each of its options.
        bytes_per_second: of the link to the device.
    """
    layers: dict[int, LayerFigures] = {}
    for index, (one, numbers) in enumerate(zip(classes, counts, strict=True)):
        layers |= _spread(one, numbers, shift=index / len(classes))
    arranged = [layers[position] for position in range(len(layers))]
    if num_buffers > 1 and any(layer.host_bytes for layer in arranged):
        _shorten_waits(arranged, classes, bytes_per_second=bytes_per_second, num_buffers=num_buffers)
    return arranged


def _spread(one: LayerClass, counts: Sequence[int], *, shift: float) -> dict[int, LayerFigures]:
    """Returns the class's options by position.

    Args:
        shift: where in the gap between two offloaded layers to begin, so that classes do not fall together.
    """
    pairs = list(zip(one.options, counts, strict=True))
    items = [((turn + 0.5) / count, option) for option, count in pairs for turn in range(count)]
    away = [option for _, option in sorted(items, key=lambda item: item[0]) if option.host_bytes]
    kept = [option for _, option in items if not option.host_bytes]
    kept.sort(key=lambda option: option.device_bytes)
    slots = {int((turn + shift) * len(items) / len(away)) for turn in range(len(away))}
    queues = {True: iter(away), False: iter(kept)}
    return {position: next(queues[slot in slots]) for slot, position in enumerate(one.positions)}


def _shorten_waits(
    layers: list[LayerFigures], classes: Sequence[LayerClass], *, bytes_per_second: float, num_buffers: int
) -> None:
    """Exchanges layers of one class in place while that makes the waits for reloads shorter."""

    def waits() -> list[float]:
        return reload_waits(layers, bytes_per_second=bytes_per_second, num_buffers=num_buffers)

    class_of = {position: one.positions for one in classes for position in one.positions}
    now, tries = waits(), _MAX_TRIES
    improved = True
    while improved and sum(now) > 0:
        improved = False
        for index, other in [(own, other) for own in _suspects(layers, now) for other in class_of[own]]:
            if layers[index] is layers[other]:
                continue
            if not tries:
                return
            tries -= 1
            layers[index], layers[other] = layers[other], layers[index]
            after = waits()
            if sum(after) < sum(now) * (1 - 1e-9):
                now, improved = after, True
                break
            layers[index], layers[other] = layers[other], layers[index]


def _suspects(layers: Sequence[LayerFigures], waits: Sequence[float]) -> list[int]:
    """Returns the layers that wait, longest first, each followed by the offloaded one under which it should hide."""
    if len(layers) <= _FEW_LAYERS:
        return list(range(len(layers)))
    away = [index for index, layer in enumerate(layers) if layer.host_bytes]
    following = dict(pairwise(away))
    found: list[int] = []
    for index in sorted((index for index in away if waits[index] > 0), key=lambda index: -waits[index]):
        found += [index, following[index]] if index in following else [index]
    return found
