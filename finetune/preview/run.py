"""`finetune preview`: build the data set as a run would, through the gate, and show it. No weights, no run folder."""

from __future__ import annotations

from pathlib import Path

from finetune.console import Console
from finetune.data.build import build_dataset
from finetune.errors import EnvironmentProblem
from finetune.model.positions import known_position_limit
from finetune.model.tokenizer import load_tokenizer
from finetune.preview.model import Preview, make_preview
from finetune.preview.page import render_preview
from finetune.preview.text import show_preview
from finetune.recipe.schema import Recipe
from finetune.run.atomic import write_text
from finetune.run.page import require_page_name


def preview(recipe: Recipe, *, console: Console, num_rows: int, html: Path | None = None) -> Preview:
    """Shows the data of a recipe on the console, and as a page where `html` names a file.

    Raises:
        DataError: the gate found a fault; nothing is shown but it.
        RecipeError: `html` names something that is no page of ours.
        EnvironmentProblem: the tokenizer cannot be read, or the page cannot be written.
    """
    if html is not None and not html.absolute().parent.is_dir():
        raise EnvironmentProblem(
            "the folder of the page does not exist", place=str(html), remedy="Make the folder, or name another file."
        )
    if html is not None:
        require_page_name(html)
    tokenizer = load_tokenizer(recipe.model)
    dataset = build_dataset(recipe.data, tokenizer=tokenizer, seed=recipe.training.seed, say=console.line)
    limit = known_position_limit(recipe.model)
    shown = make_preview(recipe, dataset, tokenizer=tokenizer, num_rows=num_rows, position_limit=limit)
    show_preview(console, shown)
    if html is not None:
        try:
            write_text(html, render_preview(shown))
        except OSError as error:
            raise EnvironmentProblem(
                f"the page cannot be written: {error.strerror}", place=str(html), remedy="Name another file."
            ) from error
        console.line(f"page    {html}")
    return shown
