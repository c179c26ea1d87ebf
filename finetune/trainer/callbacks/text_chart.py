"""Curves as text: one line in braille dots (two by four in a character), marked points over it, axes around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from finetune.run.series import nice_ticks

Point = tuple[float, float]
"""Step and value."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character, by row and column."""
_LABEL_WIDTH = 8


class History:
    """The points of one curve in bounded memory: when it is full, each two neighbours become one, their mean, and so
    do those that follow."""

    def __init__(self, *, limit: int = 1024) -> None:
        self._limit = limit
        self._joined: list[Point] = []
        self._group: list[Point] = []
        self._group_size = 1
        self.last = 0.0
        """The last value itself, which a joined point is not."""

    def add(self, step: float, value: float) -> None:
        self.last = value
        self._group.append((step, value))
        if len(self._group) == self._group_size:
            self._joined.append(_mean(self._group))
            self._group = []
        if len(self._joined) == self._limit:
            self._joined = [_mean(pair) for pair in zip(self._joined[::2], self._joined[1::2], strict=True)]
            self._group_size *= 2

    @property
    def points(self) -> list[Point]:
        """The curve, up to the last value."""
        return [*self._joined, _mean(self._group)] if self._group else self._joined


def _mean(points: Sequence[Point]) -> Point:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


def draw_chart(
    line: Sequence[Point],
    marks: Sequence[Point],
    *,
    width: int,
    height: int,
    last_step: int,
    ascii_only: bool,
) -> list[Text]:
    """Returns the lines of a chart from step 0 to `last_step`, the axis of the steps included.

    Args:
        line: points that are joined.
        marks: points that stand alone, on top.
        width: characters in all.
        height: lines in all, at least 3.
        ascii_only: draw with `*` and `o`, for a terminal that lacks the others.
    """
    plot_width, plot_height = width - _LABEL_WIDTH - 1, height - 1
    values = [value for _, value in (*line, *marks)]
    ticks = nice_ticks(min(values), max(values), count=4) if values else [0.0, 1.0]
    low, span = ticks[0], ticks[-1] - ticks[0]

    def dot(point: Point) -> tuple[int, int]:
        x = min(max(point[0] / max(1, last_step), 0.0), 1.0) * (2 * plot_width - 1)
        y = (1 - (point[1] - low) / span) * (4 * plot_height - 1)
        return round(x), round(y)

    bits = _join([dot(point) for point in line], width=plot_width, height=plot_height)
    marked = {(y // 4, x // 2) for x, y in map(dot, marks)}
    labels = {dot((0, tick))[1] // 4: _label(tick) for tick in ticks}
    rows: list[Text] = []
    for row in range(plot_height):
        text = Text.assemble((labels.get(row, "").rjust(_LABEL_WIDTH) + " ", "dim"))
        for column in range(plot_width):
            if (row, column) in marked:
                text.append("o" if ascii_only else "\u25cf", style="bold yellow")
            elif bits[row][column]:
                text.append("*" if ascii_only else chr(0x2800 + bits[row][column]), style="cyan")
            else:
                text.append(" ")
        rows.append(text)
    end = f"{last_step:,}"
    axis = " " * (_LABEL_WIDTH - 4) + "step " + "0" + end.rjust(plot_width - 1)
    return [*rows, Text(axis, style="dim")]


def _join(dots: Sequence[tuple[int, int]], *, width: int, height: int) -> list[list[int]]:
    """Returns the braille bits of each character, [height][width], for dots joined by straight lines."""
    bits = [[0] * width for _ in range(height)]
    previous = None
    for current in dots:
        for x, y in _between(previous or current, current):
            bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        previous = current
    return bits


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    for index in range(steps + 1):
        yield round(x0 + (x1 - x0) * index / steps), round(y0 + (y1 - y0) * index / steps)


def _label(value: float) -> str:
    return f"{value:.3g}"
