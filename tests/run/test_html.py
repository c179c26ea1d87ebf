"""The page is one well-formed file that loads nothing and runs nothing."""

from __future__ import annotations

import math
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pages import EVIL, full_page, metrics

from finetune.run.fragments import format_axis, format_seconds, format_value, humanize
from finetune.run.html import render_html
from finetune.run.plots import write_curves_png
from finetune.run.report import ReportInputs, build_report
from finetune.run.samples import SampleAnswer
from finetune.run.series import extract_series, nice_ticks, smooth

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def test_page_is_well_formed_and_escapes_every_user_text() -> None:
    page = Page(full_page())
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "object", "embed", "base", "form"}
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert page.text.count(EVIL) >= 20


def test_page_loads_nothing() -> None:
    text = full_page()
    for _, attributes in Page(text).tags:
        for name in ("src", "href", "srcset", "data", "action", "xlink:href"):
            assert attributes.get(name, "data:,") == "data:,"
    assert not re.search(r"https?://|@import|url\(", text)


def test_page_shows_outcome_scores_and_results() -> None:
    text = Page(full_page()).text
    for wanted in ("Done", "10.0%", "90.0%", "+80.0 points on 1,200 held-out samples", "3.000", "1.000", "1 h 2 min"):
        assert wanted in text
    assert "equals the reference" in text and "not generated" in text and "3.0 MiB" in text
    assert "prefers-color-scheme: dark" in full_page() and "width=device-width" in full_page()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5000])
def test_page_of_a_short_or_long_run_stays_small_and_finite(num_steps: int) -> None:
    text = full_page(num_steps)
    Page(text)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower()
    assert len(text) < 250_000


def test_page_of_a_run_that_failed_at_once() -> None:
    report = build_report(ReportInputs(status="failed", recipe={}, message="out of memory"))
    page = Page(render_html(report, []))
    assert "Failed" in page.text and "out of memory" in page.text and "Nothing was logged" in page.text


def test_memory_of_a_cpu_run_is_not_drawn() -> None:
    records = [{**record, "peak_memory_bytes": 0} for record in metrics(5)]
    text = render_html(build_report(ReportInputs(status="done", recipe={}, metrics=records)), records)
    assert "GPU memory" not in text and "Gradient norm" in text
    with_host = [{**record, "host_memory_bytes": 2**30} for record in records]
    assert "Memory of the process, GiB" in render_html(
        build_report(ReportInputs(status="done", recipe={}, metrics=with_host)), with_host
    )
    on_gpu = render_html(build_report(ReportInputs(status="done", recipe={}, metrics=metrics(5))), metrics(5))
    assert "GPU memory, GiB" in on_gpu


def test_answers_over_the_steps_are_shown_where_they_tell_more() -> None:
    sample = {"prompt": "p", "reference": "r", "before": "b", "after": None}
    records = metrics(10)

    def page(samples: list[dict[str, Any]], *answers: tuple[int, str]) -> str:
        report = build_report(ReportInputs(status="running", recipe={}, metrics=records, samples=samples))
        return Page(render_html(report, records, answers=[SampleAnswer(s, EVIL, "r", a) for s, a in answers])).text

    assert "over the steps" not in page([sample], (0, "b"))
    assert "step 5 equal" in page([sample], (0, "b"), (5, "r"))
    assert "over the steps" not in page([{**sample, "after": "r"}], (0, "b"), (10, "r"))
    assert "over the steps" in page([{**sample, "after": "r"}], (0, "b"), (5, EVIL), (10, "r"))
    assert "step 0" in page([], (0, "b"))
    assert "1 prompt, answered 12 times each" in page([], *((step, "b") for step in range(12)))
    many = page([], *((step, "b") for step in range(25)))
    assert "answered 25 times each; 12 are shown, the other 13 are in samples.jsonl" in many


def test_a_warning_is_no_tick_and_is_counted_at_the_top() -> None:
    warned = {"name": "data: duplicates", "ok": False, "status": "warning", "detail": "2 of 9 are equal"}
    passed = {"name": "data: length", "ok": True, "status": "ok", "detail": "loss 5.036827087402344 of 1.5"}
    html = render_html(build_report(ReportInputs(status="done", recipe={}, checks=[warned, passed])), [])
    assert '<li class="warns"><b role="img" aria-label="warning">!</b><div>data: duplicates' in html
    assert '<span class="badge warn">1 warning</span>' in html
    assert "loss 5.037 of 1.5" in html
    without = render_html(build_report(ReportInputs(status="done", recipe={}, checks=[passed])), [])
    assert "badge warn" not in without.partition("</style>")[2]


