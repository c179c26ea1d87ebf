"""A preview on the terminal: what is learned in colour, or between marks where there is no colour.

Data is shown as it is, but for characters that cannot be seen (`console.visible`). So that text of the data is never
taken for a mark, the marks are chosen for the rows shown: read from left to right they give the same stretches back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count

from finetune.console import Console, plural
from finetune.preview.model import Bin, Document, Preview, Row, Stretch

LEARNED_STYLE = "bold green"
CONTEXT_STYLE = "dim"
MARKS = (("[[", "]]"), ("{{{", "}}}"), ("<<<", ">>>"))
"""Where learned text begins and ends, in the order of preference."""
WEIGHT_STYLE = "yellow"
_BAR_WIDTH = 40
_DOCUMENTS_SHOWN = 5


def show_preview(console: Console, preview: Preview) -> None:
    """Prints rows, lengths, packing, ledger and gate."""
    documents = [document for row in preview.rows for document in row.documents[:_DOCUMENTS_SHOWN]]
    marks = ("", "") if console.has_color else choose_marks([document.stretches for document in documents])
    legend = "bold green is learned" if console.has_color else f"{marks[0]}...{marks[1]} is learned"
    if preview.rows:
        has_weights = any(document.has_weights for row in preview.rows for document in row.documents)
        weights = ", (x0.5) after it is its weight in the loss" if has_weights else ""
        console.line(f"rows as the model sees them; {legend}{weights}, the rest is context")
    for row in preview.rows:
        _show_row(console, row, preview, marks)
    console.line()
    console.line("lengths of the samples, in tokens", style="bold")
    for line in histogram_lines(preview.lengths):
        console.line(line)
    console.line()
    for line in packing_lines(preview):
        console.line(f"rows    {line}")
    for line in preview.ledger.summary_lines():
        console.line(f"data    {line}")
    if preview.eval_ledger is not None:
        for line in preview.eval_ledger.summary_lines():
            console.line(f"eval    {line}")
    for check in preview.gate["checks"]:
        examples = f": {', '.join(check['examples'])}" if check["examples"] else ""
        style = "" if check["status"] == "ok" else "yellow"
        console.line(f"gate    {check['status']}: {check['name']}: {check['detail']}{examples}", style=style)
    for warning in preview.warnings:
        console.warning(warning)


def choose_marks(documents: Sequence[Sequence[Stretch]]) -> tuple[str, str]:
    """Returns marks for learned text that cannot be mistaken for text of these documents."""
    numbered = ((f"[[learned {number}:", f":{number}]]") for number in count(1))
    return next(
        marks for marks in chain(MARKS, numbered) if all(_reads_back(stretches, marks) for stretches in documents)
    )


def _reads_back(stretches: Sequence[Stretch], marks: tuple[str, str]) -> bool:
    """Says whether the marked text, read from left to right, gives the stretches back."""
    rest = "".join(_marked(stretch, marks) for stretch in stretches)
    for stretch in stretches:
        text = stretch.text
        if stretch.is_learned:
            before, _, rest = rest.partition(marks[0])
            learned, _, rest = rest.partition(marks[1])
            if before or learned != text:
                return False
        else:
            end = rest.find(marks[0])
            if (rest if end < 0 else rest[:end]) != text or marks[1] in text:
                return False
            rest = rest[len(text) :]
    return True


def _marked(stretch: Stretch, marks: tuple[str, str]) -> str:
    return f"{marks[0]}{stretch.text}{marks[1]}" if stretch.is_learned else stretch.text


def histogram_lines(bins: list[Bin]) -> list[str]:
    """Returns one line a bin, with a bar as long as its share of the largest."""
    most = max(each.samples for each in bins)
    names = [f"{each.start:,} - {each.end:,}" if each.end > each.start else f"{each.start:,}" for each in bins]
    width = max(map(len, names))
    lines = []
    for name, each in zip(names, bins, strict=True):
        # A bin that is not empty shows at least one mark.
        length = max(round(_BAR_WIDTH * each.samples / most), int(each.samples > 0))
        lines.append(f"  {name:>{width}}  {'#' * length:<{_BAR_WIDTH}}  {each.samples:,}")
    return lines


def packing_lines(preview: Preview) -> list[str]:
    """Returns how full the rows are."""
    packing = preview.packing
    if not packing.is_packed:
        return [f"{packing.rows:,}, one sample each: {plural(packing.tokens, 'token')} (data.packing is off)"]
    return [
        f"{plural(packing.samples, 'sample')} in {plural(packing.rows, 'row')} of {packing.max_length:,} tokens: "
        f"{packing.tokens:,} real, {packing.fill:.2%} filled, {packing.padding_tokens:,} padding, "
        f"at most {plural(packing.most_samples_in_a_row, 'sample')} in a row"
    ]


def _show_row(console: Console, row: Row, preview: Preview, marks: tuple[str, str]) -> None:
    num_documents, packing = len(row.documents), preview.packing
    what = plural(num_documents, "sample") + (", each seeing only itself" if num_documents > 1 else "")
    filled = f"{row.num_tokens:,} of {packing.max_length:,} tokens"
    console.line()
    console.line(f"row {row.row + 1:,} of {packing.rows:,}: {filled}, {what}", style="bold")
    for document in row.documents[:_DOCUMENTS_SHOWN]:
        console.line(
            f"--- {document.source}: {plural(len(document.tokens), 'token')}, {document.num_learned:,} learned",
            style="cyan",
        )
        console.spans(list(_spans(document, marks)))
    left_out = num_documents - _DOCUMENTS_SHOWN
    if left_out > 0:
        more = "1 more sample" if left_out == 1 else f"{left_out:,} more samples"
        console.line(f"--- {more} in this row; --html and --json show all", style="cyan")


def _spans(document: Document, marks: tuple[str, str]) -> Iterator[tuple[str, str]]:
    for stretch in document.stretches:
        yield _marked(stretch, marks), LEARNED_STYLE if stretch.is_learned else CONTEXT_STYLE
        if stretch.is_learned and stretch.weight != 1.0:
            yield f"(x{stretch.weight:g})", WEIGHT_STYLE
