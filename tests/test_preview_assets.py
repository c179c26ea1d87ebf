"""Every file of real data against every real tokenizer through `finetune preview --json`, as a user would call it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from markers import ASSETS, requires_assets

from finetune.cli import main

pytestmark = [pytest.mark.slow, requires_assets]

CONFIGS = {
    "qwen3": "Qwen__Qwen3-0.6B",
    "llama3_1": "meta-llama__Llama-3.1-8B-Instruct",
    "gpt-oss": "openai__gpt-oss-20b",
}
MAX_ROWS = 60


@dataclass(frozen=True)
class Learned:
    """Exit code 0: the records become samples of which some tokens are learned; `all`: all but each one's first."""

    records: int = MAX_ROWS
    all: bool = False


@dataclass(frozen=True)
class Refused:
    """Exit code 3 with this phrase in the message, for this many records."""

    phrase: str
    records: int = MAX_ROWS


PREFERENCE = Refused("this is preference data")
KTO = Refused("this is kto (answers with a verdict in label) data")
SEVERAL_CALLS: dict[str, Learned | Refused] = {
    "qwen3": Learned(50),
    "llama3_1": Refused("This model only supports single tool-calls at once!", records=10),
    "gpt-oss": Refused("the chat template leaves out tool call", records=10),
}
TOO_LONG = Refused("1 sample is longer than `max_length` 32,768", records=1)

EXPECTED: dict[str, Learned | Refused | dict[str, Learned | Refused]] = {
    "alpaca_en.csv": Learned(),
    "alpaca_en.parquet": Learned(),
    "alpaca_en.tsv": Learned(),
    "alpaca_en_demo.json": Learned(),
    "c4_demo.jsonl": Learned(all=True),
    "conversations.jsonl": Learned(),
    "dpo_en_demo.json": PREFERENCE,
    "dummy_conversation.json": Learned(),
    "glaive_toolcall_en_demo.json": Learned(),
    "gsm8k_grpo.jsonl": Refused("this is prompt_answer (prompt, answer) data"),
    "kto_en.jsonl": KTO,
    "kto_en_demo.json": KTO,
    "messages_alpaca_en.jsonl": Learned(),
    "messages_alpaca_en.jsonl.gz": Learned(),
    "messages_reasoning_tools.jsonl": SEVERAL_CALLS,
    "messages_thinking_harmony.jsonl": Learned(19),
    "messages_tools_en_dictargs.jsonl": Learned(),
    "messages_tools_en_openai.jsonl": Learned(),
    "multilingual.txt": TOO_LONG,
    "preference_en.parquet": PREFERENCE,
    "preference_en_conversational.jsonl": PREFERENCE,
    "preference_en_implicit.jsonl": PREFERENCE,
    "preference_en_text.jsonl": PREFERENCE,
    "prompt_completion_alpaca_en.jsonl": Learned(),
    "reason_tool_use_demo_50.jsonl": SEVERAL_CALLS,
    "wiki_demo.txt": TOO_LONG,
}
"""What becomes of each file: the same with each tokenizer, or an outcome for each."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each tokenizer and its model's config, without weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        shutil.copytree(ASSETS / "tokenizers" / name, folder / name)
        shutil.copy(ASSETS / "configs" / config / "config.json", folder / name)
    return folder


def check_learned(result: dict[str, Any], expected: Learned) -> None:
    """Checks the sums of the ledger, and the mask of each document shown."""
    ledger = result["ledger"]
    counts = (ledger["records"], ledger["records_kept"], ledger["samples"])
    assert counts == (expected.records, expected.records, expected.records)
    if expected.all:
        assert ledger["tokens_supervised"] == ledger["tokens_kept"] - ledger["samples"] > 0
    else:
        assert 0 < ledger["tokens_supervised"] < ledger["tokens_kept"] - ledger["samples"]
    documents = [document for row in result["rows"] for document in row["documents"]]
    assert documents
    for document in documents:
        learned, size = sum(document["mask"]), len(document["mask"])
        assert document["mask"][0] == 0
        assert learned == size - 1 if expected.all else 0 < learned < size - 1


def check_refused(result: dict[str, Any], expected: Refused, path: Path) -> None:
    """Checks that the reason is the expected one, for as many records, with places in the file and a remedy."""
    assert result["error"] == "DataError"
    assert expected.phrase in result["message"]
    places = (f"{path}:", f"{path} (record ")
    assert result["place"].startswith(places)
    assert result["remedy"]
    (fault,) = result["faults"]
    assert fault["records"] == expected.records
    assert fault["remedy"]
    assert len(fault["examples"]) == min(3, expected.records)
    assert all(example["place"].startswith(places) for example in fault["examples"])


def write_recipe(tmp_path: Path, models: Path, *, tokenizer: str, data: Path) -> Path:
    """Writes a recipe for the file's first records; returns its path."""
    recipe = tmp_path / "recipe.yaml"
    values = {
        "model": {"path": str(models / tokenizer)},
        "data": {
            "train": [{"path": str(data), "max_rows": MAX_ROWS}],
            "max_length": 32768,
            "packing": tokenizer != "gpt-oss",  # which refuses it
            "cache": False,
        },
        "output": {"dir": str(tmp_path / "out")},
    }
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    return recipe


@pytest.mark.parametrize("tokenizer", CONFIGS)
@pytest.mark.parametrize("name", EXPECTED)
def test_file_with_tokenizer(
    name: str, tokenizer: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ASSETS / "data" / name
    recipe = write_recipe(tmp_path, models, tokenizer=tokenizer, data=path)
    code = main(["preview", str(recipe), "--json", "--rows", "2"])
    result = json.loads(capsys.readouterr().out)
    expected = EXPECTED[name]
    if isinstance(expected, dict):
        expected = expected[tokenizer]
    if isinstance(expected, Learned):
        assert code == 0, result
        check_learned(result, expected)
    else:
        assert code == 3, result.get("ledger")
        check_refused(result, expected, path)


@pytest.mark.parametrize("tokenizer", CONFIGS)
@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(".txt")])
def test_text_file_in_pieces(
    name: str, tokenizer: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, models, tokenizer=tokenizer, data=ASSETS / "data" / name)
    code = main(["preview", str(recipe), "--json", "--rows", "0", "data.over_length=split"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    ledger = result["ledger"]
    assert (ledger["records"], ledger["records_split"]) == (1, 1)
    assert ledger["tokens_kept"] == ledger["tokens_in"] > 32768
    assert ledger["tokens_supervised"] == ledger["tokens_kept"] - ledger["samples"]


def test_every_file_and_tokenizer_is_in_the_table() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in (ASSETS / "data").iterdir())
    assert sorted(CONFIGS) == sorted(path.name for path in (ASSETS / "tokenizers").iterdir())
