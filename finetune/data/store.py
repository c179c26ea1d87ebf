"""Hold many tokenized samples in a few flat arrays, in memory or mapped from a folder.

    input_ids  int32 [T]    all samples' tokens, one after the other
    labels     int32 [T]    the same for labels
    offsets    int64 [N+1]  sample i is input_ids[offsets[i]:offsets[i + 1]]
    origins    int64 [N, 2] index into the table of paths, number of the record

A million samples need no Python object each, and a saved store opens in the time that mapping five files takes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune.data.types import IGNORE_INDEX, Origin, Sample

_ARRAYS = {"input_ids": np.int32, "labels": np.int32, "offsets": np.int64, "origins": np.int64}
_MANIFEST = "store.json"
_COUNT_CHUNK_TOKENS = 1 << 24


@dataclass(frozen=True, eq=False)
class SampleStore:
    """An immutable sequence of samples; T tokens in N samples."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]
    origins: NDArray[np.int64]
    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`; its arrays are views of the store's."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        tokens = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Sample(self.input_ids[tokens], self.labels[tokens], self.origin(index))

    def origin(self, index: int) -> Origin:
        """Returns where sample `index` came from."""
        path, record = self.origins[index]
        return Origin(self.paths[path], int(record))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample [N]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return len(self.input_ids)

    @cached_property
    def num_supervised_tokens(self) -> int:
        """Tokens that are learned; counted in chunks, so that a mapped store is not read into memory at once."""
        starts = range(0, len(self.labels), _COUNT_CHUNK_TOKENS)
        return sum(int(np.count_nonzero(self.labels[at : at + _COUNT_CHUNK_TOKENS] != IGNORE_INDEX)) for at in starts)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> SampleStore:
        """Returns a store in memory with these samples, in this order; a run of neighbours is copied at once."""
        chosen = np.asarray(indices, dtype=np.int64)
        offsets = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(self.lengths[chosen], out=offsets[1:])
        input_ids, labels = np.empty(offsets[-1], dtype=np.int32), np.empty(offsets[-1], dtype=np.int32)
        breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
        firsts = np.concatenate([[0], breaks, [len(chosen)]])
        for first, last in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            if first == last:
                continue
            source = slice(int(self.offsets[chosen[first]]), int(self.offsets[chosen[last - 1] + 1]))
            target = slice(int(offsets[first]), int(offsets[last]))
            input_ids[target] = self.input_ids[source]
            labels[target] = self.labels[source]
        return SampleStore(input_ids, labels, offsets, np.array(self.origins[chosen]), self.paths)

    def with_paths(self, paths: tuple[str, ...]) -> SampleStore:
        """Returns the store with other names for its files, in the same order."""
        if len(paths) != len(self.paths):
            raise ValueError(f"the store has {len(self.paths)} files, not {len(paths)}")
        return replace(self, paths=paths)

    def save(self, folder: Path) -> None:
        """Writes the arrays and a manifest of their sizes into an existing folder."""
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", np.ascontiguousarray(getattr(self, name)), allow_pickle=False)
        manifest = {
            "paths": self.paths,
            "num_samples": len(self),
            "num_tokens": self.num_tokens,
            "num_supervised_tokens": self.num_supervised_tokens,
        }
        (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SampleStore:
        """Maps a saved store; nothing but the manifest and the array headers is read.

        Raises:
            OSError, ValueError, KeyError: a file is missing, cut short or does not fit the others.
        """
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
        num_samples, num_tokens = int(manifest["num_samples"]), int(manifest["num_tokens"])
        shapes = {
            "input_ids": (num_tokens,),
            "labels": (num_tokens,),
            "offsets": (num_samples + 1,),
            "origins": (num_samples, 2),
        }
        for name, dtype in _ARRAYS.items():
            if arrays[name].shape != shapes[name] or arrays[name].dtype != dtype:
                raise ValueError(f"{name}.npy does not fit {_MANIFEST}")
        if arrays["offsets"][0] != 0 or arrays["offsets"][-1] != num_tokens:
            raise ValueError("offsets.npy does not span the tokens")
        store = cls(**arrays, paths=tuple(manifest["paths"]))
        # Known from saving, so that no one has to read all labels to count them again.
        store.__dict__["num_supervised_tokens"] = int(manifest["num_supervised_tokens"])
        return store


class StoreBuilder:
    """Collects samples one by one; memory grows by 8 bytes a token and 24 a sample."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._input_ids = array("i")
        self._labels = array("i")
        self._offsets = array("q", [0])
        self._origins = array("q")

    def add(self, sample: Sample, *, source: int) -> None:
        """Appends a sample that comes from the `source`-th path."""
        self._input_ids.frombytes(sample.input_ids.astype(np.int32, copy=False).tobytes())
        self._labels.frombytes(sample.labels.astype(np.int32, copy=False).tobytes())
        self._offsets.append(len(self._input_ids))
        self._origins.extend((source, sample.origin.record))

    def finish(self) -> SampleStore:
        """Returns the store; the arrays are handed over, not copied, so nothing may be added later."""
        return SampleStore(
            input_ids=np.frombuffer(self._input_ids, dtype=np.int32),
            labels=np.frombuffer(self._labels, dtype=np.int32),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            origins=np.frombuffer(self._origins, dtype=np.int64).reshape(-1, 2),
            paths=self._paths,
        )
