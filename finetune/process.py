"""What is settled before the first heavy import: variables and filters that libraries read, and packages that are
asked for by name."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Sequence

from finetune.errors import EnvironmentProblem


def prepare_process(*, needs_hub: bool) -> None:
    """Turns off telemetry and advice, and the network where nothing needs it.

    Args:
        needs_hub: the model or some data is named by a hub id; without, nothing of the run may touch the network.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["DISABLE_TELEMETRY"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its retries; the error that follows them is ours to tell
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # What libraries tell their own developers; no user of this program can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch|bitsandbytes)\b")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Threads of libgomp spin at a barrier before they sleep; with another busy process beside, they spin away the time
    # that the awaited thread needs. Fewer spins cost 3 % alone and save 60 % then: docs/benchmarks/cpu_spin_count.json.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if not needs_hub:
        os.environ["HF_HUB_OFFLINE"] = "1"


def require_trackers(names: Sequence[str]) -> None:
    """Checks that the packages of these trackers are installed, without importing them.

    Raises:
        EnvironmentProblem: one is not.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            f"the recipe names {', '.join(missing)}, which is not installed"
            if len(missing) == 1
            else f"the recipe names {', '.join(missing)}, which are not installed",
            place="output.trackers",
            remedy=f"Run `pip install {' '.join(missing)}`, or remove the name from output.trackers.",
        )
