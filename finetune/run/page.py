"""The frame of a self-contained page: head with the style inside, sections, cards. No scripts, no network.

Characters that cannot be seen are spelled out as on the terminal (`console.visible`), so that text of the data cannot
turn the order in which a page is read.
"""

from __future__ import annotations

import os
from html import escape
from importlib.resources import files
from pathlib import Path

from finetune.console import visible
from finetune.errors import EnvironmentProblem, RecipeError

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the browser lets a page do: show its own style, and nothing else; no script runs and nothing is fetched."""

PAGE_START = b'<!doctype html>\n<html lang="en">'
"""How every page begins, by which one is known again."""
PAGE_ENDINGS = (".html", ".htm")


def require_page_name(path: Path) -> None:
    """Checks that a page may be written to a path that the user named: it is new, or a page of ours.

    Raises:
        RecipeError: the name does not end as a page's does, or something else is there, which would be lost.
        EnvironmentProblem: what is there cannot be read.
    """
    if path.suffix.lower() not in PAGE_ENDINGS:
        message = f"a page's name ends in {' or '.join(PAGE_ENDINGS)}; this one in {path.suffix or 'nothing'!r}"
        raise RecipeError(message, place=str(path), remedy=f"Name another file, such as {path.stem or 'page'}.html.")
    require_replaceable(path, begins=PAGE_START, what="page of this program")


def require_replaceable(path: Path, *, begins: bytes, what: str) -> None:
    """Raises RecipeError where something is at `path` that is no file beginning with `begins`, such as a device."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_file():
            with path.open("rb") as stream:
                if stream.read(len(begins)) == begins:
                    return
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(
            f"what is there cannot be read: {reason}", place=str(path), remedy="Name another file."
        ) from error
    kind = "folder" if path.is_dir() else "file"
    raise RecipeError(
        f"the {kind} exists and is no {what}; it will not be replaced", place=str(path), remedy="Name another file."
    )


def render_page(title: str, body: str, *, footer: str, style: str = "") -> str:
    """Returns a whole page around HTML that is already escaped.

    Args:
        style: CSS beside the common one of `report.css`, which follows the reader's light or dark theme.
    """
    common = files("finetune.run").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{visible(escape(title))} - finetune</title>\n<style>\n{common}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{visible(body)}\n<footer>Made by finetune. {escape(footer)}</footer>\n</main>\n"
        "</body>\n</html>\n"
    )


def render_section(title: str, content: str) -> str:
    """Returns a section under a heading; nothing where there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def render_card(content: str) -> str:
    """Returns a box."""
    return f'<div class="card">{content}</div>'


def render_cards(*cards: str) -> str:
    """Returns boxes side by side where there is room."""
    return f'<div class="grid2">{"".join(cards)}</div>'
