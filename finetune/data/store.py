"""Hold many tokenized samples in a few flat arrays, in memory or mapped from a folder.

    input_ids      int32  [T]     all samples' tokens, one after the other
    labels         int32  [T]     the same for labels
    starts         int64  [N]     sample i is input_ids[starts[i]:starts[i] + lengths[i]]
    lengths        int64  [N]     tokens of each sample
    supervised     int64  [N]     tokens of each sample that are learned
    digests        uint64 [N]     hash of the content of the record that the sample came from
    label_digests  uint64 [N]     hash of the sample's own labels: which of its tokens are learned
    records        int64  [N]     the record that the sample came from, counted from 0 over all sources
    origins        int64  [N, 2]  index into the table of paths, number of the record in its file
    weight_runs                   where learned tokens have a weight other than 1 in the loss; mostly none

A million samples need no Python object each, and a saved store opens in the time that mapping its files takes.
A selection of samples shares the tokens and has index arrays of its own: 64 bytes a sample.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from finetune.data.loss_weights import WeightRuns
from finetune.data.types import Origin, Sample

_ARRAYS = {
    "input_ids": np.int32,
    "labels": np.int32,
    "starts": np.int64,
    "lengths": np.int64,
    "supervised": np.int64,
    "digests": np.uint64,
    "label_digests": np.uint64,
    "records": np.int64,
    "origins": np.int64,
}
_WEIGHT_ARRAYS = {"starts": np.int64, "ends": np.int64, "values": np.float32}
"""Arrays of `WeightRuns`, saved as `weight_<name>.npy` where there are runs."""
_MANIFEST = "store.json"
_CHUNK_TOKENS = 1 << 24
SPILL_TOKENS = 1 << 24
"""Tokens that a builder holds in memory (8 bytes each) before it writes them to a temporary file."""


def content_digest(values: NDArray[np.int32]) -> int:
    """Returns a 64-bit hash of a document's tokens or labels; two of a million different ones agree once in 37 million
    times."""
    return int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest(), "little")


@dataclass(frozen=True, eq=False)
class SampleStore:
    """An immutable sequence of samples; N samples over T tokens, of which a selection uses a part."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    supervised: NDArray[np.int64]
    digests: NDArray[np.uint64]
    label_digests: NDArray[np.uint64]
    records: NDArray[np.int64]
    origins: NDArray[np.int64]
    paths: tuple[str, ...]
    max_id: int
    """Largest token id of all samples (of the whole store, where this is a selection)."""
    weight_runs: WeightRuns = field(default_factory=WeightRuns.none)
    """By token of the whole store, like `starts`."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`; its arrays are views of the store's."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        start = int(self.starts[index])
        tokens = slice(start, start + int(self.lengths[index]))
        labels = self.labels[tokens]
        weights = self.weight_runs.beside(labels, start=start) if len(self.weight_runs) else None
        return Sample(self.input_ids[tokens], labels, self.origin(index), weights)

    def origin(self, index: int) -> Origin:
        """Returns where sample `index` came from."""
        path, record = self.origins[index]
        return Origin(self.paths[path], int(record))

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())

    @cached_property
    def num_supervised_tokens(self) -> int:
        """Tokens that are learned."""
        return int(self.supervised.sum())

    @cached_property
    def weighted(self) -> NDArray[np.int64]:
        """Learned tokens of each sample with a weight other than 1 [N]."""
        return self.weight_runs.num_tokens(self.starts, self.starts + self.lengths)

    @cached_property
    def record_numbers(self) -> NDArray[np.int64]:
        """Number of the record that each sample came from, from 0 in the order of the samples [N].

        The pieces of a record that was split stand side by side and have one number. Places cannot tell them: a file
        that is named twice has two records of each place, which may stand side by side too.
        """
        is_next = self.records[1:] != self.records[:-1]
        return np.concatenate([np.zeros(min(1, len(self)), dtype=np.int64), np.cumsum(is_next, dtype=np.int64)])

    def count_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns how often each token id occurs in the samples; reads their tokens, once."""
        counts = np.zeros(len(ids), dtype=np.int64)
        lowest = min(ids, default=0)
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            tokens = self.input_ids[start : start + length]
            tokens = tokens[tokens >= lowest]  # new tokens have the highest ids, so next to nothing is left
            if len(tokens):
                counts += [int((tokens == each).sum()) for each in ids]
        return counts.tolist()

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> SampleStore:
        """Returns a store of these samples, in this order; no token is copied or read."""
        chosen = np.asarray(indices, dtype=np.int64)
        names = ("starts", "lengths", "supervised", "digests", "label_digests", "records", "origins")
        return replace(self, **{name: np.asarray(getattr(self, name)[chosen]) for name in names})

    def with_paths(self, paths: tuple[str, ...]) -> SampleStore:
        """Returns the store with other names for its files, in the same order."""
        if len(paths) != len(self.paths):
            raise ValueError(f"the store has {len(self.paths)} files, not {len(paths)}")
        return replace(self, paths=paths)

    def save(self, folder: Path) -> None:
        """Writes the arrays and a manifest of their sizes into an existing folder; the store must be no selection."""
        assert self.num_tokens == len(self.input_ids), "a selection is not saved"
        arrays: dict[str, NDArray[np.generic]] = {name: getattr(self, name) for name in _ARRAYS}
        if len(self.weight_runs):
            arrays |= {f"weight_{name}": getattr(self.weight_runs, name) for name in _WEIGHT_ARRAYS}
        for name, values in arrays.items():
            target = np.lib.format.open_memmap(
                folder / f"{name}.npy", mode="w+", dtype=values.dtype, shape=values.shape
            )
            for at in range(0, len(values), _CHUNK_TOKENS):
                target[at : at + _CHUNK_TOKENS] = values[at : at + _CHUNK_TOKENS]
            target.flush()
        manifest = {
            "paths": self.paths,
            "num_samples": len(self),
            "num_tokens": self.num_tokens,
            "max_id": self.max_id,
            "num_weight_runs": len(self.weight_runs),
        }
        (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SampleStore:
        """Maps a saved store; nothing but the manifest and the small arrays is read.

        Raises:
            OSError, ValueError, KeyError: a file is missing, cut short or does not fit the others.
        """
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
        num_samples, num_tokens = int(manifest["num_samples"]), int(manifest["num_tokens"])
        for name, dtype in _ARRAYS.items():
            length = num_tokens if name in ("input_ids", "labels") else num_samples
            shape = (length, 2) if name == "origins" else (length,)
            if arrays[name].shape != shape or arrays[name].dtype != dtype:
                raise ValueError(f"{name}.npy does not fit {_MANIFEST}")
        ends = np.cumsum(arrays["lengths"])
        if num_samples and (
            ends[-1] != num_tokens or arrays["starts"][0] != 0 or np.any(arrays["starts"][1:] != ends[:-1])
        ):
            raise ValueError("the samples do not span the tokens")
        runs = _load_runs(folder, int(manifest["num_weight_runs"]), num_tokens=num_tokens)
        return cls(**arrays, paths=tuple(manifest["paths"]), max_id=int(manifest["max_id"]), weight_runs=runs)


def _load_runs(folder: Path, num_runs: int, *, num_tokens: int) -> WeightRuns:
    """Maps the saved runs of weights.

    Raises:
        OSError, ValueError: a file is missing or does not fit the tokens.
    """
    if not num_runs:
        return WeightRuns.none()
    arrays = {
        name: np.load(folder / f"weight_{name}.npy", mmap_mode="r", allow_pickle=False) for name in _WEIGHT_ARRAYS
    }
    for name, dtype in _WEIGHT_ARRAYS.items():
        if arrays[name].shape != (num_runs,) or arrays[name].dtype != dtype:
            raise ValueError(f"weight_{name}.npy does not fit {_MANIFEST}")
    runs = WeightRuns(**arrays)
    runs.require_within(num_tokens)
    return runs


class StoreBuilder:
    """Collects samples; in memory up to `spill_tokens`, then in nameless temporary files that go with the process.

    Memory grows by 64 bytes a sample; tokens past the limit cost disk, 8 bytes each, in `folder` or where TMPDIR says.
    """

    def __init__(self, *, folder: Path | None = None, spill_tokens: int = SPILL_TOKENS) -> None:
        self._folder, self._spill_tokens = folder, spill_tokens
        self._paths: dict[str, int] = {}
        self._tokens = {"input_ids": array("i"), "labels": array("i")}
        self._files: dict[str, IO[bytes]] = {}
        self._lengths, self._supervised, self._origins = array("q"), array("q"), array("q")
        self._digests, self._label_digests, self._records = array("Q"), array("Q"), array("q")
        self._weights = {"starts": array("q"), "ends": array("q"), "values": array("f")}
        self._num_tokens = 0
        self._max_id = -1

    def add_path(self, path: str) -> int:
        """Returns the index of a data file, a new one for a new file."""
        return self._paths.setdefault(path, len(self._paths))

    def add(self, sample: Sample, *, digest: int | None = None, is_next_piece: bool = False) -> None:
        """Appends a sample; `digest` is that of its record where the sample is only a piece of it."""
        if digest is None:
            digest = content_digest(sample.input_ids)
        weights = sample.loss_weights
        runs = WeightRuns.none() if weights is None else WeightRuns.of(weights)
        self.add_tokens(sample.input_ids, sample.labels, weight_runs=runs)
        self.add_entry(
            len(sample),
            supervised=sample.num_supervised_tokens,
            digest=digest,
            label_digest=content_digest(sample.labels),
            origin=sample.origin,
            is_next_piece=is_next_piece,
        )

    def add_tokens(
        self, input_ids: NDArray[np.int32], labels: NDArray[np.int32], *, weight_runs: WeightRuns | None = None
    ) -> None:
        """Appends the tokens of one or many samples, whose entries follow by `add_entry`."""
        if not len(input_ids):
            return
        if weight_runs is not None and len(weight_runs):
            self._weights["starts"].frombytes((weight_runs.starts + self._num_tokens).tobytes())
            self._weights["ends"].frombytes((weight_runs.ends + self._num_tokens).tobytes())
            self._weights["values"].frombytes(weight_runs.values.tobytes())
        self._num_tokens += len(input_ids)
        self._max_id = max(self._max_id, int(input_ids.max()))
        for name, values in (("input_ids", input_ids), ("labels", labels)):
            self._tokens[name].frombytes(values.astype(np.int32, copy=False).tobytes())
        if len(self._tokens["input_ids"]) >= self._spill_tokens:
            self._spill()

    def add_entry(
        self,
        length: int,
        *,
        supervised: int,
        digest: int,
        label_digest: int,
        origin: Origin,
        is_next_piece: bool = False,
    ) -> None:
        """Appends the next sample's place among the tokens; `is_next_piece` says that it is of the same record."""
        assert self._records or not is_next_piece, "the first sample is no next piece"
        last = self._records[-1] if self._records else -1
        self._records.append(last if is_next_piece else last + 1)
        self._lengths.append(length)
        self._supervised.append(supervised)
        self._digests.append(digest)
        self._label_digests.append(label_digest)
        self._origins.extend((self.add_path(origin.path), origin.record))

    def finish(self) -> SampleStore:
        """Returns the store; the arrays are handed over, not copied, so nothing may be added later."""
        if self._files:
            self._spill()
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        starts = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], out=starts[1:])
        return SampleStore(
            input_ids=self._flat("input_ids"),
            labels=self._flat("labels"),
            starts=starts,
            lengths=lengths,
            supervised=np.frombuffer(self._supervised, dtype=np.int64),
            digests=np.frombuffer(self._digests, dtype=np.uint64),
            label_digests=np.frombuffer(self._label_digests, dtype=np.uint64),
            records=np.frombuffer(self._records, dtype=np.int64),
            origins=np.frombuffer(self._origins, dtype=np.int64).reshape(-1, 2),
            paths=tuple(self._paths),
            max_id=self._max_id,
            weight_runs=WeightRuns(
                starts=np.frombuffer(self._weights["starts"], dtype=np.int64),
                ends=np.frombuffer(self._weights["ends"], dtype=np.int64),
                values=np.frombuffer(self._weights["values"], dtype=np.float32),
            ),
        )

    def _spill(self) -> None:
        for name, values in self._tokens.items():
            if name not in self._files:
                self._files[name] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as its map
            values.tofile(self._files[name])
            del values[:]

    def _flat(self, name: str) -> NDArray[np.int32]:
        if name not in self._files:
            return np.frombuffer(self._tokens[name], dtype=np.int32)
        file = self._files[name]
        file.flush()
        return np.memmap(file, dtype=np.int32, mode="r")
