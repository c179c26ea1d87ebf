"""The memory of a card, by its name, its size, or by asking the driver; nothing of torch is loaded for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from finetune.errors import EnvironmentProblem, RecipeError

CARDS_GIB = {
    "rtx2080": 8,
    "rtx2080ti": 11,
    "rtx3060": 12,
    "rtx3090": 24,
    "rtx4060ti": 16,
    "rtx4090": 24,
    "rtx5090": 32,
    "t4": 16,
    "v100": 32,
    "a10": 24,
    "l4": 24,
    "l40s": 48,
    "a6000": 48,
    "a100": 80,
    "h100": 80,
    "h200": 141,
    "b200": 180,
    "dgx_spark": 128,
}
"""Memory in GiB of the common size of each card; another one is given as a size."""
WITHOUT_BF16 = frozenset({"rtx2080", "rtx2080ti", "t4", "v100"})
"""Cards that compute bf16 slowly or not at all."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g)?", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """What is trained on."""

    name: str
    memory_gib: float | None
    """None for the CPU."""
    has_bf16: bool = True
    is_found: bool = False
    """Whether the driver named it, or was not there to name one, and not the user."""

    @property
    def is_cpu(self) -> bool:
        return self.memory_gib is None

    def __str__(self) -> str:
        name = "the CPU" if self.memory_gib is None else f"{self.name} ({self.memory_gib:g} GiB)"
        return f"{name}, as found on this machine" if self.is_found else name


def parse_card(text: str) -> Card:
    """Returns the card that a text means: a name such as `rtx3090`, a size such as `24GiB`, `auto` or `cpu`.

    Raises:
        RecipeError: the text is none of these.
        EnvironmentProblem: `auto`, and the driver's `nvidia-smi` does not answer although it is there.
    """
    name = re.sub(r"[\s_-]+", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")
    if name == "cpu":
        return Card("cpu", None)
    if name == "auto":
        return _asked()
    for known, memory in CARDS_GIB.items():
        if name == known.replace("_", ""):
            return Card(known, float(memory), known not in WITHOUT_BF16)
    size = _SIZE.fullmatch(text.strip())
    if size is None or not 1 <= float(size.group(1)) <= 2048:
        remedy = f"Use auto, cpu, a size such as 24GiB, or one of: {', '.join(CARDS_GIB)}."
        raise RecipeError(f"`{text}` is no card that is known", place="--card", remedy=remedy)
    return Card("a card", float(size.group(1)))


def _asked() -> Card:
    """Asks `nvidia-smi` for the first card; without it there is no card."""
    if shutil.which("nvidia-smi") is None:
        return Card("cpu", None, is_found=True)
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        name, memory_mib, capability = (part.strip() for part in answer.splitlines()[0].split(","))
        return Card(name, round(float(memory_mib) / 1024, 1), float(capability) >= 8.0, is_found=True)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        remedy = "Say which card it is, such as --card rtx3090, --card 24GiB or --card cpu."
        raise EnvironmentProblem(
            f"nvidia-smi does not tell of a card: {error}", place="--card", remedy=remedy
        ) from error
