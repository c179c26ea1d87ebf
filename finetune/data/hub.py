"""Read a dataset of the Hugging Face hub: from its local copy, as a stream, or by downloading it first.

A local copy of the wanted commit is read where there is one. Otherwise rows are streamed if the recipe says so, or if
it wants the first `max_rows` only, and the whole dataset is downloaded if not. A stream keeps a few batches in memory
and nothing on the disk but the tokens. The rows are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.console import Say
from finetune.data.hub_commit import Commit, local_copies, resolve_commit
from finetune.data.hub_errors import hub_error, unreachable
from finetune.data.table_files import rows_of, without_none
from finetune.data.types import Origin
from finetune.errors import DataError, FinetuneError

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
        from huggingface_hub.utils import httpx

        commit = self.commit()
        number = 0
        try:
            for row in _rows(_open(self, commit, say)):
                number += 1
                yield Origin(self.label, number), row
        except FinetuneError:
            raise
        # Readers of the library raise plain ones (ValueError, TypeError, RuntimeError) beside those of the network.
        except (OSError, ValueError, TypeError, RuntimeError, LookupError, httpx.HTTPError, _base_error()) as error:
            raise hub_error(error, id=self.id, place=self.label, revision=self.revision, num_read=number) from error
        if number == 0:
            raise DataError("the split holds no records", place=self.label, remedy="Name another `split`.")


def _base_error() -> type[Exception]:
    from datasets.exceptions import DatasetsError

    return DatasetsError


def _open(hub: HubDataset, commit: Commit, say: Say) -> Dataset | IterableDataset:
    """Returns the split at the commit."""
    builder = _builder(hub, commit)
    if Path(builder.cache_dir).is_dir():
        say(f"{hub.label}: read from the local copy")
    elif hub.is_streamed:
        rows = f"the first {hub.max_rows:,} rows" if hub.max_rows is not None else "rows"
        say(f"{hub.label}: {rows} read from the hub as they arrive")
        return builder.as_streaming_dataset(split=hub.split)  # type: ignore[return-value]
    else:
        say(f"{hub.label}: downloaded once, then read from the local copy")
        builder.download_and_prepare()
    return builder.as_dataset(split=hub.split)  # type: ignore[return-value,arg-type]


def _builder(hub: HubDataset, commit: Commit) -> DatasetBuilder:
    """Returns what makes the split at the commit, without asking the hub where a local copy will do."""
    from datasets import load_dataset_builder

    local = _local_builder(hub, commit)
    # Which configuration is the default, the hub alone can tell; without it that is the one of this name.
    if local is not None and (hub.name is not None or commit.is_known_offline):
        return local
    if not commit.is_known_offline:
        remote = load_dataset_builder(hub.id, name=hub.name, revision=commit.sha)
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


def _rows(split: Dataset | IterableDataset) -> Iterator[dict[str, Any]]:
    from datasets import Dataset

    if not isinstance(split, Dataset) or any(_decodes(feature) for feature in split.features.values()):
        # Texts of JSON are decoded by the library; its rows hold the same filled-in nulls.
        for row in split:
            yield without_none(row)
        return
    for batch in split.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from rows_of(batch)  # type: ignore[arg-type]


def _decodes(feature: Any) -> bool:
    """Tells whether a column, or a part of it, is stored otherwise than it is read."""
    if isinstance(feature, dict):
        return any(map(_decodes, feature.values()))
    if isinstance(feature, list):
        return any(map(_decodes, feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _decodes(inner))
