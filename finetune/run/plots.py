"""`curves.png`: the run's curves as one picture, for slides and messages."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.run.atomic import write_bytes
from finetune.run.series import extract_series, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 1 / 1024**3
_PANELS = (
    ("real_tokens_per_second", "real tokens per second", 1.0),
    ("peak_memory_bytes", "peak GPU memory, GiB", _GIB),
    ("learning_rate", "learning rate", 1.0),
    ("grad_norm", "gradient norm", 1.0),
)
_BLUE, _ORANGE, _GRAY = "#2459c4", "#c2570c", "#8a94a6"


def write_curves_png(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss, rate, memory, learning rate and gradient norm over the steps into `path`, in one step.

    A run without a GPU shows the memory of its process. Matplotlib's object interface with the Agg canvas is used,
    which needs no display and leaves pyplot's state alone.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 2)
    _draw_loss(figure.add_subplot(grid[0, :]), metrics)
    for index, (key, title, scale) in enumerate(_PANELS):
        if key == "peak_memory_bytes" and not any(record.get(key) for record in metrics):
            key, title = "host_memory_bytes", "memory of the process, GiB"
        series = extract_series(metrics, kind="train", key=key, scale=scale)
        axis = figure.add_subplot(grid[1 + index // 2, index % 2])
        axis.plot(series.steps, series.values, color=_BLUE, linewidth=1.6)
        if series.values:
            axis.set_ylim(bottom=0)
        _dress(axis, title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes(path, picture.getvalue())


def _draw_loss(axis: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    train = extract_series(metrics, kind="train", key="loss")
    held_out = extract_series(metrics, kind="eval", key="eval_loss")
    if len(train):
        axis.plot(train.steps, train.values, color=_BLUE, linewidth=0.9, alpha=0.35)
        axis.plot(train.steps, smooth(train.values), color=_BLUE, linewidth=1.8, label="training")
    if len(held_out):
        axis.plot(held_out.steps, held_out.values, "o", color=_ORANGE, linestyle=":", markersize=5, label="held out")
    if len(train) or len(held_out):
        axis.legend(frameon=False, fontsize=9)
    _dress(axis, "loss per learned token")


def _dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("step", fontsize=9, color=_GRAY)
    axis.grid(True, color="#e6e9ef", linewidth=0.8)
    axis.tick_params(labelsize=9, colors="#444c5c")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#c8cdd8")
