"""A budget of memory that no plan fits: what is short, and the least that works."""

from __future__ import annotations

from finetune.errors import FinetuneError, OutOfMemory, RecipeError
from finetune.optimizations.activations.planner import BudgetTooSmall
from finetune.optimizations.activations.types import GIB

_PLACES = {
    "activation_bytes": "optimizations.activation_memory",
    "host_bytes": "optimizations.host_memory",
}


def too_small(error: BudgetTooSmall, *, fixed_bytes: int) -> FinetuneError:
    """Turns the planner's refusal into an error with the smallest budget that works.

    Args:
        fixed_bytes: what weights, gradients and optimizer take.
    """
    remedies = []
    if error.host_bytes is not None:
        remedies.append(f"optimizations.host_memory={_gib(error.host_bytes)} or more would do alone.")
    if error.short == ("activation_bytes",) and error.activation_bytes is not None:
        least = _gib(error.activation_bytes)
        return RecipeError(
            f"no plan of the activations fits into optimizations.activation_memory; the smallest that works is {least}",
            place=_PLACES["activation_bytes"],
            remedy="\n".join([f"Set optimizations.activation_memory={least} or more, or auto.", *remedies]),
        )
    needed = (fixed_bytes + error.device_bytes) / GIB
    return OutOfMemory(
        f"no plan of the activations fits into the device: the smallest needs {needed:.2f} GiB, "
        f"{fixed_bytes / GIB:.2f} of them for weights, gradients and optimizer",
        place="the device's memory",
        remedy="\n".join(
            [
                "Lower training.rows_per_micro_batch, then data.max_length; with a LoRA adapter, set "
                "model.quantization=nf4.",
                *_also_short(error),
                *remedies,
            ]
        ),
    )


def _also_short(error: BudgetTooSmall) -> list[str]:
    if "activation_bytes" not in error.short or error.activation_bytes is None:
        return []
    return [f"optimizations.activation_memory would have to be {_gib(error.activation_bytes)} or more too."]


def _gib(num_bytes: int) -> str:
    """Rounded up, so that the value given works; small ones keep their digits."""
    for digits in (2, 4, 6, 9):
        value = -(-num_bytes * 10**digits // GIB) / 10**digits
        if value * GIB <= 1.05 * num_bytes:
            break
    return f"{value:.{digits}f}"
