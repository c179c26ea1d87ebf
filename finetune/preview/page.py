"""A preview as one self-contained page, in the style of the run's report."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import PurePath

from finetune.preview.model import Bin, Document, Preview, Row, Stretch
from finetune.run.fragments import render_pairs
from finetune.run.page import render_card, render_cards, render_page, render_section

_BADGES = {"ok": ("good", "Gate passed"), "warning": ("warn", "Gate passed with warnings")}


def render_preview(preview: Preview) -> str:
    """Returns the page; it needs no other file and no network."""
    title = f"Data of {PurePath(preview.recipe).name}"
    body = "".join(
        (
            _head(preview, title),
            render_section("Rows as the model sees them", _rows(preview)),
            render_section("Lengths of the samples, in tokens", render_card(_bars(preview.lengths))),
            render_section("Gate", render_card(_checks(preview))),
            render_section("Ledger and packing", _tables(preview)),
        )
    )
    style = files("finetune.preview").joinpath("preview.css").read_text(encoding="utf-8")
    return render_page(title, body, footer="finetune preview --json gives the same as numbers.", style=style)


def _head(preview: Preview, title: str) -> str:
    style, word = _BADGES[preview.gate["status"]]
    packing = preview.packing
    share = preview.learned_tokens / packing.tokens if packing.tokens else 0.0
    facts = [
        ("Samples", f"{packing.samples:,}"),
        ("Rows", f"{packing.rows:,}"),
        ("Filled", f"{packing.fill:.1%}"),
        ("Tokens", f"{packing.tokens:,}"),
        ("Learned", f"{share:.1%}"),
        ("Held out", f"{preview.eval_samples:,} samples"),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return (
        f'<header><div class="top"><span class="brand">finetune</span><span class="badge {style}">{word}</span></div>'
        f'<h1>{escape(title)}</h1><p class="lead">Tokenizer and chat template: {escape(preview.tokenizer)}</p>'
        f'<dl class="facts">{shown}</dl></header>\n'
    )


def _rows(preview: Preview) -> str:
    if not preview.rows:
        return '<p class="soft">None was asked for.</p>'
    weights = ""
    if any(document.has_weights for row in preview.rows for document in row.documents):
        weights = ' <mark class="weighted">Text with a number<sub>0.5</sub></mark> has this weight in the loss, not 1.'
    legend = f'<p class="soft legend-line"><mark>Marked text</mark> is learned; the rest is context.{weights}</p>'
    return legend + "".join(_row(row, preview) for row in preview.rows)


def _row(row: Row, preview: Preview) -> str:
    limit = preview.packing.max_length
    width = [100 * len(document.tokens) / limit for document in row.documents]
    strip = "".join(f'<i style="width:{share:.3f}%"></i>' for share in width)
    count = "1 sample" if len(row.documents) == 1 else f"{len(row.documents):,} samples, each seeing only itself"
    head = (
        f'<div class="row-head"><h3>Row {row.row + 1:,} of {preview.packing.rows:,}</h3>'
        f'<span class="soft">{row.num_tokens:,} of {limit:,} tokens, {count}</span></div>'
        f'<div class="strip" role="img" aria-label="{row.num_tokens / limit:.0%} filled">{strip}</div>'
    )
    return f'<article class="card row">{head}{"".join(map(_document, row.documents))}</article>'


def _document(document: Document) -> str:
    text = "".join(map(_stretch, document.stretches))
    return (
        f"<h4>{escape(document.source)}: {len(document.tokens):,} tokens, {document.num_learned:,} learned</h4>"
        f'<pre class="document" tabindex="0">{text}</pre>'
    )


def _stretch(stretch: Stretch) -> str:
    if not stretch.is_learned:
        return f"<span>{escape(stretch.text)}</span>"
    if stretch.weight == 1.0:
        return f"<mark>{escape(stretch.text)}</mark>"
    shown = f"{stretch.weight:g}"
    return f'<mark class="weighted" title="weight {shown}">{escape(stretch.text)}<sub>{shown}</sub></mark>'


def _bars(bins: list[Bin]) -> str:
    most = max(each.samples for each in bins)
    lines = "".join(
        f'<tr><th scope="row">{each.start:,} - {each.end:,}</th>'
        f'<td class="bar"><i style="width:{100 * each.samples / most:.2f}%"></i></td>'
        f'<td class="number">{each.samples:,}</td></tr>'
        for each in bins
    )
    return f'<table class="histogram"><tbody>{lines}</tbody></table>'


def _checks(preview: Preview) -> str:
    items = ""
    for check in preview.gate["checks"]:
        is_ok = check["status"] == "ok"
        mark = '<b role="img" aria-label="passed">&check;</b>' if is_ok else '<b role="img" aria-label="warning">!</b>'
        places = f"<br>{escape(', '.join(check['examples']))}" if check["examples"] else ""
        items += (
            f'<li class="{"" if is_ok else "na"}">{mark}<div>{escape(check["name"])}'
            f'<br><span class="soft">{escape(check["detail"])}{places}</span></div></li>'
        )
    return f'<ul class="checks">{items}</ul>'


def _tables(preview: Preview) -> str:
    ledgers = [("Training data", preview.ledger), ("Evaluation data", preview.eval_ledger)]
    cards = [
        render_card(render_pairs(ledger.as_dict(), caption=caption))
        for caption, ledger in ledgers
        if ledger is not None
    ]
    packing = render_card(render_pairs(asdict(preview.packing), caption="Packing"))
    return render_cards(*cards, packing)
