"""A preview as one self-contained page, in the style of the run's report.

What was found comes first, then the rows. A document stands in full, not in a box that scrolls; of a long stretch the
middle is folded, so that the place where learning begins is seen at once.
"""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import PurePath

from finetune.console import plural
from finetune.data.ledger import Dropped, Ledger, Note
from finetune.preview.model import Bin, Document, Preview, Row, Stretch
from finetune.run.fragments import render_pairs
from finetune.run.page import render_card, render_cards, render_page, render_section

_BADGES = {"ok": ("good", "Gate passed"), "warning": ("warn", "Gate passed with warnings")}

_ENDS_SHOWN = {False: 240, True: 1200}
"""Characters shown at each end of a stretch whose middle is folded, by whether it is learned."""
_LEAST_FOLDED = 400
"""A middle of fewer characters is shown."""


def render_preview(preview: Preview) -> str:
    """Returns the page; it needs no other file and no network."""
    title = f"Data of {PurePath(preview.recipe).name}"
    body = "".join(
        (
            _head(preview, title),
            render_section("Gate", render_card(_checks(preview))),
            render_section("Ledger and packing", _tables(preview)),
            render_section("Lengths of the samples, in tokens", render_card(_bars(preview.lengths))),
            render_section("Rows as the model sees them", _rows(preview)),
        )
    )
    style = files("finetune.preview").joinpath("preview.css").read_text(encoding="utf-8")
    return render_page(title, body, footer="finetune preview --json gives the same as numbers.", style=style)


def _head(preview: Preview, title: str) -> str:
    style, word = _BADGES["warning" if preview.warnings else preview.gate["status"]]
    packing = preview.packing
    share = preview.learned_tokens / packing.tokens if packing.tokens else 0.0
    facts = [
        ("Samples", f"{packing.samples:,}"),
        ("Rows", f"{packing.rows:,}"),
        ("Filled", f"{packing.fill:.1%}"),
        ("Tokens", f"{packing.tokens:,}"),
        ("Learned", f"{share:.1%}"),
        ("Held out", plural(preview.eval_samples, "sample")),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    warnings = "".join(f'<p class="message">{escape(warning)}.</p>' for warning in preview.warnings)
    return (
        f'<header><div class="top"><span class="brand">finetune</span><span class="badge {style}">{word}</span></div>'
        f'<h1>{escape(title)}</h1><p class="lead">Tokenizer and chat template: {escape(preview.tokenizer)}</p>'
        f'{warnings}<dl class="facts">{shown}</dl></header>\n'
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
    count = plural(len(row.documents), "sample") + (", each seeing only itself" if len(row.documents) > 1 else "")
    head = (
        f'<div class="row-head"><h3>Row {row.row + 1:,} of {preview.packing.rows:,}</h3>'
        f'<span class="soft">{row.num_tokens:,} of {limit:,} tokens, {count}</span></div>'
        f'<div class="strip" role="img" aria-label="{row.num_tokens / limit:.0%} filled">{strip}</div>'
    )
    return f'<article class="card row">{head}{"".join(map(_document, row.documents))}</article>'


def _document(document: Document) -> str:
    tokens = f"{plural(len(document.tokens), 'token')}, {document.num_learned:,} learned"
    text = "".join(map(_stretch, document.stretches))
    return f'<h4>{escape(document.source)}: {tokens}</h4><div class="document">{text}</div>'


def _stretch(stretch: Stretch) -> str:
    """Returns a stretch's text, the middle of a long one folded under its number of tokens."""
    text, shown = stretch.text, _ENDS_SHOWN[stretch.is_learned]
    if len(text) < 2 * shown + _LEAST_FOLDED:
        return _marked(text, stretch)
    what = "learned" if stretch.is_learned else "not learned"
    middle = text[shown:-shown]
    summary = f"middle of {plural(stretch.num_tokens, 'token')} that are {what} ({len(middle):,} characters)"
    return (
        f"{_marked(text[:shown], stretch)}<details><summary>{summary}</summary>{_marked(middle, stretch)}</details>"
        f"{_marked(text[-shown:], stretch)}"
    )


def _marked(text: str, stretch: Stretch) -> str:
    if not stretch.is_learned:
        return f"<span>{escape(text)}</span>"
    if stretch.weight == 1.0:
        return f"<mark>{escape(text)}</mark>"
    shown = f"{stretch.weight:g}"
    return f'<mark class="weighted" title="weight {shown}">{escape(text)}<sub>{shown}</sub></mark>'


def _bars(bins: list[Bin]) -> str:
    most = max(each.samples for each in bins)
    lines = "".join(
        f'<tr><th scope="row">{each.start:,} - {each.end:,}</th>'
        f'<td class="bar">{_bar(each.samples / most)}</td>'
        f'<td class="number">{each.samples:,}</td></tr>'
        for each in bins
    )
    return f'<table class="histogram"><tbody>{lines}</tbody></table>'


def _bar(share: float) -> str:
    return f'<i style="width:{100 * share:.2f}%"></i>' if share else ""


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


def _ledger(ledger: Ledger, caption: str) -> str:
    """Returns a ledger as tables of two columns, which a phone has room for."""
    counts = {name: value for name, value in ledger.as_dict().items() if isinstance(value, int)}
    dropped = {
        group.reason: f"{_records(group)}, {plural(group.tokens, 'token')}: {_places(group)}"
        for group in ledger.dropped
    }
    notes = {note.what: f"{_records(note)}: {_places(note)}" for note in ledger.notes}
    sources = {
        source.path: f"{source.format}, {plural(source.records, 'record')}, {plural(source.samples, 'sample')}, "
        f"{plural(source.tokens_kept, 'token')}"
        for source in ledger.sources
    }
    details = (("Dropped", dropped), ("Notes", notes), ("Sources", sources if len(sources) > 1 else {}))
    shown = "".join(render_pairs(pairs, caption=name, is_verbatim=True) for name, pairs in details if pairs)
    return render_pairs(counts, caption=caption) + shown


def _records(group: Dropped | Note) -> str:
    return plural(group.records, "record")


def _places(group: Dropped | Note) -> str:
    more = ", ..." if group.records > len(group.first_origins) else ""
    return ", ".join(map(str, group.first_origins)) + more


def _tables(preview: Preview) -> str:
    ledgers = [("Training data", preview.ledger), ("Evaluation data", preview.eval_ledger)]
    cards = [render_card(_ledger(ledger, caption)) for caption, ledger in ledgers if ledger is not None]
    packing = render_card(render_pairs(asdict(preview.packing), caption="Packing"))
    return render_cards(*cards, packing)
