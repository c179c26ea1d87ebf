"""The report of a run as one JSON-ready dict; `html.py` draws it, `finetune report` makes it again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

REPORT_VERSION = 1

JsonDict = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """What a report is made of; all values are plain dicts, lists, texts and numbers."""

    status: str
    """Status of the run: running, done, early-stopped, interrupted, failed or stopped."""
    recipe: JsonDict
    plan: JsonDict = field(default_factory=dict)
    """What was to be done: trainable parameters, rows, steps, packing fill. Keys are shown as they are named."""
    trained: JsonDict = field(default_factory=dict)
    """What is trained: parameters in all, trainable ones, modules with adapters, precision, and so on."""
    ledgers: Mapping[str, JsonDict] = field(default_factory=dict)
    """Data ledger of each part, such as `{"train": {...}, "eval": {...}}`."""
    environment: JsonDict = field(default_factory=dict)
    metrics: Sequence[JsonDict] = ()
    """The records of `metrics.jsonl`."""
    samples: Sequence[JsonDict] = ()
    """`{"prompt", "reference", "before", "after", "steps"}`; `reference`, `before` and `after` may be None; `steps` are
    the answers during training, `{"step", "answer"}`."""
    scores: Mapping[str, JsonDict] = field(default_factory=dict)
    """`{name: {"before", "after", "rows"}}`; `before` and `after` may be None."""
    timings: JsonDict = field(default_factory=dict)
    """Seconds and rates, such as `seconds_to_first_step`, `total_seconds`, `real_tokens_per_second`."""
    checkpoints: Sequence[JsonDict] = ()
    result: JsonDict = field(default_factory=dict)
    """What `result.json` holds: `{"delivered", "path", "best", "last"}`; empty where there is no result."""
    artifacts: Sequence[JsonDict] = ()
    """What the run made: `{"name", "weights", "step", "path", "bytes"}`."""
    checks: Sequence[JsonDict] = ()
    """What the program checked about its own work: `{"name", "ok", "detail"}`; `ok` None means not applicable."""
    message: str = ""
    """One line about the outcome, such as the error that ended the run."""


def build_report(inputs: ReportInputs) -> dict[str, Any]:
    """Returns the report; numbers that are not finite become None, so that it is always valid JSON."""
    report = {
        "report_version": REPORT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": inputs.status,
        "message": inputs.message,
        "summary": summary(inputs.metrics, inputs.result),
        "result": inputs.result,
        "spikes": [
            {key: value for key, value in record.items() if key != "kind"}
            for record in inputs.metrics
            if record.get("kind") == "spike"
        ],
        "scores": inputs.scores,
        "samples": inputs.samples,
        "trained": inputs.trained,
        "plan": inputs.plan,
        "ledgers": inputs.ledgers,
        "timings": inputs.timings,
        "checks": inputs.checks,
        "artifacts": inputs.artifacts,
        "checkpoints": inputs.checkpoints,
        "environment": inputs.environment,
        "recipe": inputs.recipe,
    }
    return {key: _json_ready(value, place=key) for key, value in report.items()}


def summary(metrics: Sequence[JsonDict], result: JsonDict) -> dict[str, Any]:
    """Returns the few numbers that stand for a run, wherever they are shown; one that was never measured is None.

    `eval_loss_before` is of the evaluation before the first step; `eval_loss_after` is that of the delivered weights,
    and where there is no result yet, of the last evaluation after the first step.

    Args:
        metrics: the records of `metrics.jsonl`.
        result: what `result.json` holds; empty where there is no result.
    """
    train = [record for record in metrics if record.get("kind") == "train"]
    evals = [record for record in metrics if record.get("kind") == "eval"]
    losses = _finite(train, "loss")
    rates = _finite(train, "real_tokens_per_second")
    eval_before = _finite([record for record in evals if record.get("step") == 0], "eval_loss")
    eval_after = _finite([record for record in evals if record.get("step", 0) > 0], "eval_loss")
    delivered = delivered_part(result).get("eval_loss")
    return {
        "steps": train[-1].get("step") if train else 0,
        "train_loss_first": losses[0] if losses else None,
        "train_loss_last": losses[-1] if losses else None,
        "eval_loss_before": eval_before[0] if eval_before else None,
        "eval_loss_after": delivered if delivered is not None else eval_after[-1] if eval_after else None,
        "eval_loss_best": min(eval_before + eval_after, default=None),
        "real_tokens": max(_finite(train, "real_tokens"), default=None),
        "real_tokens_per_second_median": statistics.median(rates) if rates else None,
        "peak_memory_bytes": max(_finite(train, "peak_memory_bytes"), default=None),
    }


def delivered_part(result: JsonDict) -> JsonDict:
    """Returns step, held-out loss and folder of the delivered weights; empty where there is no result."""
    return result[result["delivered"]] if result else {}


def _finite(records: Sequence[JsonDict], key: str) -> list[float]:
    values = (record.get(key) for record in records)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _json_ready(value: Any, *, place: str) -> Any:
    """Copies a nested value into plain JSON types; a type that JSON has no word for is a TypeError naming the key."""
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item, place=f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item, place=f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"report value {place} is a {type(value).__name__}, which JSON does not hold")
