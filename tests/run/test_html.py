"""The page is one well-formed file that loads nothing and runs nothing."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from finetune.run.fragments import format_axis, format_seconds, format_value, humanize
from finetune.run.html import render_html
from finetune.run.plots import write_curves_png
from finetune.run.report import ReportInputs, build_report
from finetune.run.series import extract_series, nice_ticks, smooth

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
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


def metrics(num_steps: int) -> list[dict[str, Any]]:
    train = [
        {
            "kind": "train",
            "step": step,
            "loss": 2 + math.sin(step),
            "learning_rate": 1e-4,
            "grad_norm": 1.0,
            "real_tokens_per_second": 1000.0,
            "peak_memory_bytes": 2**30,
        }
        for step in range(1, num_steps + 1)
    ]
    return [
        {"kind": "eval", "step": 0, "eval_loss": 3.0},
        *train,
        {"kind": "eval", "step": num_steps, "eval_loss": 1.0},
    ]


def full_page(num_steps: int = 50) -> str:
    records = metrics(num_steps)
    evil = {EVIL: EVIL, "nested": {EVIL: [EVIL]}, "rows": [{EVIL: EVIL, "n": 1}]}
    inputs = ReportInputs(
        status="done",
        message=EVIL,
        recipe={"output": {"dir": f"runs/{EVIL}"}, "model": {"path": EVIL}, "adapter": {"type": "lora", "rank": 8}},
        plan=evil,
        trained=evil,
        ledgers={"train": evil, EVIL: {"records": 2}, "note": EVIL},
        environment={"packages": {EVIL: EVIL}, "command": ["finetune", EVIL], **evil},
        metrics=records,
        samples=[
            {"prompt": EVIL, "reference": EVIL, "before": EVIL, "after": EVIL},
            {"prompt": "p", "reference": "r", "before": None, "after": ""},
        ],
        scores={"exact_match": {"before": 0.1, "after": 0.9, "rows": 1200}, EVIL: {"before": None, "after": 2.5}},
        timings={"total_seconds": 3725.0, "seconds_to_first_step": 2.0},
        checkpoints=[{"step": 50, "path": EVIL}],
        artifacts=[{"name": "adapter", "path": EVIL, "bytes": 3 * 2**20}],
        checks=[{"name": EVIL, "ok": True, "detail": EVIL}, {"name": "b", "ok": False}, {"name": "c", "ok": None}],
    )
    return render_html(build_report(inputs), records)


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


def test_long_series_keep_mean_extremes_and_last_value() -> None:
    series = extract_series(metrics(5000), kind="train", key="loss")
    losses = [2 + math.sin(step) for step in range(1, 5001)]
    assert len(series) == 400 and series.is_joined
    assert (min(series.low), max(series.high), series.last) == (min(losses), max(losses), losses[-1])
    assert abs(sum(series.values) / 400 - sum(losses) / 5000) < 0.01


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    assert smooth([3.0] * 5, weight=0.9) == pytest.approx([3.0] * 5)
    assert 0.5 < smooth([0.0] * 5 + [1.0] * 10, weight=0.8)[-1] < 1.0


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
