"""A step that runs out of memory is run again, whole, under a smaller plan of the activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from finetune.optimizations.activations.describe import plan_lines
from finetune.optimizations.activations.planner import BudgetTooSmall
from finetune.optimizations.activations.runtime import Activations
from finetune.trainer.budget_errors import too_small

LEAST_BYTES = 256 * 2**20
STEP_SHARE = 0.05
"""What a new plan gives up at least: so many bytes, and such a share of what the old one stored on the device."""


@dataclass(frozen=True)
class _MicroBatch:
    inputs: dict[str, Any]
    num_items: Any
    random_states: tuple[torch.Tensor, ...]


class ReplanningStep:
    """Runs the micro-batches of a step; when the device's memory runs out, plans again and repeats those of the step so
    far, with the random states they had. No row is lost, and the weights become what they would have become.

    Args:
        run: forward and backward of one micro-batch.
        begin: called before the first micro-batch of a step.
        forget: takes back what the micro-batches of the step have left: their gradients and counts.
        say: prints a warning.
    """

    def __init__(
        self,
        activations: Activations,
        *,
        run: Callable[[dict[str, Any], Any], torch.Tensor],
        begin: Callable[[], None],
        forget: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._activations, self._run, self._say = activations, run, say
        self._begin, self._forget = begin, forget
        self._step = -1
        self._batches: list[_MicroBatch] = []

    def __call__(self, step: int, inputs: dict[str, Any], num_items: Any) -> torch.Tensor:
        """Runs one micro-batch of a step.

        Args:
            step: optimizer steps that are done.

        Raises:
            FinetuneError: memory ran out, and there is no smaller plan.
        """
        if step != self._step:
            self._step, self._batches = step, []
            self._begin()
        self._batches.append(_MicroBatch(inputs, num_items, _random_states()))
        waiting = self._batches[-1:]
        while True:
            try:
                return [self._run(dict(batch.inputs), batch.num_items) for batch in waiting][-1]
            except torch.OutOfMemoryError as error:
                reason = str(error).strip().partition("\n")[0]
            # Outside the handler: the exception, which holds the failed call's tensors, is gone by now.
            self._plan_again(reason)
            waiting = self._batches
            _set_random_states(waiting[0].random_states)

    def _plan_again(self, reason: str) -> None:
        self._forget()
        before = self._activations.plan
        assert before is not None and self._activations.costs is not None
        fixed = self._activations.costs.fixed_bytes
        by_bytes = max(LEAST_BYTES, int(before.device_bytes * STEP_SHARE))
        try:
            plan = self._activations.replan(by_bytes=by_bytes)
        except BudgetTooSmall as error:
            raise too_small(error, fixed_bytes=fixed) from error
        self._say(
            f"memory ran out in step {self._step + 1} ({reason}); its micro-batches are run again, with "
            f"{by_bytes / 2**30:.2f} GiB less for activations"
        )
        for line in plan_lines(plan, self._activations.costs):
            self._say(line)


def _random_states() -> tuple[torch.Tensor, ...]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *cuda)


def _set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
