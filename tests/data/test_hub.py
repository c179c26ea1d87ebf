"""A dataset of the hub is downloaded, streamed or taken from the cache, and its errors name a way out.

No test needs the network: a hub on this machine (`hub_server.py`) answers, and each start is a process of its own.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"question {index}"},
            {
                "role": "assistant",
                "content": f"answer {index}",
                "tool_calls": [{"name": "find", "arguments": {f"key{index % 3}": index}}],
            },
        ]
    }
    for index in range(40)
]
# The template prints the arguments as they are, so that a null which no one wrote would show in the tokens.
PROGRAM = """
import hashlib, json, pathlib, sys, time
time.sleep = lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.02))  # the libraries wait seconds between retries
import datasets
from finetune.data.build import build_dataset
from finetune.data.sources import with_commits
from finetune.errors import FinetuneError
from finetune.recipe.schema import DataSection
from tiny import make_tokenizer
datasets.config.STREAMING_READ_MAX_RETRIES = 1
template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)
tokenizer = make_tokenizer(template=template)
section, workers, commits, has_home = json.loads(sys.argv[1])
def no_home():
    raise RuntimeError("Could not determine home directory.")
if not has_home:
    pathlib.Path.home = no_home
section = with_commits(DataSection.model_validate(section), commits)
said = []
try:
    found = build_dataset(section, tokenizer=tokenizer, seed=7, say=said.append, workers=workers)
except FinetuneError as error:
    print(json.dumps({"said": said, **error.as_dict()}))
else:
    store = found.train
    tokens = store.input_ids.tobytes() + store.labels.tobytes() + store.lengths.tobytes()
    first = tokenizer.decode(store[0].input_ids) + tokenizer.decode(store[1].input_ids)
    answer = {"samples": len(store), "tokens": hashlib.sha256(tokens).hexdigest(), "first": first}
    answer["hub_commits"] = found.hub_commits
    print(json.dumps({"said": said, "origin": str(store.origin(len(store) - 1)), **answer}))
"""


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def files_of(rows: list[dict[str, Any]], *, num_files: int = 4) -> dict[str, bytes]:
    size = len(rows) // num_files
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    files = {f"data/train-{number}.jsonl": jsonl(part) for number, part in enumerate(parts)}
    return {"README.md": b"# A set\n", **files, "data/test.jsonl": jsonl(rows[:3])}


class Machine:
    """A user's machine: a home folder, and starts of the program that reach the hub or not."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.hub, self.home = hub, home

    def start(
        self,
        *,
        workers: int | None = 1,
        settings: dict[str, Any] | None = None,
        offline: bool = False,
        has_home: bool = True,
        commits: dict[str, str] | None = None,
        **source: Any,
    ) -> dict[str, Any]:
        """Builds a data set of one source in a process of its own; returns what it said and made."""
        section = {"train": [{"path": "org/set", **source}], **(settings or {})}
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.hub.url,
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(self.home / "hf"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
        }
        if not has_home:
            del environment["XDG_CACHE_HOME"]
        self.hub.requests.clear()
        self.hub.data_bytes = 0
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([section, workers, commits or {}, has_home])],
            env=environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        answer["cache"] = next((line for line in answer["said"] if line.startswith("Token cache")), "")
        return answer

    def entries(self) -> list[str]:
        folder = self.home / "cache/finetune/tokens"
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.publish("org/set", files_of(ROWS))
        yield server


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


def test_download_then_hit_then_another_commit(machine: Machine, hub: HubServer) -> None:
    """P25 and P41: no null that no one wrote; the commit decides about the cache, and a miss says so."""
    first = machine.start()
    assert first["samples"] == len(ROWS)
    assert "null" not in first["first"]
    assert '{"key1": 1}' in first["first"]
    assert first["origin"] == f"org/set[train] (record {len(ROWS)})"
    assert any("downloaded once" in line for line in first["said"])
    assert "the cache is empty" in first["cache"]
    second = machine.start()
    assert "hit" in second["cache"]
    assert second["tokens"] == first["tokens"]
    assert len(hub.requests) == 1, "a hit asks for the commit and nothing else"
    hub.publish("org/set", files_of([*ROWS[1:], ROWS[0]]))
    third = machine.start()
    assert "changed: hub_commits" in third["cache"]
    assert third["tokens"] != first["tokens"]


