"""What a run has done so far: tokens, time, losses that were not looked at yet."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class MicroBatchRecord:
    """One forward pass whose loss still lies on the device."""

    rows: list[int]
    loss: torch.Tensor  # scalar


@dataclass
class Meter:
    """Counts real tokens and slots, and the time since metrics were last fetched.

    Counts come from the collator's Python integers, so counting never waits for the device.
    """

    real_tokens: int = 0
    slots: int = 0
    elapsed_seconds: float = 0.0
    """Time spent in steps, without evaluations and checkpoints; goes on over a resume."""
    pending: list[MicroBatchRecord] = field(default_factory=list)
    _window_tokens: int = 0
    _window_started: float | None = None

    def start_micro_batch(self) -> None:
        """Starts the clock, unless it runs since an earlier micro-batch of the window."""
        if self._window_started is None:
            self._window_started = time.perf_counter()

    def count(self, record: MicroBatchRecord, *, num_real_tokens: int, num_slots: int) -> None:
        self.real_tokens += num_real_tokens
        self.slots += num_slots
        self._window_tokens += num_real_tokens
        self.pending.append(record)

    def close_window(self) -> tuple[float, int]:
        """Ends the window; returns its seconds and real tokens. Call it after the metrics were fetched, since that
        waits for the device."""
        seconds = time.perf_counter() - self._window_started if self._window_started is not None else 0.0
        tokens = self._window_tokens
        self.elapsed_seconds += seconds
        self._window_started, self._window_tokens = None, 0
        self.pending = []
        return seconds, tokens

    def first_not_finite(self) -> MicroBatchRecord | None:
        """Returns the first micro-batch of the window whose loss is NaN or infinite. Waits for the device."""
        if not self.pending:
            return None
        finite = torch.stack([record.loss for record in self.pending]).isfinite().tolist()
        return next((record for record, ok in zip(self.pending, finite, strict=True) if not ok), None)

    def state_dict(self) -> dict[str, float]:
        return {"real_tokens": self.real_tokens, "slots": self.slots, "elapsed_seconds": self.elapsed_seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.real_tokens = int(state["real_tokens"])
        self.slots = int(state["slots"])
        self.elapsed_seconds = float(state["elapsed_seconds"])


def resident_bytes() -> int:
    """Returns the host memory that this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
