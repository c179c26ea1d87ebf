"""Rules of the data. See `rules.py`."""

from __future__ import annotations

import datetime
import re

from finetune.recipe.paths import is_hub_dataset
from finetune.recipe.schema import Recipe
from finetune.recipe.violation import Violation


def hub_fields_need_a_hub_dataset(recipe: Recipe) -> Violation | None:
    """Files have no configuration, split or revision."""
    lists = {"train": recipe.data.train, "eval": recipe.data.eval if isinstance(recipe.data.eval, list) else []}
    for name, sources in lists.items():
        for index, source in enumerate(sources):
            for key in ("name", "split", "revision"):
                value = getattr(source, key)
                if value is not None and not is_hub_dataset(source.path):
                    return Violation(
                        keys=(f"data.{name}.{index}.{key}", f"data.{name}.{index}.path"),
                        found=value,
                        allowed="left out when `path` is a file or folder",
                        reason=f"{source.path} is no hub id",
                        remedy=f"Remove `{key}`, or give a hub id such as org/name as `path`.",
                    )
    return None


def streaming_is_of_whole_hub_splits(recipe: Recipe) -> Violation | None:
    """Local files are always read as a stream, and the hub streams a split from its start."""
    lists = {"train": recipe.data.train, "eval": recipe.data.eval if isinstance(recipe.data.eval, list) else []}
    for name, sources in lists.items():
        for index, source in enumerate(sources):
            key = f"data.{name}.{index}"
            if source.streaming and not is_hub_dataset(source.path):
                return Violation(
                    keys=(f"{key}.streaming", f"{key}.path"),
                    found=True,
                    allowed="left out when `path` is a file or folder",
                    reason=f"{source.path} is no hub id, and files on this machine are read as a stream anyway",
                    remedy="Remove `streaming`.",
                )
            if source.streaming and "[" in (source.split or ""):
                return Violation(
                    keys=(f"{key}.split", f"{key}.streaming"),
                    found=source.split,
                    allowed="the name of a whole split, while `streaming` is true",
                    reason="where a slice begins and ends is known only once the whole split was read",
                    remedy="Set `max_rows` to take the first rows, or remove `streaming`.",
                )
    return None


def eval_sources_have_no_weight(recipe: Recipe) -> Violation | None:
    """Every held-out record is looked at once; a weight there would change nothing."""
    sources = recipe.data.eval if isinstance(recipe.data.eval, list) else []
    for index, source in enumerate(sources):
        if source.weight != 1.0:
            return Violation(
                keys=(f"data.eval.{index}.weight",),
                found=source.weight,
                allowed="left out",
                reason="every record of `data.eval` is evaluated once",
                remedy="Remove `weight`; to evaluate on fewer records, set `max_rows`.",
            )
    return None


def separate_turns_have_turns_to_learn(recipe: Recipe) -> Violation | None:
    """One sample a turn repeats the prompts, which `loss_on: all` would learn once for each turn."""
    if recipe.data.turns != "separate" or recipe.data.loss_on != "all":
        return None
    return Violation(
        keys=("data.turns", "data.loss_on"),
        found=recipe.data.turns,
        allowed="together, while `data.loss_on` is all",
        reason="each prompt would be learned once for every turn that follows it",
        remedy="Set `data.turns: together`, or `data.loss_on: assistant`.",
    )


def date_is_a_day(recipe: Recipe) -> Violation | None:
    """A date that a chat template prints is a day of the calendar, written so that it reads the same everywhere."""
    found = recipe.data.date
    if found is None or (re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", found) and _is_day(found)):
        return None
    return Violation(
        keys=("data.date",),
        found=found,
        allowed="a day as YYYY-MM-DD",
        reason="there is no such day, or it is written otherwise",
        remedy="Write it like `data.date: 2026-01-31`, or leave it out to take the day of the run's start.",
    )


def _is_day(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def columns_have_one_role(recipe: Recipe) -> Violation | None:
    """A column in two roles would be trained as its own answer."""
    sources = [*recipe.data.train, *(recipe.data.eval if isinstance(recipe.data.eval, list) else [])]
    for index, source in enumerate(sources):
        columns = list(source.columns.model_dump(exclude_none=True).values()) if source.columns else []
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            key = f"data.train.{index}.columns" if index < len(recipe.data.train) else "data.eval"
            return Violation(
                keys=(key, "data.train"),
                found=columns,
                allowed="a different column for each role",
                reason=f"`{twice[0]}` stands in two roles",
                remedy="Give each role a column of its own.",
            )
    return None