def test_streamed_rows_are_the_downloaded_ones(machine: Machine, hub: HubServer) -> None:
    """P25: by either way the same tokens where the files' columns have the same types; a stream leaves no copy."""
    streamed = machine.start(streaming=True)
    assert any("as they arrive" in line for line in streamed["said"])
    assert not list(machine.home.glob("hf/datasets/org___set/*/*/*/*.arrow"))
    downloaded = machine.start(settings={"cache": False})
    assert list(machine.home.glob("hf/datasets/org___set/*/*/*/*.arrow"))
    assert streamed["tokens"] == downloaded["tokens"]
    assert "null" not in streamed["first"]
    assert "hit" in machine.start(streaming=True)["cache"]
    assert "changed: streaming" in machine.start()["cache"], "files of unlike columns would give other rows"
    copied = machine.start(streaming=True, settings={"cache": False})
    assert any("local copy" in line for line in copied["said"])
    assert hub.data_bytes == 0


def test_max_rows_reads_no_further(machine: Machine, hub: HubServer) -> None:
    total = sum(len(data) for data in files_of(ROWS).values())
    found = machine.start(max_rows=3)
    assert found["samples"] == 3
    assert hub.files_sent() == {"data/train-0.jsonl"}
    assert 0 < hub.data_bytes < total
    assert "hit" in machine.start(max_rows=3)["cache"]
    assert "changed: max_rows" in machine.start(max_rows=12)["cache"]
    assert hub.files_sent() == {"data/train-0.jsonl", "data/train-1.jsonl"}
    both = machine.start(max_rows=42, split="train+test")
    assert (both["samples"], "data/test.jsonl" in hub.files_sent()) == (42, True)
    assert any("as they arrive" in line for line in both["said"])
    sliced = machine.start(max_rows=3, split="train[5:]")
    assert "question 5" in sliced["first"], "a slice cannot be streamed, so it is downloaded"


def test_parquet_streams_as_it_downloads(machine: Machine, hub: HubServer) -> None:
    """P25: Parquet declares its columns, so the nulls are in the file itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), target)
    hub.publish("org/set", {"data/train.parquet": target.getvalue()})
    streamed = machine.start(streaming=True, settings={"cache": False})
    downloaded = machine.start(settings={"cache": False})
    assert streamed["samples"] == len(ROWS)
    assert streamed["tokens"] == downloaded["tokens"]
    assert "null" not in streamed["first"]


@pytest.mark.parametrize("streaming", [False, True], ids=["downloaded", "streamed"])
def test_several_workers_make_the_same_entry(machine: Machine, hub: HubServer, streaming: bool) -> None:
    """P43: processes that tokenize are forked beside the hub's connections, and end."""
    hub.publish("org/set", files_of(ROWS * 20))  # batches enough for both
    several = machine.start(workers=2, streaming=streaming)
    assert several["samples"] == 20 * len(ROWS)
    alone = machine.start(workers=1, streaming=streaming)
    assert "hit" in alone["cache"]
    assert machine.start(workers=1, settings={"cache": False})["tokens"] == several["tokens"]


def test_offline_start_uses_the_entry_then_the_copy(machine: Machine, hub: HubServer) -> None:
    """P44: what was read once is read without a network; a stream leaves the entry only."""
    first = machine.start(streaming=True)
    other = {"max_length": 64}
    hub.stop()
    again = machine.start(streaming=True)
    assert "hit" in again["cache"]
    assert again["tokens"] == first["tokens"]
    assert any("it cannot be reached now" in line for line in again["said"])
    failed = machine.start(streaming=True, settings=other)
    assert failed["error"] == "EnvironmentProblem"
    assert "no local copy of commit" in failed["message"]
    assert "network" in failed["remedy"]
    assert len(machine.entries()) == 1


def test_commit_that_was_kept_is_read_again(machine: Machine, hub: HubServer) -> None:
    """A run is continued on the commit that it began with, whatever the branch is at by then."""
    first = machine.start()
    assert first["hub_commits"] == {"org/set@main": hub.heads["org/set"]}
    hub.publish("org/set", files_of(ROWS[:8]))
    again = machine.start(commits=first["hub_commits"], settings={"cache": False})
    assert again["tokens"] == first["tokens"]
    assert machine.start()["samples"] == 8


