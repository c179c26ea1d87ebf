"""The frame of a self-contained page: head with the style inside, sections, cards. No scripts, no network.

Characters that cannot be seen are spelled out as on the terminal (`console.visible`), so that text of the data cannot
turn the order in which a page is read.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files

from finetune.console import visible

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the browser lets a page do: show its own style, and nothing else; no script runs and nothing is fetched."""

PAGE_START = b'<!doctype html>\n<html lang="en">'
"""How every page begins, by which one is known again."""


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
