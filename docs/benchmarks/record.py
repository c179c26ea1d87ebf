"""Makes a benchmark record out of a finished run: what was run, on what, and what came out.

    python docs/benchmarks/record.py RUN_FOLDER NAME "COMMAND" > docs/benchmarks/NAME.json

Steps up to `WARMUP_STEPS` are left out of medians and spreads.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

RECORD_VERSION = 1
WARMUP_STEPS = 3


def make_record(run: Path, *, name: str, command: str) -> dict[str, object]:
    """Returns the record of the run in `run`; figures are the run's own, nothing is rounded."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    measured = [record for record in steps if record["step"] > WARMUP_STEPS]
    return {
        "record_version": RECORD_VERSION,
        "name": name,
        "command": command,
        "created": report["created"],
        "environment": _environment(report["environment"]),
        "plan": report["plan"] | {"model": Path(report["plan"]["model"]).name},  # folders are each machine's own
        "trainable_parameters": report["trained"]["trainable_parameters"],
        "steps": len(steps),
        "warmup_steps_left_out": WARMUP_STEPS,
        "step_seconds": _spread([record["step_seconds"] for record in measured]),
        "real_tokens_per_second": _spread([record["real_tokens_per_second"] for record in measured]),
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in steps),
        "losses": [record["loss"] for record in steps],
        "scores": report["scores"],
        "held_out_loss": [report["summary"]["eval_loss_before"], report["summary"]["eval_loss_after"]],
        "timings": report["timings"],
        "checks": report["checks"],
    }


def _environment(values: dict[str, object]) -> dict[str, object]:
    """The run's environment without its command, which the record has, and without the kernel's own name."""
    system, *_, machine = str(values["platform"]).split("-with-")[0].split("-")
    libc = str(values["platform"]).partition("-with-")[2]
    return {key: value for key, value in values.items() if key != "command"} | {
        "platform": "-".join(filter(None, (system, machine, f"with-{libc}" if libc else "")))
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


if __name__ == "__main__":
    print(json.dumps(make_record(Path(sys.argv[1]), name=sys.argv[2], command=sys.argv[3]), indent=1))
