"""`report.html`: the run on one self-contained page, without scripts and without the network."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import PurePath
from typing import Any

import yaml

from finetune.console import plural
from finetune.run.answers import render_before_and_after, render_over_steps
from finetune.run.chart import Curve, Mark, render_chart
from finetune.run.fragments import (
    format_axis,
    format_bytes,
    format_plain,
    format_seconds,
    format_value,
    humanize,
    render_pairs,
    render_rows,
    round_numbers,
)
from finetune.run.page import render_card, render_cards, render_page, render_section
from finetune.run.report import delivered_part
from finetune.run.samples import SampleAnswer
from finetune.run.series import extract_series

_BADGES = {
    "done": ("good", "Done"),
    "early-stopped": ("good", "Stopped early"),
    "running": ("plain", "Running"),
    "killed": ("bad", "Killed"),
    "interrupted": ("warn", "Interrupted"),
    "stopped": ("bad", "Stopped"),
    "failed": ("bad", "Failed"),
}
_CHECK_MARKS = {
    "ok": ("", "&check;", "passed"),
    "warning": ("warns", "!", "warning"),
    "failed": ("no", "&cross;", "failed"),
    "na": ("na", "&ndash;", "not applicable"),
}
_TIME_NAMES = {"total_seconds": "last_command_in_all_seconds", "training_seconds": "steps_over_all_starts_seconds"}
_PLAIN_ARGUMENT = re.compile(r"[\w@%+=:,./~*-]+")
_SHARE_SCORES = frozenset({"exact_match", "accuracy", "f1"})


def render_html(
    report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], *, answers: Sequence[SampleAnswer] = ()
) -> str:
    """Returns the page for a report of `build_report`, the records of its `metrics.jsonl` and of its `samples.jsonl`.

    The page needs no other file. It follows the reader's light or dark theme and fits a telephone.
    """
    title = _run_name(report)
    body = "".join(
        (
            _outcome(report, title),
            render_section(
                "Curves", _curves(metrics, report.get("result") or {}) + _spikes(report.get("spikes") or ())
            ),
            render_section("Answers before and after", render_before_and_after(report.get("samples") or ())),
            render_section("Answers over the steps", render_over_steps(_news(report, answers))),
            render_section(
                "What is trained",
                render_cards(render_card(render_pairs(report["trained"]))) if report.get("trained") else "",
            ),
            render_section("Checks and results", _results(report)),
            render_section("Data", _ledgers(report.get("ledgers") or {})),
            render_section("Plan and time", _plan(report)),
            render_section("Environment", _environment(report.get("environment") or {})),
            render_section("Recipe", _recipe(report.get("recipe") or {})),
        )
    )
    return render_page(title, body, footer="The numbers are in report.json and metrics.jsonl.")


def _run_name(report: Mapping[str, Any]) -> str:
    folder = (report.get("recipe") or {}).get("output", {}).get("dir", "")
    return PurePath(str(folder)).name or "run"


def _outcome(report: Mapping[str, Any], title: str) -> str:
    style, word = _BADGES.get(str(report.get("status")), ("plain", str(report.get("status"))))
    recipe = report.get("recipe") or {}
    adapter = recipe.get("adapter") or {}
    method = f"LoRA rank {adapter.get('rank')}" if adapter.get("type") == "lora" else "full fine-tuning"
    model = recipe.get("model") or {}
    quantization = model.get("quantization", "none")
    parts = [str(model.get("path", "")), method, "" if quantization == "none" else f"{quantization} weights"]
    lead = ", ".join(part for part in parts if part)
    message = f'<p class="message">{escape(str(report["message"]))}</p>' if report.get("message") else ""
    num_warnings = sum(check.get("status") == "warning" for check in report.get("checks") or ())
    warned = f'<span class="badge warn">{plural(num_warnings, "warning")}</span>' if num_warnings else ""
    return (
        f'<header><div class="top"><span class="brand">finetune</span><span class="badge {style}">{escape(word)}</span>'
        f"{warned}"
        f"<span>{escape(_when(str(report.get('created', ''))))}</span></div>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{message}'
        f'<div class="heroes">{_heroes(report)}</div>{_key_facts(report)}</header>\n'
    )


def _when(created: str) -> str:
    return created.replace("T", " ").replace("+00:00", " UTC")


def _heroes(report: Mapping[str, Any]) -> str:
    """Returns the large before-and-after cards: scores first, then the held-out loss, else the training loss."""
    summary = report.get("summary") or {}
    heroes = [_score_hero(name, score) for name, score in (report.get("scores") or {}).items()]
    before, after = summary.get("eval_loss_before"), summary.get("eval_loss_after")
    if before is not None or after is not None:
        heroes.append(_hero("Held-out loss", _loss(before), _loss(after), note=_change_note(before, after)))
    elif summary.get("train_loss_last") is not None:
        first, last = summary.get("train_loss_first"), summary["train_loss_last"]
        heroes.append(_hero("Training loss", _loss(first), _loss(last), note="first and last logged step"))
    return "".join(heroes)


def _score_hero(name: str, score: Mapping[str, Any]) -> str:
    before, after = score.get("before"), score.get("after")
    is_share = name in _SHARE_SCORES
    number = "{:.1%}".format if is_share else format_plain
    note = f"{score['rows']:,} held-out samples" if score.get("rows") is not None else ""
    if before is not None and after is not None:
        difference = f"{100 * (after - before):+.1f} points" if is_share else f"{after - before:+.4g}"
        note = f"{difference} on {note}" if note else difference
    meter = ""
    if is_share and after is not None:
        bars = f'<i style="width:{after:.1%}"></i><i class="was" style="width:{min(before or 0.0, after):.1%}"></i>'
        meter = f'<div class="meter">{bars}</div>'
    texts = [number(value) if value is not None else None for value in (before, after)]
    return _hero(humanize(name), texts[0], texts[1], note=note, meter=meter)


def _hero(name: str, before: str | None, after: str | None, *, note: str, meter: str = "") -> str:
    was = ""
    if before and after:
        was = f'<span class="before">{escape(before)}</span><span class="arrow" aria-label="to">&rarr;</span>'
    elif before:
        note = f"before training, {note}"
    return (
        f'<div class="card hero"><div class="name"><span>{escape(name)}</span></div><div class="change">{was}'
        f'<span class="after">{escape(after or before or "-")}</span></div>{meter}'
        f'<p class="note">{escape(note)}</p></div>'
    )


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _change_note(before: float | None, after: float | None) -> str:
    if before is None or after is None or before == 0:
        return "per learned token, lower is better"
    word = "lower" if after < before else "higher"
    return f"{abs(1 - after / before):.0%} {word}, per learned token"


def _key_facts(report: Mapping[str, Any]) -> str:
    summary, timings = report.get("summary") or {}, report.get("timings") or {}
    rate = timings.get("real_tokens_per_second", summary.get("real_tokens_per_second_median"))
    facts = [
        ("Steps", summary.get("steps"), format_plain),
        ("Tokens trained", summary.get("real_tokens"), format_axis),
        ("Tokens per second", rate, format_plain if (rate or 0) < 1000 else "{:,.0f}".format),
        ("Peak GPU memory", summary.get("peak_memory_bytes") or None, format_bytes),
        ("To first step", timings.get("seconds_to_first_step"), format_seconds),
        ("All steps took", timings.get("training_seconds"), format_seconds),
        ("Last command took", timings.get("total_seconds"), format_seconds),
    ]
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{escape(form(value))}</dd></div>" for name, value, form in facts if value is not None
    )
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def _curves(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    train = partial(extract_series, metrics, kind="train")
    held_out = extract_series(metrics, kind="eval", key="eval_loss")
    loss = [
        Curve("training", train(key="loss"), is_smoothed=True),
        Curve("held out", held_out, style="second", has_dots=True, marked=_best(metrics, result)),
    ]
    gib = 1 / 1024**3
    card = [
        Curve("peak so far", train(key="peak_memory_bytes", scale=gib)),
        Curve("after the step", train(key="memory_bytes", scale=gib), style="second"),
    ]
    process = [Curve("last", train(key="host_memory_bytes", scale=gib))]
    rate = [Curve("last", train(key="real_tokens_per_second"), is_smoothed=True)]
    has_card = any(value for curve in card for value in curve.series.values)
    charts = [
        render_chart("Loss per learned token", loss, number="{:.4g}".format),
        render_chart("Real tokens per second", rate, number="{:,.0f}".format, from_zero=True),
        render_chart("GPU memory, GiB", card if has_card else [], number="{:.3g}".format, from_zero=True),
        render_chart("Memory of the process, GiB", process, number="{:.3g}".format, from_zero=True),
        render_chart("Learning rate", [Curve("last", train(key="learning_rate"))], number=format_axis, from_zero=True),
        render_chart("Gradient norm", [Curve("last", train(key="grad_norm"))], number="{:.3g}".format, from_zero=True),
    ]
    drawn = "".join(charts)
    return f'<div class="charts">{drawn}</div>' if drawn else '<p class="soft">Nothing was logged.</p>'


def _best(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> Mark | None:
    """Returns the point of the best weights, where these are not the last that were measured."""
    best = result.get("best") or {}
    last = max((record.get("step", 0) for record in metrics if record.get("kind") == "eval"), default=0)
    if best.get("step") in (None, last) or best.get("eval_loss") is None:
        return None
    return Mark("delivered" if result.get("delivered") == "best" else "best", best["step"], best["eval_loss"])


def _spikes(spikes: Sequence[Mapping[str, Any]]) -> str:
    return render_card(f"<h4>Spikes</h4>{render_rows(spikes)}") if spikes else ""


def _news(report: Mapping[str, Any], answers: Sequence[SampleAnswer]) -> Sequence[SampleAnswer]:
    """Returns the answers where they tell more than those before the first step and those of the result do."""
    samples = report.get("samples") or ()
    told = {0} if samples else set[int]()
    if any(sample.get("after") is not None for sample in samples):
        told.add(delivered_part(report.get("result") or {}).get("step", (report.get("summary") or {}).get("steps", 0)))
    return answers if {answer.step for answer in answers} - told else ()


def _results(report: Mapping[str, Any]) -> str:
    cards = []
    if report.get("checks"):
        cards.append(render_card(f'<ul class="checks">{"".join(_check(item) for item in report["checks"])}</ul>'))
    parts = [(name, report.get(name.lower())) for name in ("Artifacts", "Checkpoints")]
    tables = [f"<h4>{name}</h4>{render_rows(rows)}" for name, rows in parts if rows]
    if tables:
        cards.append(render_card('<div class="gap"></div>'.join(tables)))
    return render_cards(*cards) if cards else ""


def _check(check: Mapping[str, Any]) -> str:
    status = check.get("status") or {None: "na", True: "ok", False: "failed"}[check.get("ok")]
    style, mark, word = _CHECK_MARKS[status]
    detail = (
        f'<br><span class="soft">{escape(round_numbers(str(check["detail"])))}</span>' if check.get("detail") else ""
    )
    name = escape(str(check.get("name", "")))
    return f'<li class="{style}"><b role="img" aria-label="{word}">{mark}</b><div>{name}{detail}</div></li>'


def _ledgers(ledgers: Mapping[str, Any]) -> str:
    cards = [
        render_card(render_pairs(ledger, caption=humanize(str(name))))
        for name, ledger in ledgers.items()
        if isinstance(ledger, Mapping) and ledger
    ]
    loose = {name: value for name, value in ledgers.items() if not isinstance(value, Mapping)}
    if loose:
        cards.append(render_card(render_pairs(loose)))
    return render_cards(*cards) if cards else ""


def _plan(report: Mapping[str, Any]) -> str:
    # The clock of a command begins with it; the steps' own time goes on where a run is continued.
    times = {_TIME_NAMES.get(key, key): value for key, value in (report.get("timings") or {}).items()}
    parts = [(report.get("plan"), "Plan"), (times, "Time")]
    cards = [render_card(render_pairs(pairs, caption=caption)) for pairs, caption in parts if pairs]
    return render_cards(*cards) if cards else ""


def _environment(environment: Mapping[str, Any]) -> str:
    if not environment:
        return ""
    packages = environment.get("packages") or {}
    command = environment.get("command") or []
    rest = {key: value for key, value in environment.items() if key not in ("packages", "command")}
    cards = [render_card(render_pairs(rest, caption="Machine and program"))]
    if packages:
        cards.append(render_card(render_pairs(packages, caption="Packages", is_verbatim=True)))
    line = _command_line(command) if isinstance(command, list) else format_value("", command)
    shown = f'<div class="card" style="margin-top:14px"><h4>Command</h4><pre tabindex="0">{escape(line)}</pre></div>'
    return render_cards(*cards) + (shown if line else "")


def _command_line(command: Sequence[object]) -> str:
    """Returns a command as one types it; `python -m finetune` is recorded by the file that it runs."""
    program, *arguments = [str(part) for part in command] or [""]
    program = "python -m finetune" if program == "__main__.py" else program
    return " ".join([program, *(part if _PLAIN_ARGUMENT.fullmatch(part) else shlex.quote(part) for part in arguments)])


def _recipe(recipe: Mapping[str, Any]) -> str:
    if not recipe:
        return ""
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=False)
    return f'<details class="card" open><summary>recipe.yaml</summary><pre tabindex="0">{escape(text)}</pre></details>'
