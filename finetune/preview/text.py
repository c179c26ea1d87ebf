"""A preview on the terminal: what is learned in colour, or between marks where there is no colour."""

from __future__ import annotations

from finetune.console import Console
from finetune.preview.model import Bin, Document, Preview, Row

LEARNED_STYLE = "bold green"
CONTEXT_STYLE = "dim"
MARKS = ("[[", "]]")
WEIGHT_STYLE = "yellow"
_BAR_WIDTH = 40
_DOCUMENTS_SHOWN = 5


def show_preview(console: Console, preview: Preview) -> None:
    """Prints rows, lengths, packing, ledger and gate."""
    legend = "bold green is learned" if console.has_color else f"{MARKS[0]}...{MARKS[1]} is learned"
    if preview.rows:
        has_weights = any(document.has_weights for row in preview.rows for document in row.documents)
        weights = ", (x0.5) after it is its weight in the loss" if has_weights else ""
        console.line(f"rows as the model sees them; {legend}{weights}, the rest is context")
    for row in preview.rows:
        _show_row(console, row, preview.packing.rows, preview.packing.max_length)
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
        return [f"{packing.rows:,}, one sample each: {packing.tokens:,} tokens (data.packing is off)"]
    return [
        f"{packing.samples:,} samples in {packing.rows:,} rows of {packing.max_length:,} tokens: "
        f"{packing.tokens:,} real, {packing.fill:.2%} filled, {packing.padding_tokens:,} padding, "
        f"at most {packing.most_samples_in_a_row:,} samples in a row"
    ]


def _show_row(console: Console, row: Row, num_rows: int, max_length: int) -> None:
    count = len(row.documents)
    what = "1 sample" if count == 1 else f"{count:,} samples, each seeing only itself"
    console.line()
    console.line(
        f"row {row.row + 1} of {num_rows:,}: {row.num_tokens:,} of {max_length:,} tokens, {what}", style="bold"
    )
    for document in row.documents[:_DOCUMENTS_SHOWN]:
        console.line(
            f"--- {document.source}: {len(document.tokens):,} tokens, {document.num_learned:,} learned", style="cyan"
        )
        console.spans(_spans(document, has_color=console.has_color))
    left_out = count - _DOCUMENTS_SHOWN
    if left_out > 0:
        console.line(f"--- {left_out:,} more samples in this row; --html and --json show all", style="cyan")


def _spans(document: Document, *, has_color: bool) -> list[tuple[str, str]]:
    before, after = ("", "") if has_color else MARKS
    spans: list[tuple[str, str]] = []
    for stretch in document.stretches:
        if not stretch.is_learned:
            spans.append((stretch.text, CONTEXT_STYLE))
            continue
        spans.append((f"{before}{stretch.text}{after}", LEARNED_STYLE))
        if stretch.weight != 1.0:
            spans.append((f"(x{stretch.weight:g})", WEIGHT_STYLE))
    return spans
