"""The text of a new recipe: every value that a beginner changes, each with a word on what it does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from finetune.start.card import Card
from finetune.start.look import Look
from finetune.start.suggest import Suggestion

_PLAIN = re.compile(r"[A-Za-z0-9_./~-]+")
_COMMENT_COLUMN = 36


@dataclass(frozen=True, kw_only=True)
class RecipeValues:
    """What a new recipe is made of."""

    schema_line: str
    model: str
    data: str
    columns: Mapping[str, str]
    card: Card
    method: str
    adapter: str
    run_dir: str
    look: Look | None
    values: Suggestion


def render_recipe(recipe: RecipeValues) -> str:
    """Returns the YAML text."""
    values, lines = recipe.values, [recipe.schema_line]
    lines += [f"# Written by `finetune init` for {recipe.card}. Every key: docs/recipe_reference.md.", *_looked(recipe)]
    lines += [
        "model:",
        _line(f"  path: {scalar(recipe.model)}", "a hub id, or a folder relative to this file"),
        _line(f"  quantization: {values.quantization}", "none | nf4 (4-bit base weights, QLoRA)"),
        _line("  attention: auto", "takes the best that model and card allow"),
    ]
    if values.dtype != "auto":
        lines.append(_line(f"  dtype: {values.dtype}", "the card is slow with bf16"))
    if values.device == "cpu":
        lines.append(_line("  device: cpu", "auto takes a CUDA device where there is one"))
    lines += _adapter(recipe)
    lines += ["data:", "  train:", f"    - path: {scalar(recipe.data)}"]
    if recipe.columns:
        pairs = ", ".join(f"{role}: {scalar(column)}" for role, column in recipe.columns.items())
        lines.append(_line(f"      columns: {{{pairs}}}", "role: column of the file"))
    lines += _rest_of_data(recipe)
    lines += [
        "training:",
        f"  method: {recipe.method}",
        _line(f"  epochs: {values.epochs}", "passes over the data"),
        _line(f"  rows_per_step: {values.rows_per_step}", "rows that make one optimizer step"),
        _line(f"  rows_per_micro_batch: {values.rows_per_micro_batch}", "rows at once; lower it if memory runs out"),
        f"  learning_rate: {values.learning_rate}",
        "output:",
        _line(f"  dir: {scalar(recipe.run_dir)}", "relative to the folder that you type the command in"),
    ]
    return "\n".join(lines) + "\n"


def scalar(text: str) -> str:
    """Returns text as a YAML value that reads back as the same text; quoted as JSON where it must be."""
    is_plain = _PLAIN.fullmatch(text) is not None and ("/" in text or text[0].isalpha())
    return text if is_plain and yaml.safe_load(text) == text else json.dumps(text, ensure_ascii=False)


def _looked(recipe: RecipeValues) -> list[str]:
    look = recipe.look
    if look is None:
        return []
    rows = f"{look.num_rows:,} rows" if look.is_whole else f"more than {look.num_rows:,} rows"
    return [f"# Seen in the data: {rows}, {look.format}, the longest of about {look.longest_tokens:,} tokens."]


def _adapter(recipe: RecipeValues) -> list[str]:
    if recipe.adapter == "none":
        return ["adapter:", _line("  type: none", "all weights are trained; lora needs far less memory")]
    return [
        "adapter:",
        _line("  type: lora", "small trained matrices beside frozen weights; none trains all weights"),
        "  rank: 16",
        "  alpha: 16",
    ]


def _rest_of_data(recipe: RecipeValues) -> list[str]:
    values, look = recipe.values, recipe.look
    if values.eval_fraction is None:
        held_out = _line("  eval: null", "nothing is held out; name files here")
    else:
        held_out = _line(f"  eval: {{fraction: {values.eval_fraction:g}}}", "held out, to see what was learned")
    why = "an estimate from bytes" if look is not None and look.longest_tokens else "not estimated"
    return [
        held_out,
        _line(f"  max_length: {values.max_length}", f"tokens of a row; {why}: `finetune preview` counts"),
        _line("  over_length: error", "error | drop | truncate | split (plain text)"),
        _line("  packing: true", "several samples share a row, each seeing only itself"),
    ]


def _line(text: str, comment: str) -> str:
    return f"{text.ljust(_COMMENT_COLUMN - 1)} # {comment}"
