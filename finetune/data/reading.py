"""Read the records of one source in batches, and settle their format at the first one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune.console import Say
from finetune.data.entry import recognised
from finetune.data.faults import Fault
from finetune.data.formats import Format, convert, describe, recognise, require_same_format
from finetune.data.load import Record
from finetune.data.shorten import shorten_record
from finetune.data.sources import read_source
from finetune.data.tokenize import Batch, batches_of
from finetune.data.types import Conversation, Origin
from finetune.errors import DataError
from finetune.recipe.schema import Source


@dataclass
class Reading:
    """A source while it is read; `format` is known once the first batch is out."""

    source: Source
    number: int
    say: Say
    format: Format | None = None
    shape: str = ""
    """What the first record was recognised as; empty where the recipe names the format."""

    def batches(self) -> Iterator[Batch]:
        """Yields the source's records in batches."""
        yield from batches_of(self._records(), source=self.number, format_of=lambda: self.format)

    def conversations(self) -> Iterator[Conversation]:
        """Yields the conversations themselves, one by one; malformed records are passed over."""
        for origin, record in self._records():
            if isinstance(record, Fault) or self.format is None:
                continue
            try:
                yield convert(record, format=self.format, origin=origin)
            except DataError:  # told and counted when the source was tokenized
                continue

    def _records(self) -> Iterator[tuple[Origin, Record | Fault]]:
        if self.source.format != "auto":
            self.format = self.source.format
        first: Origin | None = None
        for origin, record in read_source(self.source, say=self.say):
            if isinstance(record, DataError):
                yield origin, Fault.of(record, origin)
                continue
            try:
                if self.format is None:
                    self.format, first = recognise(record, origin), origin
                    self.shape = describe(record, self.format)
                    self.say(recognised(self.source.path, self.shape))
                elif first is not None:
                    require_same_format(record, format=self.format, origin=origin, first=first)
            except DataError as error:
                yield origin, Fault.of(error, origin, text=shorten_record(record))
                continue
            yield origin, record


def open_source(source: Source, number: int, *, say: Say) -> Reading:
    """Returns the reading of a source, which is the `number`-th of its list."""
    return Reading(source, number, say)
