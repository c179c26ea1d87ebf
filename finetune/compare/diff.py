"""What differs between two runs: recipe, data, environment, trained weights, figures.

`output.dir` is not compared, since no two runs share a folder, nor is the command that was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune.compare.record import RunRecord

ABSENT = object()
"""Stands for a value that one of the runs does not have; None is a value of its own."""
_NO_REPORT = "{names} wrote no report yet, which holds the {what}"


@dataclass(frozen=True)
class Difference:
    """One thing that differs; `a` or `b` is `ABSENT` where that run does not have it."""

    key: str
    a: Any
    b: Any

    def as_dict(self) -> dict[str, Any]:
        """Returns the difference as JSON has it: an absent value has no key."""
        values = {name: value for name, value in (("a", self.a), ("b", self.b)) if value is not ABSENT}
        return {"key": self.key, **values}


@dataclass(frozen=True)
class Part:
    """One part of the comparison."""

    name: str
    num_compared: int
    differences: tuple[Difference, ...]
    not_known: str = ""
    """Why something could not be compared; empty where everything was."""

    @property
    def verdict(self) -> Literal["same", "different", "unknown"]:
        if self.differences:
            return "different"
        return "unknown" if self.not_known else "same"

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "num_compared": self.num_compared,
            "not_known": self.not_known,
            "differences": [difference.as_dict() for difference in self.differences],
        }


@dataclass(frozen=True)
class RunDiff:
    """The comparison of two runs."""

    a: RunRecord
    b: RunRecord
    parts: tuple[Part, ...]

    @property
    def is_same(self) -> bool:
        """Whether everything was compared and nothing differs."""
        return all(part.verdict == "same" for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_a": str(self.a.path),
            "run_b": str(self.b.path),
            "is_same": self.is_same,
            "parts": {part.name: part.as_dict() for part in self.parts},
        }


def diff_runs(a: RunRecord, b: RunRecord) -> RunDiff:
    """Compares two runs, part by part; reads nothing."""
    parts = (
        Part("recipe", *_compare(_recipe(a), _recipe(b))),
        _part("data", a, b, _data_values, not_known=_unknown_data(a, b)),
        Part("environment", *_compare(_environment(a), _environment(b)), not_known=_missing_environment(a, b)),
        _part("trained", a, b, _trained_values, not_known=_unreported(a, b, "trained", "table of trained weights")),
        _part("metrics", a, b, _metric_values),
    )
    return RunDiff(a, b, parts)


def _part(
    name: str, a: RunRecord, b: RunRecord, values: Callable[[RunRecord], dict[str, Any]], *, not_known: str = ""
) -> Part:
    left, right = values(a), values(b)
    if not_known:  # what only one of the runs has written so far is not known of the other, rather than different
        left, right = ({key: item for key, item in one.items() if key in other} for one, other in _both(left, right))
    return Part(name, *_compare(left, right), not_known)


def _both(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(left, right), (right, left)]


def _compare(a: Any, b: Any) -> tuple[int, tuple[Difference, ...]]:
    """Returns how many values were compared and those that differ; a section of one side only counts as one."""
    found = list(_compared(a, b, ""))
    return len(found), tuple(pair for pair in found if not _equal(pair.a, pair.b))


def _compared(a: Any, b: Any, key: str) -> Iterator[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in [*a, *(name for name in b if name not in a)]:
            yield from _compared(a.get(name, ABSENT), b.get(name, ABSENT), f"{key}.{name}" if key else str(name))
    elif isinstance(a, list) and isinstance(b, list) and (a or b):
        for index in range(max(len(a), len(b))):
            left, right = (items[index] if index < len(items) else ABSENT for items in (a, b))
            yield from _compared(left, right, f"{key}[{index}]")
    else:
        yield Difference(key, a, b)


def _equal(a: Any, b: Any) -> bool:
    return a is b or (a is not ABSENT and b is not ABSENT and type(a) is type(b) and a == b) or _equal_numbers(a, b)


def _equal_numbers(a: Any, b: Any) -> bool:
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return is_number and a == b


def _recipe(run: RunRecord) -> dict[str, Any]:
    output = run.recipe.get("output")
    if not isinstance(output, Mapping):
        return dict(run.recipe)
    return {**run.recipe, "output": {key: value for key, value in output.items() if key != "dir"}}


def _data_values(run: RunRecord) -> dict[str, Any]:
    """The hash of the samples, the date that a template wrote, and the ledgers' counts."""
    values = {name: run.manifest[key] for key, name in _MANIFEST_DATA.items() if key in run.manifest}
    for name, ledger in run.section("ledgers").items():
        if isinstance(ledger, Mapping):
            values |= {f"{name}: {key}": value for key, value in _ledger_counts(ledger)}
    return values


_MANIFEST_DATA = {"data_digest": "hash of all samples", "date": "date in the chat template"}
_LEDGER_LISTS = {"dropped": "reason", "notes": "what"}


def _ledger_counts(ledger: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the sums, each source's numbers, and the groups by what they are named; no paths and no places."""
    for key, value in ledger.items():
        if isinstance(value, int) or value is None:
            yield key, value
        elif key in _LEDGER_LISTS and isinstance(value, list):
            for group in value:
                yield f"{key} ({group.get(_LEDGER_LISTS[key])})", group.get("records")
        elif key == "sources" and isinstance(value, list):
            for index, source in enumerate(value):
                yield from ((f"source {index}: {name}", item) for name, item in source.items() if name != "path")


def _environment(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in run.environment.items() if key != "command"}


def _trained_values(run: RunRecord) -> dict[str, Any]:
    trained = run.section("trained")
    values = {key: value for key, value in trained.items() if not isinstance(value, list)}
    for group in trained.get("groups", []):
        values |= {f"{group.get('name')}: {key}": value for key, value in group.items() if key != "name"}
    return values


def _metric_values(run: RunRecord) -> dict[str, Any]:
    """Figures of both kinds: those of the curves, which every run has, and those of the report."""
    losses = [record["loss"] for record in run.metrics if isinstance(record.get("loss"), int | float)]
    values: dict[str, Any] = {"status": run.status, **run.summary, "train_loss_best": min(losses, default=None)}
    values |= run.section("timings")
    for name, score in run.section("scores").items():
        values |= {f"{name} {when}": score.get(when) for when in ("before", "after")}
    return values


def _unknown_data(a: RunRecord, b: RunRecord) -> str:
    without_hash = [run for run in (a, b) if "data_digest" not in run.manifest]
    if without_hash:
        return f"{_names(without_hash)} recorded no hash of the data"
    return _unreported(a, b, "ledgers", "ledger's counts")


def _unreported(a: RunRecord, b: RunRecord, section: str, what: str) -> str:
    missing = [run for run in (a, b) if not run.section(section)]
    return _NO_REPORT.format(names=_names(missing), what=what) if missing else ""


def _missing_environment(a: RunRecord, b: RunRecord) -> str:
    missing = [run for run in (a, b) if not run.environment]
    return f"{_names(missing)} has no environment.json" if missing else ""


def _names(runs: list[RunRecord]) -> str:
    return " and ".join(run.path.name for run in runs)
