"""What a run ran on, so that it can be understood and repeated later.

The record is meant to be shared: it holds no environment variables, no user name, no host name, and no values of
arguments that look like secrets.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import finetune

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "bitsandbytes",
    "datasets",
    "accelerate",
    "triton",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "pydantic",
    "flash-attn-4",
)
"""Packages whose version can change a run's numbers or its memory."""

_SECRET_NAME = re.compile(
    r"(^|[-_.])(token|secret|passw(or)?d|passphrase|api[-_]?key|credential|auth)$|(^|[-_.])(secret|credential)s$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{8,}|://[^/\s:@]+:[^/\s@]+@"
)


def collect_environment() -> dict[str, object]:
    """Returns the environment as a JSON-ready dict.

    Torch and the GPUs are described only where torch is already imported: asking must not cost its import.
    """
    return {
        "finetune": finetune.__version__,
        "git_commit": _git_commit(Path(finetune.__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _package_versions(),
        "torch": _torch_facts(),
        "num_cpus": _num_cpus(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "command": shareable_command(sys.argv),
    }


def shareable_command(argv: Sequence[str]) -> list[str]:
    """Returns a command line without secrets and without the name of the home folder."""
    shown: list[str] = []
    hide_next = False
    for position, argument in enumerate(argv):
        key, separator, _ = argument.partition("=")
        if position == 0:
            shown.append(Path(argument).name)
        elif hide_next or _SECRET_VALUE.search(argument):
            shown.append("***")
        elif separator and _SECRET_NAME.search(key):
            shown.append(f"{key}=***")
        else:
            shown.append(_without_home(argument))
        hide_next = argument.startswith("--") and not separator and bool(_SECRET_NAME.search(argument))
    return shown


def _without_home(text: str) -> str:
    home = str(Path.home())
    if home in ("/", ""):
        return text
    return re.sub(re.escape(home) + r"(?=/|$)", "~", text)


def _package_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # An optional package that is not installed is simply not listed.
    return versions


def _num_cpus() -> int:
    """Counts the CPUs that this process may use, which a container or a scheduler can make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _torch_facts() -> dict[str, object] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    facts: dict[str, object] = {"build": str(torch.__version__), "cuda_build": torch.version.cuda, "gpus": []}
    if torch.cuda.is_available():
        facts["driver"] = _driver_version()
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts["gpus"] = [
            {"name": p.name, "memory_bytes": p.total_memory, "compute_capability": f"{p.major}.{p.minor}"}
            for p in properties
        ]
    return facts


def _driver_version() -> str | None:
    loaded = Path("/sys/module/nvidia/version")
    if loaded.is_file():
        return loaded.read_text(encoding="ascii", errors="replace").strip()
    answer = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer or None


def _git_commit(source_root: Path) -> str | None:
    """Returns the commit of a source checkout, with `-dirty` where files differ from it; None for an installation.

    Only a `.git` right beside the package counts: an installed package may lie inside somebody else's repository.
    """
    if not (source_root / ".git").exists():
        return None
    commit = _first_line(["git", "-C", str(source_root), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _first_line(["git", "-C", str(source_root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed else commit


def _first_line(command: list[str]) -> str | None:
    """Returns the first line that a program prints; None where the program is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip().partition("\n")[0]
