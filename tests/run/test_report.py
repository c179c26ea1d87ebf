"""The report is valid JSON whatever the run met, and its summary stands for the curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.run.report import ReportInputs, build_report, summary

METRICS = [
    {"kind": "eval", "step": 0, "eval_loss": 3.0},
    {"kind": "train", "step": 1, "loss": 3.1, "real_tokens": 10, "real_tokens_per_second": 5.0, "peak_memory_bytes": 7},
    {"kind": "train", "step": 2, "loss": None, "real_tokens": 20, "real_tokens_per_second": 9.0},
    {"kind": "eval", "step": 2, "eval_loss": 1.5},
    {"kind": "train", "step": 3, "loss": 2.0, "real_tokens": 30, "real_tokens_per_second": 7.0},
    {"kind": "eval", "step": 3, "eval_loss": 1.75},
]


def test_report_is_versioned_json_with_every_part() -> None:
    report = build_report(
        ReportInputs(
            status="done", recipe={"output": {"dir": Path("runs/a")}}, metrics=METRICS, samples=[{"prompt": "p"}]
        )
    )
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["report_version"] == 1 and report["status"] == "done"
    assert report["recipe"]["output"]["dir"] == "runs/a"


def test_summary_takes_before_after_best_and_median() -> None:
    figures = summary(METRICS, {})
    assert (figures["eval_loss_before"], figures["eval_loss_after"], figures["eval_loss_best"]) == (3.0, 1.75, 1.5)
    assert (figures["train_loss_first"], figures["train_loss_last"], figures["steps"]) == (3.1, 2.0, 3)
    assert (figures["real_tokens"], figures["real_tokens_per_second_median"]) == (30, 7.0)
    assert figures["peak_memory_bytes"] == 7


@pytest.mark.parametrize(("delivered", "loss"), [("best", 1.5), ("last", 1.75)])
def test_summary_of_a_result_has_the_loss_of_what_is_delivered(delivered: str, loss: float) -> None:
    result = {"delivered": delivered, "best": {"step": 2, "eval_loss": 1.5}, "last": {"step": 3, "eval_loss": 1.75}}
    assert summary(METRICS, result)["eval_loss_after"] == loss


def test_summary_of_a_result_without_held_out_data_has_no_loss() -> None:
    result = {"delivered": "last", "best": None, "last": {"step": 3, "eval_loss": None}}
    assert summary(METRICS[1:3], result)["eval_loss_after"] is None


def test_summary_without_metrics_has_no_numbers() -> None:
    assert {key: value for key, value in summary([], {}).items() if value is not None} == {"steps": 0}


def test_evaluation_before_the_first_step_alone_is_no_result() -> None:
    assert summary(METRICS[:1], {})["eval_loss_after"] is None


def test_not_finite_becomes_none_and_an_unknown_type_is_named() -> None:
    report = build_report(ReportInputs(status="stopped", recipe={}, plan={"fill": float("nan")}, timings={"a": (1,)}))
    assert report["plan"]["fill"] is None and report["timings"]["a"] == [1]
    with pytest.raises(TypeError, match=r"plan\.deep\[0\] is a set"):
        build_report(ReportInputs(status="done", recipe={}, plan={"deep": [{1}]}))
