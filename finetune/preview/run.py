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
from finetune.run.page import PAGE_START


def preview(recipe: Recipe, *, console: Console, num_rows: int, html: Path | None = None) -> Preview:
    """Shows the data of a recipe on the console, and as a page where `html` names a file.

    Raises:
        DataError: the gate found a fault; nothing is shown but it.
        EnvironmentProblem: the tokenizer cannot be read, or the page cannot be written.
    """
    if html is not None and not html.absolute().parent.is_dir():
        raise EnvironmentProblem(
            "the folder of the page does not exist", place=str(html), remedy="Make the folder, or name another file."
        )
    if html is not None and html.exists() and not _is_page(html):
        raise EnvironmentProblem(
            "the file exists and is no page of `finetune preview`; it will not be replaced",
            place=str(html),
            remedy="Name another file.",
        )
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


def _is_page(path: Path) -> bool:
    """Says whether a file is a page of an earlier preview, which a new one may replace."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(PAGE_START)) == PAGE_START
