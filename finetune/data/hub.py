"""Read a dataset of the Hugging Face hub, or a local copy of one, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from finetune.data.shorten import shorten
from finetune.data.table_files import rows_of, without_none
from finetune.data.types import Origin
from finetune.errors import DataError, EnvironmentProblem
from finetune.recipe.paths import RELATIVE_TO

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset; it is downloaded at the first use, and once."""

    id: str
    name: str | None
    split: str
    revision: str | None

    @property
    def label(self) -> str:
        """What messages and origins call it."""
        return f"{self.id}[{self.split}]"

    def files(self) -> list[str]:
        """Returns the Arrow files of the local copy.

        Raises:
            DataError, EnvironmentProblem: as `records` does.
        """
        return [entry["filename"] for entry in _load(self).cache_files]

    def records(self) -> Iterator[tuple[Origin, dict[str, Any]]]:
        """Yields the rows, without the nulls that Arrow fills in.

        Raises:
            EnvironmentProblem: the hub cannot be reached, and there is no local copy.
            DataError: there is no such dataset, configuration, split or revision, or it is empty.
        """
        dataset = _load(self)
        number = 0
        for row in _rows(dataset):
            number += 1
            yield Origin(self.label, number), row
        if number == 0:
            raise DataError("the split holds no records", place=self.label, remedy="Name another `split`.")


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    if any(_decodes(feature) for feature in dataset.features.values()):
        # Texts of JSON are decoded by the library; its rows hold the same filled-in nulls.
        for row in dataset:
            yield without_none(row)
        return
    for batch in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from rows_of(batch)  # type: ignore[arg-type]


def _decodes(feature: Any) -> bool:
    """Tells whether a column, or a part of it, is stored otherwise than it is read."""
    if isinstance(feature, dict):
        return any(map(_decodes, feature.values()))
    if isinstance(feature, list):
        return any(map(_decodes, feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _decodes(inner))


@lru_cache(maxsize=32)
def _load(hub: HubDataset) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        return load_dataset(hub.id, name=hub.name, split=hub.split, revision=hub.revision)  # type: ignore[return-value]
    except DatasetNotFoundError as error:
        raise DataError(
            f"there is no file or folder of this name, and no such dataset on the hub: {shorten(str(error))}",
            place=hub.id,
            remedy="Correct `path`: a dataset is named org/name, and a private one needs `hf auth login`. "
            f"{RELATIVE_TO}",
        ) from error
    except (ConnectionError, OSError) as error:
        raise EnvironmentProblem(
            f"there is no file or folder of this name, and the hub's dataset cannot be reached: {shorten(str(error))}",
            place=hub.id,
            remedy="Connect to the network and load it once (later runs use the local copy), or name a local file or "
            f"folder. {RELATIVE_TO}",
        ) from error
    except (ValueError, DatasetsError) as error:
        # The library's message lists the configurations or splits that there are.
        raise DataError(
            f"the dataset has no such configuration or split, or its files are broken: {' '.join(str(error).split())}",
            place=hub.label,
            remedy="Set the source's `name` and `split` to ones that the dataset has.",
        ) from error
