"""Steps that fp16 leaves out: its loss scale grows until a gradient overflows, and is halved then."""

from __future__ import annotations

import math

import torch

MAX_IN_A_ROW = 10
"""Steps left out in a row before the run is stopped: each halves the loss scale, from 65,536 at first."""


class SkippedSteps:
    """Tells a step left out from a run that broke.

    accelerate's own flag misses it for fused optimizers, which leave the step out themselves; the scale does not.
    """

    def __init__(self) -> None:
        self.count = 0
        """Steps left out so far."""
        self._in_a_row = 0
        self._scale = math.inf

    def explain(self, scaler: torch.amp.GradScaler | None, *, loss: float, grad_norm: float) -> bool:
        """Says whether a logged step is sound: all finite, or left out, and not the tenth in a row."""
        scale_fell = self._fell(scaler)
        if not math.isfinite(loss):
            return False
        if math.isfinite(grad_norm):
            self._in_a_row = 0
            return True
        if not scale_fell:
            return False
        self.count += 1
        self._in_a_row += 1
        return self._in_a_row < MAX_IN_A_ROW

    def _fell(self, scaler: torch.amp.GradScaler | None) -> bool:
        if scaler is None:
            return False
        before, self._scale = self._scale, scaler.get_scale()
        return self._scale < before
