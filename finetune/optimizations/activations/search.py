"""The search for the fastest assignment of options to layers.

Layers of one kind are interchangeable, so what is sought is how many take each option. The most that one layer has on
the host sets the reload buffers; for each such size the rest is a small integer program. Its linear relaxation gives a
lower bound, prices of the budgets, and nearly whole counts; a bounded depth-first search settles the few layers left.
Sizes whose bound is no better than what was found are never solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from finetune.optimizations.activations.arrange import LayerClass, arrange
from finetune.optimizations.activations.assess import LayerFigures, layer_options, reload_waits, work_bytes
from finetune.optimizations.activations.relaxed import Relaxed, solve_relaxed
from finetune.optimizations.activations.types import Budget, LayerPlan, ModelCosts

MAX_FILL = 0.85
"""Share of a pass in which the link may be busy: measured copies were hidden up to there."""
_COPY_PRICE = 0.02
"""Of a hidden copy's time, so that nothing is moved to the host without need."""
_TOLERANCE = 1e-3
"""Share of the layers' time that a longer search might still save when it stops."""
_NODES_A_DIVE = 200
_NODES_A_SEARCH = 1200
_NODES_A_LAYER = 2
"""What arranging a layer counts as, in nodes."""
_SIZES_SEARCHED = 4
"""Sizes of buffer that are searched longer."""


def usable_host_bytes(costs: ModelCosts, budget: Budget) -> int:
    """Returns what may lie on the host by its budget and by the link's fill in forward."""
    link = costs.link
    if link.is_shared or min(link.to_host_bytes_per_second, link.to_device_bytes_per_second) <= 0:
        return 0
    forward = sum(costs.kinds[kind].forward_seconds for kind in costs.layers)
    return max(0, min(budget.host_bytes, int(MAX_FILL * forward * link.to_host_bytes_per_second)))


def storable_bytes(costs: ModelCosts, budget: Budget, *, largest_host_bytes: int) -> int:
    """Returns what layers may store on the device when the largest has so much on the host; negative: too little."""
    buffers = costs.num_buffers * largest_host_bytes
    room = budget.device_bytes - work_bytes(costs, largest_host_bytes=largest_host_bytes)
    if budget.activation_bytes is not None:
        room = min(room, budget.activation_bytes)
    return room - buffers


def fastest_layers(costs: ModelCosts, budget: Budget) -> list[LayerPlan] | None:
    """Returns the fastest assignment that was found, in forward order; None where none was."""
    best = _Search(costs, budget).run()
    return None if best is None else [layer.plan for layer in best]


def _classes(costs: ModelCosts, *, may_use_host: bool) -> list[LayerClass]:
    """Returns the layers by kind; the last layer alone, since backward wants it at once."""
    last = len(costs.layers) - 1
    classes = []
    for kind, layer in enumerate(costs.kinds):
        positions = tuple(index for index, own in enumerate(costs.layers) if own == kind and index != last)
        if positions:
            classes.append(LayerClass(positions, _not_dominated(layer_options(layer, may_use_host=may_use_host))))
    options = layer_options(costs.kinds[costs.layers[last]], may_use_host=False)
    return [*classes, LayerClass((last,), _not_dominated(options))]


def _not_dominated(options: list[LayerFigures]) -> tuple[LayerFigures, ...]:
    """Drops every option to which another is no worse in time, device and host memory."""
    kept: list[LayerFigures] = []
    for one in sorted(options, key=lambda option: (option.seconds, option.device_bytes, option.host_bytes)):
        if not any(other.device_bytes <= one.device_bytes and other.host_bytes <= one.host_bytes for other in kept):
            kept.append(one)
    return tuple(kept)


@dataclass(frozen=True)
class _Option:
    """One option as the search sees it."""

    regret: float
    """Seconds above its class's best at the budgets' prices."""
    seconds: float
    uses: tuple[int, int, float]
    """Device bytes, host bytes, link seconds."""
    index: int


@dataclass
class _Tree:
    """One size of reload buffer: what each class can take, and the room for it."""

    options: list[list[_Option]]
    """For each class, least regret first."""
    room: tuple[int, int, float]
    bound: float
    nodes: int = 0
    to_place: list[int] = field(default_factory=list)
    later_device_bytes: list[int] = field(default_factory=list)
    """The least that the classes after each one need."""
    chosen: list[tuple[int, int, int]] = field(default_factory=list)
    """Class, option and count, on the way down to the present node."""