def test_the_best_step_is_marked_where_it_is_not_the_last() -> None:
    records = [*metrics(10), {"kind": "eval", "step": 5, "eval_loss": 0.5}]
    result = {"delivered": "best", "path": "a", "best": {"step": 5, "eval_loss": 0.5}, "last": {"step": 10}}

    def page(best: dict[str, Any]) -> str:
        report = build_report(ReportInputs(status="early-stopped", recipe={}, metrics=records))
        return render_html({**report, "result": {**result, "best": best}}, records)

    assert "delivered <b>0.5</b> at step 5" in page(result["best"]) and 'class="dot second best"' in page(
        result["best"]
    )
    assert "at step 10" not in page({"step": 10, "eval_loss": 1.0})


def test_a_command_can_be_typed_again() -> None:
    command = ["__main__.py", "train", "c.yaml", "data.train=[{path: a}]"]
    html = render_html(build_report(ReportInputs(status="done", recipe={}, environment={"command": command})), [])
    assert escape("python -m finetune train c.yaml 'data.train=[{path: a}]'") in html


def test_page_of_long_answers_stays_under_two_megabytes() -> None:
    long = "<" * 40_000
    records = metrics(100_000)
    samples = [{"prompt": long, "reference": long, "before": long, "after": long} for _ in range(300)]
    answers = [
        SampleAnswer(step, f"{prompt}{long}", long, long) for step in range(0, 3000, 50) for prompt in range(300)
    ]
    ledger = {"notes": ["x" * 200] * 10_000, "sources": [{"path": "p" * 200}] * 5000}
    report = build_report(
        ReportInputs(status="done", recipe={}, metrics=records, samples=samples, ledgers={"train": ledger})
    )
    text = render_html(report, records, answers=answers)
    assert len(text.encode()) < 2_000_000
    for left_out in ("280 more prompts", "38,500 more characters", "and 9,950 more", "4,950 more"):
        assert left_out in text


def test_long_series_keep_mean_extremes_and_last_value() -> None:
    series = extract_series(metrics(5000), kind="train", key="loss")
    losses = [2 + math.sin(step) for step in range(1, 5001)]
    assert len(series) == 400 and series.is_joined
    assert (min(series.low), max(series.high), series.last) == (min(losses), max(losses), losses[-1])
    assert abs(sum(series.values) / 400 - sum(losses) / 5000) < 0.01


def test_smoothing_keeps_a_straight_line_and_does_not_lag() -> None:
    line = [10.0 - 0.1 * step for step in range(100)]
    assert smooth(line) == pytest.approx(line)
    zigzag = [value + (-1) ** index for index, value in enumerate(line)]
    assert max(abs(a - b) for a, b in zip(smooth(zigzag)[5:-5], line[5:-5], strict=True)) < 0.35
    assert smooth([]) == [] and smooth([2.0]) == [2.0]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (2.0, 2.0), (-3, 17), (1e-5, 2e-4), (0, 1.23e9), (0.7, 0.71)])
def test_ticks_enclose_the_values_and_are_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high, count=5)
    rounding = 1e-9 * max(abs(low), abs(high))
    assert ticks[0] <= low + rounding and ticks[-1] >= high - rounding and ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 7


def test_values_are_told_in_the_unit_of_their_key() -> None:
    assert format_value("peak_memory_bytes", 3 * 2**30) == "3.0 GiB"
    assert format_value("packing_fill", 0.977) == "97.7%"
    assert format_value("eval_seconds", 75) == "1 min 15 s"
    assert format_value("rows", 1234567) == "1,234,567"
    assert format_value("ok", True) == "yes" and format_value("x", None) == "-"
    assert (humanize("num_rows"), humanize("peak_memory_bytes"), humanize("bytes")) == ("Rows", "Peak memory", "Size")
    assert [format_axis(v) for v in (0, 2e-4, 0.5, 5000, 15000, 3.2e8)] == ["0", "2e-4", "0.5", "5000", "15k", "320M"]
    assert [format_seconds(v) for v in (0.421, 59.7, 7260)] == ["0.42 s", "1 min 0 s", "2 h 1 min"]


def test_curves_are_written_as_png_with_or_without_metrics(tmp_path: Path) -> None:
    for number, records in enumerate((metrics(40), [])):
        path = tmp_path / f"{number}.png"
        write_curves_png(records, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2
