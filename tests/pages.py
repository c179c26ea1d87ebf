"""A report page with every part in it, and texts that try to break out of it."""

from __future__ import annotations

import math
from typing import Any

from finetune.run.html import render_html
from finetune.run.report import ReportInputs, build_report
from finetune.run.samples import SampleAnswer

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


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
    answers = [SampleAnswer(step, EVIL, EVIL, f"{step}{EVIL}") for step in (0, 20, num_steps)]
    return render_html(build_report(inputs), records, answers=answers)