class _Search:
    def __init__(self, costs: ModelCosts, budget: Budget) -> None:
        self.costs = costs
        self.host_bytes = usable_host_bytes(costs, budget)
        self.classes = _classes(costs, may_use_host=self.host_bytes > 0)
        self.rate = costs.link.to_device_bytes_per_second
        self.best_seconds = float("inf")
        self.best_waits = 0.0
        self.best: list[LayerFigures] | None = None
        self.best_counts: list[list[int]] = []
        options = [option for one in self.classes for option in one.options]
        self.sizes = np.array([len(one.positions) for one in self.classes])
        self.members = np.repeat(np.arange(len(self.classes)), [len(one.options) for one in self.classes])
        self.own_host = np.array([option.host_bytes for option in options])
        copies = self.own_host / self.rate if self.host_bytes else np.zeros(len(options))
        # One buffer: every copy is waited for, wherever its layer stands.
        price = 1.0 if costs.num_buffers == 1 else _COPY_PRICE
        self.seconds = np.array([option.seconds for option in options]) + price * copies
        backward = MAX_FILL * np.array([option.backward_seconds for option in options])
        longest = np.array([backward[self.members == own].max() for own in range(len(self.classes))])
        # Link time and the backward that an option shortens, so that no use is negative.
        self.uses = np.stack([[option.device_bytes for option in options], self.own_host, copies])
        self.uses[2] += longest[self.members] - backward
        self.host_sizes = [int(size) for size in np.unique(self.own_host) if size <= self.host_bytes]
        rooms = [storable_bytes(costs, budget, largest_host_bytes=size) for size in self.host_sizes]
        link_room = float(self.sizes @ longest) * (1 - 1e-9)
        self.rooms = np.array([[room, self.host_bytes, link_room] for room in rooms])

    def run(self) -> list[LayerFigures] | None:
        """Tries the buffer sizes, the most promising first: each a little, then the best of them longer."""
        open_sizes = [index for index, room in enumerate(self.rooms) if room[0] >= 0]
        bounds = np.zeros(len(self.rooms))
        trees: dict[int, tuple[_Tree, np.ndarray]] = {}
        while open_sizes:
            index = min(open_sizes, key=lambda index: bounds[index])
            if bounds[index] >= self._worthwhile:
                break
            open_sizes.remove(index)
            usable = np.flatnonzero(self.own_host <= self.host_sizes[index])
            relaxed = solve_relaxed(
                self.seconds[usable],
                self.uses[:, usable],
                self.rooms[index],
                members=self.members[usable],
                sizes=self.sizes,
            )
            if relaxed is None:
                continue
            bounds = np.maximum(bounds, self._bounds(relaxed.prices))
            trees[index] = self._tree(index, usable, relaxed, bound=float(bounds[index]))
            self._search_from(*trees[index], freed=0, nodes=_NODES_A_DIVE)
        for freed in (0, 1, 2, 4, len(self.costs.layers)):
            for index in sorted(trees, key=lambda index: bounds[index])[:_SIZES_SEARCHED]:
                self._search_from(*trees[index], freed=freed, nodes=_NODES_A_SEARCH)
        return self._stored_late()

    @property
    def _worthwhile(self) -> float:
        """Seconds that another assignment must be under to matter."""
        return self.best_seconds * (1 - _TOLERANCE)

    def _bounds(self, prices: np.ndarray) -> np.ndarray:
        """Returns for each buffer size a time that no assignment can be under."""
        priced = self.seconds + prices @ self.uses
        total = -self.rooms @ prices
        for own, size in enumerate(self.sizes):
            inside = np.flatnonzero(self.members == own)
            inside = inside[self.own_host[inside].argsort(kind="stable")]
            least = np.minimum.accumulate(priced[inside])
            total += size * least[np.searchsorted(self.own_host[inside], self.host_sizes, side="right") - 1]
        return total

    def _tree(self, index: int, usable: np.ndarray, relaxed: Relaxed, *, bound: float) -> tuple[_Tree, np.ndarray]:
        """Returns the tree of a buffer size, and the relaxation's counts rounded down (`[N]`)."""
        room = self.rooms[index]
        options = list(self._options(usable, relaxed.prices))
        whole = np.zeros(len(self.members), dtype=int)
        whole[usable] = np.floor(relaxed.counts + 1e-6).astype(int)
        return _Tree(options, (int(room[0]), int(room[1]), float(room[2])), bound), whole

    def _options(self, usable: np.ndarray, prices: np.ndarray) -> Iterator[list[_Option]]:
        priced = self.seconds + prices @ self.uses
        starts = np.searchsorted(self.members, np.arange(len(self.classes)))
        for own, start in enumerate(starts):
            inside = [int(index) for index in usable if self.members[index] == own]
            least = min(priced[index] for index in inside)
            options = [
                _Option(
                    float(priced[index] - least),
                    float(self.seconds[index]),
                    (int(self.uses[0, index]), int(self.uses[1, index]), float(self.uses[2, index])),
                    index - int(start),
                )
                for index in inside
            ]
            yield sorted(options, key=lambda option: option.regret)

    def _search_from(self, tree: _Tree, whole: np.ndarray, *, freed: int, nodes: int) -> None:
        """Takes `freed` layers from each of the `whole` counts and places them and all that are open."""
        if tree.bound >= self._worthwhile:
            return
        fixed = np.maximum(whole - freed, 0)
        starts = np.searchsorted(self.members, np.arange(len(self.classes)))
        tree.nodes, tree.to_place, tree.chosen = nodes, [], []
        used, seconds, regret = (0, 0, 0.0), 0.0, 0.0
        for own, options in enumerate(tree.options):
            left = int(self.sizes[own])
            for option in options:
                count = int(fixed[starts[own] + option.index])
                if count:
                    used = _added(used, option.uses, count)
                    seconds, regret, left = (
                        seconds + count * option.seconds,
                        regret + count * option.regret,
                        left - count,
                    )
                    tree.chosen.append((own, option.index, count))
            tree.to_place.append(left)
        least = [min(option.uses[0] for option in options) for options in tree.options]
        needs = [left * bytes_ for left, bytes_ in zip(tree.to_place, least, strict=True)]
        tree.later_device_bytes = [sum(needs[own + 1 :]) for own in range(len(needs))]
        self._place(tree, 0, 0, tree.to_place[0], used, seconds, regret)

    def _place(
        self,
        tree: _Tree,
        own: int,
        start: int,
        left: int,
        used: tuple[int, int, float],
        seconds: float,
        regret: float,
    ) -> None:
        """Gives the `left` layers of a class options from the `start`-th on, then goes on to the next class."""
        while not left:
            own, start = own + 1, 0
            if own == len(tree.options):
                self._finish(tree, seconds)
                return
            left = tree.to_place[own]
        options = tree.options[own]
        least = min(option.uses[0] for option in options)
        room = tree.room[0] - used[0] - tree.later_device_bytes[own] - left * least
        for index in range(start, len(options)):
            option = options[index]
            if tree.nodes <= 0 or tree.bound + regret + left * option.regret >= self._worthwhile:
                return
            most = min(
                left,
                _fitting(room, option.uses[0] - least),
                _fitting(tree.room[1] - used[1], option.uses[1]),
                _fitting(tree.room[2] - used[2], option.uses[2]),
            )
            for count in range(most, 0, -1):
                tree.nodes -= 1
                tree.chosen.append((own, option.index, count))
                self._place(
                    tree,
                    own,
                    index + 1,
                    left - count,
                    _added(used, option.uses, count),
                    seconds + count * option.seconds,
                    regret + count * option.regret,
                )
                tree.chosen.pop()

    def _finish(self, tree: _Tree, seconds: float) -> None:
        """Weighs a whole assignment, with the waits for reloads in its best order."""
        if seconds >= self.best_seconds:
            return
        counts = [[0] * len(one.options) for one in self.classes]
        for own, index, count in tree.chosen:
            counts[own][index] += count
        tree.nodes -= _NODES_A_LAYER * len(self.costs.layers)
        layers, waits = self._arranged(counts)
        if seconds + waits < self.best_seconds:
            self.best_seconds, self.best_waits = seconds + waits, waits
            self.best, self.best_counts = layers, counts

    def _arranged(self, counts: list[list[int]]) -> tuple[list[LayerFigures], float]:
        """Returns the layers in order, and the waits that depend on the order."""
        buffers = self.costs.num_buffers
        layers = arrange(self.classes, counts, bytes_per_second=self.rate, num_buffers=buffers)
        if buffers == 1 or not any(layer.host_bytes for layer in layers):
            return layers, 0.0
        return layers, sum(reload_waits(layers, bytes_per_second=self.rate, num_buffers=buffers))

    def _stored_late(self) -> list[LayerFigures] | None:
        """Returns the best plan, its last layer storing the most that one of its kind keeps, where no wait grows."""
        if self.best is None:
            return None
        last, own = self.classes[-1], self.best[-1]
        kept = [layer for layer in self.best if layer in last.options]
        most = max(kept, key=lambda layer: layer.device_bytes)
        if most.device_bytes <= own.device_bytes:
            return self.best
        counts = [list(numbers) for numbers in self.best_counts]
        for one, numbers in zip(self.classes, counts, strict=True):
            if own in one.options and most in one.options and numbers[one.options.index(most)]:
                break
        else:
            return self.best
        for change, options, changed in ((-1, one.options, numbers), (1, last.options, counts[-1])):
            changed[options.index(most)] += change
            changed[options.index(own)] -= change
        layers, waits = self._arranged(counts)
        return layers if waits <= self.best_waits else self.best


def _fitting(room: float, use: float) -> int:
    """Returns how many of a use fit."""
    if room < 0:
        return 0
    return int(room // use) if use > 0 else 2**31


def _added(used: Sequence[float], uses: Sequence[float], count: int) -> tuple[int, int, float]:
    return (
        int(used[0] + count * uses[0]),
        int(used[1] + count * uses[1]),
        used[2] + count * uses[2],
    )
