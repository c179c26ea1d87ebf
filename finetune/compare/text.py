"""Comparisons and lists for people: at 80 columns, and without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len

from finetune.compare.diff import ABSENT, Part, RunDiff
from finetune.compare.listing import ListedRun
from finetune.console import PLAIN_WIDTH, Console

_STYLES = {
    "done": "green", "early-stopped": "green", "running": "cyan", "broken": "red", "failed": "red", "stopped": "red",
}  # fmt: skip
_STATUS_WIDTH = len("early-stopped")
_TITLES = {
    "recipe": "recipe",
    "data": "data",
    "environment": "environment",
    "trained": "trained weights",
    "metrics": "figures",
}
_MAX_DIGITS = 17


def show_diff(console: Console, diff: RunDiff) -> None:
    """Prints both runs, then each part with what differs in it, then a closing line."""
    for letter, run in (("a", diff.a), ("b", diff.b)):
        console.line(f"{letter}  {run.path} ({run.status})")
    for part in diff.parts:
        console.line()
        _show_part(console, part)
    console.line()
    different = [_TITLES[part.name] for part in diff.parts if part.verdict == "different"]
    unknown = [_TITLES[part.name] for part in diff.parts if part.not_known]
    if diff.is_same:
        console.line("nothing differs (output.dir and the command typed are not compared)", style="bold")
    elif different:
        console.line(f"different: {', '.join(different)}", style="bold")
    if unknown:
        console.line(f"not compared in full: {', '.join(unknown)}", style="bold")


def _show_part(console: Console, part: Part) -> None:
    title, count = _TITLES[part.name], len(part.differences)
    words = {"same": f"the same ({part.num_compared} values)", "unknown": "no difference in what is known"}
    text = words.get(part.verdict) or f"{count} of {part.num_compared} values differ"
    console.line(f"{title}: {text}", style="bold")
    if part.not_known:
        for line in wrapped(f"not known: {part.not_known}", indent="  "):
            console.line(line)
    if count:
        has_change = part.name == "metrics"
        rows = [
            (item.key, *_pair(item.a, item.b), *([_change(item.a, item.b)] * has_change)) for item in part.differences
        ]
        console.table("", ("key", "a", "b", *(["change"] * has_change)), rows)


def _pair(a: Any, b: Any) -> tuple[str, str]:
    """Returns two values as text; numbers have as many digits as it takes to see that they differ."""
    if isinstance(a, float) or isinstance(b, float):
        for digits in range(4, _MAX_DIGITS + 1):
            texts = _text(a, digits), _text(b, digits)
            if texts[0] != texts[1]:
                return texts
    return _text(a), _text(b)


def _text(value: Any, digits: int | None = None) -> str:
    if value is ABSENT:
        return "(absent)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.{digits}g}" if isinstance(value, float) and digits else str(value)


def _change(a: Any, b: Any) -> str:
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return f"{b / a - 1:+.1%}" if is_number and a else ""


def show_runs(console: Console, runs: list[ListedRun], *, folder: str) -> None:
    """Prints two lines a run: when and how it went, then what it was."""
    if not runs:
        console.line(f"no runs in or below {folder}")
        return
    name_width = min(max(cell_len(run.name) for run in runs), PLAIN_WIDTH - _STATUS_WIDTH - 31)
    for run in runs:
        when = run.created.astimezone().strftime("%Y-%m-%d %H:%M") if run.created else ""
        name = run.name + " " * (name_width - cell_len(run.name))
        head = [(f"{name}  ", "bold"), (f"{run.status:<{_STATUS_WIDTH}}", _STYLES.get(run.status, "yellow"))]
        console.spans([*head, (f"  {when:<16}  {duration(run.seconds):>8}".rstrip(), "")])
        for line in wrapped(_details(run), indent="    "):
            console.line(line)
    broken = sum(run.status == "broken" for run in runs)
    count = "1 run" if len(runs) == 1 else f"{len(runs):,} runs"
    console.line(f"{count}, {broken:,} of them broken" if broken else count)


def _details(run: ListedRun) -> str:
    if run.reason:
        return run.reason
    steps = f"{run.steps or 0:,}" + (f" of {run.total_steps:,}" if run.total_steps else "") + " steps"
    loss = (
        f"{run.loss_kind} loss {_loss(run.loss_before)} -> {_loss(run.loss_after)}" if run.loss_kind else "no loss yet"
    )
    return ", ".join(part for part in (run.model, run.method, steps, loss) if part)


def _loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def duration(seconds: float | None) -> str:
    """Returns a time in its two largest units, such as `1h 05m` or `2m 08s`."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours < 48 else f"{hours // 24}d {hours % 24:02}h"


def wrapped(text: str, *, indent: str = "", width: int = PLAIN_WIDTH) -> list[str]:
    """Returns prose in lines of at most `width` columns; a word longer than that, as a path is, stays whole."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
