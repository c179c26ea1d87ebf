"""`curves.png`: the run's curves as one picture, for slides and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.run.series import extract_series, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (
    ("learning_rate", "learning rate", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("real_tokens_per_second", "tokens/s", 1.0),
)
_BLUE, _ORANGE, _GRAY = "#2459c4", "#c2570c", "#8a94a6"


def write_curves_png(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss, learning rate, gradient norm and rate over the steps into `path`.

    Matplotlib's object interface with the Agg canvas is used, which needs no display and leaves pyplot's state alone.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _draw_loss(axes[0][0], metrics)
    for axis, (key, title, scale) in zip((axes[0][1], axes[1][0], axes[1][1]), _PANELS, strict=True):
        series = extract_series(metrics, kind="train", key=key, scale=scale)
        axis.plot(series.steps, series.values, color=_BLUE, linewidth=1.6)
        _dress(axis, title)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw_loss(axis: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    train = extract_series(metrics, kind="train", key="loss")
    held_out = extract_series(metrics, kind="eval", key="eval_loss")
    if len(train):
        axis.plot(train.steps, train.values, color=_BLUE, linewidth=0.9, alpha=0.35)
        axis.plot(train.steps, smooth(train.values, weight=0.8), color=_BLUE, linewidth=1.8, label="training")
    if len(held_out):
        axis.plot(held_out.steps, held_out.values, color=_ORANGE, marker="o", markersize=4, label="held out")
    if len(train) or len(held_out):
        axis.legend(frameon=False, fontsize=9)
    _dress(axis, "loss")


def _dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("step", fontsize=9, color=_GRAY)
    axis.grid(True, color="#e6e9ef", linewidth=0.8)
    axis.tick_params(labelsize=9, colors="#444c5c")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#c8cdd8")
