"""Measures how long data takes to prepare and how much memory, on a made-up JSONL file of conversations.

    python docs/benchmarks/data_scale.py TOKENIZER_FOLDER [--records 100000] [--bytes 2000] > data_scale.json

Makes the file in a temporary folder, then runs `finetune preview RECIPE --json --rows 0` in fresh processes with a
token cache of their own: the first start tokenizes, the second one comes from the cache. Each is run once, so the
record tells no spread. Memory is sampled over the whole process tree, each page counted once (PSS), so it includes the
tokens that are mapped from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import yaml

_SAMPLE_SECONDS = 0.25
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "an", "er", "is")]


def make_file(path: Path, *, records: int, mean_bytes: int, seed: int = 7) -> None:
    """Writes conversations of one to three exchanges, all different, `mean_bytes` a line on average."""
    generator = random.Random(seed)
    words = ["".join(generator.choices(_SYLLABLES, k=generator.randint(1, 4))) for _ in range(20_000)]
    words_per_record = mean_bytes / 6.8
    with path.open("w", encoding="utf-8") as stream:
        for number in range(records):
            messages = []
            exchanges = generator.randint(1, 3)
            for _ in range(exchanges):
                size = words_per_record / 2 * generator.uniform(0.2, 1.8)
                question, answer = max(3, int(size * 0.3)), max(5, int(size * 0.7))
                messages.append(
                    {"role": "user", "content": f"{number} " + " ".join(generator.choices(words, k=question))}
                )
                messages.append({"role": "assistant", "content": " ".join(generator.choices(words, k=answer)) + "."})
            stream.write(json.dumps({"messages": messages}) + "\n")


def measure(recipe: Path, cache: Path) -> dict[str, object]:
    """Runs the preview in a fresh process; returns its time, its memory and what it made."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune", "preview", str(recipe), "--json", "--rows", "0"],
            stdout=output,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )
        peak, most_processes = 0, 1
        while process.poll() is None:
            tree = _tree(process.pid)
            peak, most_processes = max(peak, sum(map(_pss_bytes, tree))), max(most_processes, len(tree))
            time.sleep(_SAMPLE_SECONDS)
        seconds = time.perf_counter() - started
        output.seek(0)
        result = json.load(output)
    if process.returncode != 0:
        raise SystemExit(json.dumps(result, indent=1))
    return {
        "seconds": round(seconds, 2),
        "peak_memory_bytes": peak,
        "processes": most_processes,
        "samples": result["ledger"]["samples"],
        "tokens": result["ledger"]["tokens_kept"],
    }


def _git_commit() -> str | None:
    """Returns the short hash of the commit that is checked out, with `-dirty` where files differ; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _tree(root: int) -> list[int]:
    """Returns the process and all below it."""
    found, open_list = [], [root]
    while open_list:
        process = open_list.pop()
        found.append(process)
        try:
            children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
        except OSError:  # it has ended
            continue
        open_list += map(int, children.split())
    return found


def _pss_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def main() -> None:
    """Makes the file, measures both starts and prints the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=2_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_file(folder / "data.jsonl", records=options.records, mean_bytes=options.bytes)
        recipe = {
            "model": {"path": str(options.tokenizer.absolute())},
            "data": {"train": [{"path": "data.jsonl"}], "max_length": 4096, "eval": {"fraction": 0.01}},
            "output": {"dir": "out"},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        runs = [measure(folder / "recipe.yaml", folder / "cache") for _ in range(2)]
        size = (folder / "data.jsonl").stat().st_size
    record = {
        "record_version": 1,
        "name": "data_scale",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": "Time and memory of preparing a JSONL file of conversations: first start, and second from the cache. "
        "One run each.",
        "git_commit": _git_commit(),
        "command": "python docs/benchmarks/data_scale.py TOKENIZER "
        f"--records {options.records} --bytes {options.bytes}",
        "environment": {
            "num_cpus": len(os.sched_getaffinity(0)),
            "num_cpus_of_machine": os.cpu_count(),
            "python": platform.python_version(),
            "transformers": version("transformers"),
            "tokenizers": version("tokenizers"),
        },
        "tokenizer": options.tokenizer.name,
        "records": options.records,
        "file_bytes": size,
        "runs_each": 1,
        "first_start": runs[0],
        "second_start": runs[1],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