def test_without_cache_or_home_nothing_is_noted(machine: Machine) -> None:
    """`data.cache: false` is the remedy where there is no home folder, and it was refused itself."""
    assert machine.start(settings={"cache": False}, has_home=False)["samples"] == len(ROWS)
    assert machine.start(settings={"cache": False})["samples"] == len(ROWS)
    assert not (machine.home / "cache").exists()
    assert "data.cache" in machine.start(has_home=False)["remedy"]


def test_note_that_cannot_be_written_is_said(machine: Machine) -> None:
    (machine.home / "cache/finetune").mkdir(parents=True)
    (machine.home / "cache/finetune/hub").write_text("a file where the folder should be", encoding="utf-8")
    found = machine.start()
    assert found["samples"] == len(ROWS)
    assert any("the commit cannot be noted in" in line for line in found["said"])


def test_offline_start_reads_the_copy(machine: Machine, hub: HubServer) -> None:
    """P44: a local copy is read at the commit that was noted, and without a note at its own."""
    first = machine.start()
    old = hub.heads["org/set"]
    for note in machine.home.glob("cache/finetune/hub/*"):
        note.unlink()
    without_note = machine.start(offline=True, settings={"max_length": 64})
    assert without_note["tokens"] == first["tokens"]
    assert any("newest local copy" in line and old[:12] in line for line in without_note["said"])
    hub.publish("org/set", files_of(ROWS[:8]))
    machine.start()
    hub.stop()
    assert machine.start(settings={"max_length": 64})["samples"] == 8
    for number, name in enumerate(("default", None)):
        pinned = machine.start(revision=old, name=name, settings={"max_length": 65 + number})
        assert pinned["tokens"] == first["tokens"], "an older copy than the newest"
    named = machine.start(revision="v1")
    assert named["error"] == "EnvironmentProblem", "no one knows which commit v1 is"


def test_break_midway_keeps_nothing(machine: Machine, hub: HubServer) -> None:
    """A stream that ends early must not pass for a short dataset."""
    hub.breaks_after_bytes = len(files_of(ROWS)["data/train-0.jsonl"]) * 3 + 100
    failed = machine.start(streaming=True)
    assert failed["error"] == "EnvironmentProblem"
    assert "broke off after" in failed["message"]
    assert failed["place"] == "org/set[train]"
    assert "network" in failed["remedy"]
    assert machine.entries() == []
    hub.breaks_after_bytes = None
    assert machine.start(streaming=True)["samples"] == len(ROWS)


def test_break_of_a_download_keeps_nothing(machine: Machine, hub: HubServer) -> None:
    hub.breaks_after_bytes = len(files_of(ROWS)["data/train-0.jsonl"]) + 10
    failed = machine.start()
    assert failed["error"] == "EnvironmentProblem"
    assert machine.entries() == []
    assert not list(machine.home.glob("hf/datasets/org___set/*/*/*/*.arrow"))


@pytest.mark.parametrize(
    ("source", "message", "remedy"),
    [
        ({"path": "org/none"}, "no such dataset on the hub", "org/name"),
        ({"revision": "v9"}, "no revision v9", "`revision`"),
        ({"split": "trian"}, "train", "`split`"),
        ({"split": "trian", "streaming": True}, "train", "`split`"),
        ({"name": "other"}, "default", "`name`"),
    ],
    ids=["dataset", "revision", "split", "split-streamed", "configuration"],
)
def test_errors_name_what_is_wrong(machine: Machine, source: dict[str, Any], message: str, remedy: str) -> None:
    failed = machine.start(**source)
    assert failed["error"] == "DataError"
    assert message in failed["message"]
    assert remedy in failed["remedy"]
    assert machine.entries() == []


def test_offline_without_a_copy_says_both_readings(machine: Machine) -> None:
    failed = machine.start(offline=True)
    assert failed["error"] == "EnvironmentProblem"
    assert failed["place"] == "org/set"
    assert "no file or folder of this name" in failed["message"]
    assert "network" in failed["remedy"]


def test_broken_file_names_the_row(machine: Machine, hub: HubServer) -> None:
    files = files_of(ROWS)
    hub.publish("org/set", {**files, "data/train-2.jsonl": b'{"messages": [{"role"\n'})
    failed = machine.start(streaming=True)
    assert failed["error"] == "DataError"
    assert failed["place"] == "org/set[train] (record 21)"
    assert "after row 20" in failed["message"]
