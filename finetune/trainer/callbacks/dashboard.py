"""The picture of a running training for the terminal: plain values in, one renderable out. Fits 80 by 24."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from finetune.run.spoken import last_question, without_control_tokens
from finetune.trainer.callbacks.text_chart import History, draw_chart

_MAX_WIDTH = 120
_MAX_CHART_LINES = 9
_MIN_CHART_LINES = 4
_MIN_CHART_WIDTH = 40
_ROOM_ABOVE = 2
"""Lines of the terminal left to what is printed above the panel."""
_GIB = 1024**3


class Sample(Protocol):
    """An answer of the model to a held-out prompt."""

    @property
    def step(self) -> int: ...
    @property
    def prompt(self) -> str: ...
    @property
    def reference(self) -> str | None: ...
    @property
    def answer(self) -> str: ...


@dataclass
class View:
    """What is shown. Numbers are those that were logged; nothing here asks the device."""

    title: str
    step: int = 0
    total_steps: int = 1
    latest: Mapping[str, Any] = field(default_factory=dict)
    """The latest training record."""
    training: History = field(default_factory=History)
    held_out: History = field(default_factory=History)
    elapsed_seconds: float = 0.0
    seconds_left: float | None = None
    sample: Sample | None = None


def render_dashboard(view: View, *, width: int, height: int, ascii_only: bool = False) -> RenderableType:
    """Returns a panel of at most `width` characters and `height - 2` lines; a small terminal shows less of it.

    The loss goes last: in a single line it stands alone.
    """
    width = min(width, _MAX_WIDTH)
    inner = max(10, width - 4)
    loss = _losses(view)
    left = height - _ROOM_ABOVE - 4
    parts: list[RenderableType] = [loss] if left < 0 else [_progress(view), loss]
    facts = _facts_table(view, inner)
    if left >= 3:
        parts += [Text(""), facts]
        left -= 3
    sample = _sample_lines(view.sample, inner)
    if sample and left >= len(sample) + 1:
        parts += [Text(""), *sample]
        left -= len(sample) + 1
    chart_lines = min(_MAX_CHART_LINES, left - 1)
    if chart_lines >= _MIN_CHART_LINES and inner >= _MIN_CHART_WIDTH:
        chart = draw_chart(
            view.training.points,
            view.held_out.points,
            width=inner,
            height=chart_lines,
            last_step=view.total_steps,
            ascii_only=ascii_only,
        )
        parts[1:2] = [Text(""), _legend(view, ascii_only=ascii_only), *chart]
    title = Text(_printable(view.title), style="bold")
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim", width=width)


def latest_facts(logs: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names and texts of a training record's figures, in the order they are shown."""
    facts: dict[str, str] = {}
    for key, name, form in _SHOWN:
        value = plain_number(logs.get(key))
        if value is not None and not (key in _ZERO_WITHOUT_GPU and value == 0):
            facts[name] = form(value)
    return facts


def plain_number(value: object) -> float | None:
    """Returns a number, NaN included, as float; None for what is missing or not a number."""
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    return float(plain) if isinstance(plain, int | float) and not isinstance(plain, bool) else None


def format_clock(seconds: float) -> str:
    """Returns a duration as `0:07`, `12:05` or `3:20:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _progress(view: View) -> Table:
    total = max(1, view.total_steps)
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    left = "" if view.seconds_left is None else f"  left {format_clock(view.seconds_left)}"
    text = f"step {view.step:,}/{total:,}  {100 * view.step / total:.0f}%  {format_clock(view.elapsed_seconds)}{left}"
    grid.add_row(ProgressBar(total=total, completed=view.step, complete_style="cyan", finished_style="green"), text)
    return grid


def _legend(view: View, *, ascii_only: bool) -> Text:
    loss = latest_facts(view.latest).get("loss", "")
    line, mark = ("*", "o") if ascii_only else ("\u2500", "\u25cf")
    text = Text.assemble(("loss      ", "dim"), (line, "cyan"), " training ", (loss, "bold"))
    if view.held_out.points:
        text.append(f"   {mark}", style="bold yellow")
        text.append(" held out ")
        text.append(f"{view.held_out.last:.4f}", style="bold")
    return text


def _losses(view: View) -> Text:
    """The losses without a key to a chart."""
    loss = latest_facts(view.latest).get("loss", "-")
    text = Text.assemble(("loss ", "dim"), (loss, "bold"), no_wrap=True, overflow="ellipsis")
    if view.held_out.points:
        text.append("  held out ", style="dim")
        text.append(f"{view.held_out.last:.4f}", style="bold")
    return text


def _facts_table(view: View, inner: int) -> Table:
    # Columns of one width keep the panel still while the numbers change.
    facts = {name: text for name, text in latest_facts(view.latest).items() if name != "loss"}
    if "peak" in facts:
        facts.pop("process", None)
    num_columns = max(1, inner // 12)
    for name in ("aux loss", "grad norm"):  # what is missed least where there is no room
        if len(facts) > num_columns:
            facts.pop(name, None)
    shown = list(facts.items())[:num_columns] or [("", "waiting for the first step")]
    column = inner // len(shown)
    table = Table.grid()
    for _ in shown:
        table.add_column(width=column, no_wrap=True)
    table.add_row(*(Text(name, style="dim") for name, _ in shown))
    table.add_row(*(Text(text, style="bold") for _, text in shown))
    return table


def _sample_lines(sample: Sample | None, inner: int) -> list[Text]:
    if sample is None:
        return []
    lines = [("prompt", last_question(sample.prompt)), (f"step {sample.step:,}", sample.answer)]
    if sample.reference is not None:
        lines.append(("wanted", sample.reference))
    width = max(len(name) for name, _ in lines) + 2
    shown = []
    for name, text in lines:
        line = Text.assemble((name.ljust(width), "dim"), _one_line(text) or "(empty)")
        line.truncate(inner, overflow="ellipsis")
        shown.append(line)
    return shown


def _one_line(text: str) -> str:
    return " ".join(_printable(without_control_tokens(text)).split())


def _printable(text: str) -> str:
    """Replaces control characters, so that what a model says cannot steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _gib(value: float) -> str:
    return f"{value / _GIB:.1f} GiB"


_ZERO_WITHOUT_GPU = ("memory_bytes", "peak_memory_bytes")
_SHOWN = (
    ("loss", "loss", "{:.4f}".format),
    ("aux_loss", "aux loss", "{:.4f}".format),
    ("learning_rate", "lr", "{:.2e}".format),
    ("grad_norm", "grad norm", "{:.3g}".format),
    ("real_tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("memory_bytes", "GPU now", _gib),
    ("peak_memory_bytes", "peak", _gib),
    ("host_memory_bytes", "process", _gib),
)
