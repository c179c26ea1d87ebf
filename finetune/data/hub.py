"""Read a dataset of the Hugging Face hub: from its local copy, as a stream, or by downloading it first.

A local copy of the wanted commit is read where there is one. Otherwise rows are streamed if the recipe says so, or if
it wants the first `max_rows` only, and the whole dataset is downloaded if not. A stream keeps a few batches in memory
and nothing on the disk but the tokens.

The rows are the same either way where all files of the dataset have columns of the same types. Where they differ
(numbers in one CSV file, text in the next), a download casts them to those of the first or fails, and a stream may pass
each on as it is; so the key of the token cache tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.console import Say
from finetune.data.hub_commit import Commit, local_copies, resolve_commit
from finetune.data.hub_errors import hub_error, unreachable
from finetune.data.table_files import without_none
from finetune.data.types import Origin
from finetune.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, IterableDataset


_BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset."""

    id: str
    name: str | None
    split: str
    revision: str | None
    streaming: bool = False
    max_rows: int | None = None
    """Rows that will be read; the reader stops by itself, this decides whether the rest is worth a download."""

    @property
    def label(self) -> str:
        """What messages and origins call it."""
        return f"{self.id}[{self.split}]"

    @property
    def is_streamed(self) -> bool:
        """Whether rows are streamed where there is no local copy; a slice of a split cannot be."""
        return self.streaming or (self.max_rows is not None and "[" not in self.split)

    def commit(self) -> Commit:
        """Returns the commit that is read.

        Raises:
            DataError, EnvironmentProblem: as `resolve_commit` does.
        """
        return resolve_commit(self.id, self.name, self.revision)

    def records(self, *, say: Say) -> Iterator[tuple[Origin, dict[str, Any]]]:
        """Yields the rows, without the nulls that Arrow fills in.

        Args:
            say: takes a line on where the rows come from.

        Raises:
            EnvironmentProblem: the hub cannot be reached, or no longer, and there is no local copy.
            DataError: there is no such dataset, configuration, split or revision, it is empty, or its files are broken.
        """
        split = _open(self, self.commit(), say)
        number, chunks = 0, _chunks(split)
        while True:
            with _library_errors(self, num_read=number):
                chunk = next(chunks, None)
            if chunk is None:
                break
            for row in chunk:
                number += 1
                yield Origin(self.label, number), without_none(row)
        if number == 0:
            raise DataError("the split holds no records", place=self.label, remedy="Name another `split`.")


@contextmanager
def _library_errors(hub: HubDataset, *, num_read: int = 0) -> Iterator[None]:
    """Turns what a call of the hub's libraries raises into an error that names the dataset.

    They raise plain errors (ValueError, TypeError, RuntimeError) beside those of the network, so nothing of ours may be
    called inside.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import httpx

    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, httpx.HTTPError, DatasetsError) as error:
        raise hub_error(error, id=hub.id, place=hub.label, revision=hub.revision, num_read=num_read) from error


def _open(hub: HubDataset, commit: Commit, say: Say) -> Dataset | IterableDataset:
    """Returns the split at the commit."""
    builder = _builder(hub, commit)
    if Path(builder.cache_dir).is_dir():
        say(f"{hub.label}: read from the local copy")
    elif hub.is_streamed:
        rows = f"the first {hub.max_rows:,} rows" if hub.max_rows is not None else "rows"
        say(f"{hub.label}: {rows} read from the hub as they arrive")
        with _library_errors(hub):
            return builder.as_streaming_dataset(split=hub.split)  # type: ignore[return-value]
    else:
        say(f"{hub.label}: downloaded once, then read from the local copy")
        with _library_errors(hub):
            builder.download_and_prepare()
    with _library_errors(hub):
        return builder.as_dataset(split=hub.split)  # type: ignore[return-value,arg-type]


def _builder(hub: HubDataset, commit: Commit) -> DatasetBuilder:
    """Returns what makes the split at the commit, without asking the hub where a local copy will do."""
    from datasets import load_dataset_builder

    local = _local_builder(hub, commit)
    # Which configuration is the default, the hub alone can tell; without it that is the one of this name.
    if local is not None and (hub.name is not None or commit.is_known_offline):
        return local
    if not commit.is_known_offline:
        try:
            with _library_errors(hub):
                remote = load_dataset_builder(hub.id, name=hub.name, revision=commit.sha)
        except EnvironmentProblem:  # not reached, with a commit that nobody had to be asked for
            if local is None:
                raise
            return local
        if remote.hash == commit.sha:  # without a network the library takes the newest copy, whatever its commit
            return remote
    if local is not None:
        return local
    missing = f"there is no local copy of commit {commit.sha[:12]}" + (f", {hub.name}" if hub.name else "")
    raise unreachable(missing, place=hub.label)


def _local_builder(hub: HubDataset, commit: Commit) -> DatasetBuilder | None:
    """Returns the builder of a local copy; None where there is no copy."""
    from datasets.packaged_modules.cache.cache import Cache

    copies = local_copies(hub.id, hub.name, commit.sha)
    if not copies:
        return None
    config, version, sha = copies[-1].parts[-3:]
    return Cache(dataset_name=hub.id.rpartition("/")[2], repo_id=hub.id, config_name=config, version=version, hash=sha)


def _chunks(split: Dataset | IterableDataset) -> Iterator[list[dict[str, Any]]]:
    """Returns the rows, some at a time; no code but the library's runs while it is iterated."""
    from datasets import Dataset

    if not isinstance(split, Dataset) or any(_decodes(feature) for feature in split.features.values()):
        # Texts of JSON are decoded by the library; its rows hold the same filled-in nulls.
        return ([row] for row in split)  # type: ignore[misc]
    batches = split.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    return (batch.to_pylist(maps_as_pydicts="strict") for batch in batches)  # type: ignore[union-attr]


def _decodes(feature: Any) -> bool:
    """Tells whether a column, or a part of it, is stored otherwise than it is read."""
    if isinstance(feature, dict):
        return any(map(_decodes, feature.values()))
    if isinstance(feature, list):
        return any(map(_decodes, feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _decodes(inner))
