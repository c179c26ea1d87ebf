"""A dataset that the datasets library loads gives its rows; one that it cannot load an error with a way out.

No test needs the network: a local folder stands for a downloaded dataset, and the failing ones run offline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.data.hub import HubDataset
from finetune.errors import DataError

ROWS = [{"args": {"city": "Rome"}, "text": "a"}, {"args": {"day": "Monday"}, "text": "b"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "set"
    path.mkdir()
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return path


def test_rows_have_no_filled_in_nulls(folder: Path) -> None:
    """P25: Arrow gives every row the arguments of all; those that no one wrote must not come out as null."""
    hub = HubDataset(str(folder), None, "train", None)
    assert [record for _, record in hub.records()] == ROWS
    assert str(next(iter(hub.records()))[0]) == f"{folder}[train] (record 1)"
    assert all(Path(file).is_file() for file in hub.files())
    assert hub.files()


def test_part_of_a_split(folder: Path) -> None:
    assert [record["text"] for _, record in HubDataset(str(folder), None, "train[1:]", None).records()] == ["b"]


def test_unknown_split_lists_the_known(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(HubDataset(str(folder), None, "trian", None).records())
    assert "train" in caught.value.message
    assert "`split`" in caught.value.remedy


def test_offline_without_a_copy_says_both_readings(tmp_path: Path) -> None:
    program = (
        "import json\n"
        "from finetune.data.sources import read_source\n"
        "from finetune.errors import FinetuneError\n"
        "from finetune.recipe.schema import Source\n"
        "try: list(read_source(Source(path='org/name'), say=print))\n"
        "except FinetuneError as error: print(json.dumps(error.as_dict()))"
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    error = json.loads(done.stdout)
    assert error["error"] == "EnvironmentProblem"
    assert error["place"] == "org/name"
    assert "no file or folder of this name" in error["message"]
    assert "network" in error["remedy"]
