"""One chart as HTML with an inline SVG that stretches with the page, while its labels keep their size.

The drawing uses the plane 0..1000 by 0..400, stretched to its box; ticks are HTML placed by per cent. No script: a
title on each of up to 80 bands tells the values under the pointer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from finetune.run.series import Series, nice_ticks, smooth

_WIDTH, _HEIGHT = 1000.0, 400.0
_MAX_BANDS = 80
_SMOOTH_FROM = 30

NumberFormat = Callable[[float], str]


@dataclass(frozen=True)
class Mark:
    """A named point."""

    name: str
    step: float
    value: float


@dataclass(frozen=True)
class Curve:
    """A named series of a chart; `style` is its CSS class, `main` or `second`."""

    name: str
    series: Series
    style: str = "main"
    is_smoothed: bool = False
    """Draws the mean of neighbours over a faint line of the values, where these are at least 30 single steps."""
    has_dots: bool = False
    marked: Mark | None = None
    """A point of the curve that stands out, told in the legend."""


@dataclass(frozen=True)
class _Frame:
    """The ranges of both axes, mapped to the drawing's plane."""

    x_low: float
    x_high: float
    y_ticks: list[float]

    def x(self, step: float) -> float:
        return (step - self.x_low) / (self.x_high - self.x_low) * _WIDTH

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return _HEIGHT - (value - low) / (high - low) * _HEIGHT


def render_chart(title: str, curves: Sequence[Curve], *, number: NumberFormat, from_zero: bool = False) -> str:
    """Returns the chart as an HTML figure, or an empty text where no curve has a point.

    Args:
        title: what the chart shows; escaped here.
        curves: drawn in order, the last on top.
        number: text of a value on the axis, in the legend and under the pointer.
        from_zero: whether the vertical axis begins at zero.
    """
    curves = [curve for curve in curves if len(curve.series)]
    if not curves:
        return ""
    frame = _make_frame(curves, from_zero=from_zero)
    shapes = "".join(_grid_line(frame.y(tick)) for tick in frame.y_ticks)
    shapes += "".join(_curve_shapes(curve, frame) for curve in curves) + _pointer_bands(curves, frame, number)
    drawing = (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)} over the steps">{shapes}</svg>'
    )
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3>'
        f'<div class="legend">{_legend(curves, number)}</div></figcaption>'
        f'<div class="plot"><div class="ticks-y">{_y_labels(frame, number)}</div>'
        f'<div class="canvas">{drawing}{_dots(curves, frame)}</div>'
        f'<div class="ticks-x">{_x_labels(frame)}</div></div></figure>'
    )


def _legend(curves: Sequence[Curve], number: NumberFormat) -> str:
    """Returns each curve's name and last value; a single curve needs no colour key."""
    swatch = "<i></i>" if len(curves) > 1 else ""
    return "".join(
        f'<span class="key {curve.style}">{swatch}{escape(curve.name)} '
        f"<b>{escape(number(curve.series.last))}</b>{_mark_text(curve.marked, number)}</span>"
        for curve in curves
        if curve.series.last is not None
    )


def _mark_text(mark: Mark | None, number: NumberFormat) -> str:
    if mark is None:
        return ""
    return f" at the end, {escape(mark.name)} <b>{escape(number(mark.value))}</b> at step {mark.step:,.0f}"


def _make_frame(curves: Sequence[Curve], *, from_zero: bool) -> _Frame:
    steps = [step for curve in curves for step in curve.series.steps]
    lows = [value for curve in curves for value in curve.series.low]
    highs = [value for curve in curves for value in curve.series.high]
    x_low, x_high = min(steps), max(steps)
    low = min(0.0, *lows) if from_zero else min(lows)
    return _Frame(x_low, x_high if x_high > x_low else x_low + 1, nice_ticks(low, max(highs), count=5))


def _curve_shapes(curve: Curve, frame: _Frame) -> str:
    series = curve.series
    shapes = ""
    values: Sequence[float] = series.values
    if series.is_joined:
        upper = list(zip(series.steps, series.high, strict=True))
        lower = list(zip(series.steps, series.low, strict=True))
        shapes += f'<path class="band {curve.style}" d="{_path([*upper, *reversed(lower)], frame)}Z"/>'
    elif curve.is_smoothed and len(series) >= _SMOOTH_FROM:
        raw = _path(list(zip(series.steps, values, strict=True)), frame)
        shapes += f'<path class="raw {curve.style}" d="{raw}"/>'
        values = smooth(values)
    return (
        shapes + f'<path class="line {curve.style}" d="{_path(list(zip(series.steps, values, strict=True)), frame)}"/>'
    )


def _path(points: Sequence[tuple[float, float]], frame: _Frame) -> str:
    return "M" + "L".join(f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in points)


def _grid_line(y: float) -> str:
    return f'<path class="grid" d="M0 {y:.1f}H{_WIDTH:.0f}"/>'


def _dots(curves: Sequence[Curve], frame: _Frame) -> str:
    """Returns dots as HTML, since circles would be stretched with the drawing; a single point is always a dot."""
    dots = [
        (curve.style, step, value)
        for curve in curves
        if curve.has_dots or len(curve.series) == 1
        for step, value in zip(curve.series.steps, curve.series.values, strict=True)
    ]
    dots += [(f"{curve.style} best", curve.marked.step, curve.marked.value) for curve in curves if curve.marked]
    return "".join(
        f'<i class="dot {style}" style="left:{frame.x(step) / _WIDTH:.2%};top:{frame.y(value) / _HEIGHT:.2%}"></i>'
        for style, step, value in dots
    )


def _pointer_bands(curves: Sequence[Curve], frame: _Frame, number: NumberFormat) -> str:
    """Returns invisible upright bands, each with the values nearest to its middle as its title."""
    num_bands = min(_MAX_BANDS, max(len(curve.series) for curve in curves))
    width = _WIDTH / num_bands
    bands = []
    for index in range(num_bands):
        middle = frame.x_low + (index + 0.5) / num_bands * (frame.x_high - frame.x_low)
        lines = []
        for curve in curves:
            nearest = _nearest(curve.series.steps, middle)
            lines.append(
                f"step {curve.series.steps[nearest]:,.0f}: {curve.name} {number(curve.series.values[nearest])}"
            )
        text = escape("\n".join(lines))
        bands.append(
            f'<rect class="pointer" x="{index * width:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT:.0f}">'
            f"<title>{text}</title></rect>"
        )
    return "".join(bands)


def _nearest(steps: Sequence[float], wanted: float) -> int:
    right = bisect.bisect_left(steps, wanted)
    candidates = [index for index in (right - 1, right) if 0 <= index < len(steps)]
    return min(candidates, key=lambda index: abs(steps[index] - wanted))


def _y_labels(frame: _Frame, number: NumberFormat) -> str:
    return "".join(
        f'<span style="top:{frame.y(tick) / _HEIGHT:.2%}">{escape(number(tick))}</span>' for tick in frame.y_ticks
    )


def _x_labels(frame: _Frame) -> str:
    ticks = [tick for tick in nice_ticks(frame.x_low, frame.x_high, count=5) if frame.x_low <= tick <= frame.x_high]
    whole = [tick for tick in ticks if tick == round(tick)]
    labels = [f'<span style="left:{frame.x(tick) / _WIDTH:.2%}">{tick:,.0f}</span>' for tick in whole]
    return "<em>step</em>" + "".join(labels)
