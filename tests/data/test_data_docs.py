"""Every example of docs/data_formats.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from finetune.data.formats import convert, recognise
from finetune.data.strict_json import decode
from finetune.data.types import Origin
from finetune.errors import DataError
from finetune.recipe.schema import DataSection

PAGE = (Path(__file__).parents[2] / "docs/data_formats.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- (format|refused): (\w+) -->\n```jsonl\n(.*?)\n```", PAGE, re.DOTALL)
EXAMPLES = [(kind, name, line) for kind, name, block in BLOCKS for line in block.splitlines()]


def test_every_block_of_the_page_is_tried() -> None:
    assert len(BLOCKS) == PAGE.count("```jsonl")
    assert {name for kind, name, _ in EXAMPLES if kind == "format"} == {
        "alpaca",
        "sharegpt",
        "messages",
        "prompt_completion",
        "text",
    }


@pytest.mark.parametrize(("kind", "name", "line"), EXAMPLES, ids=[line[:60] for _, _, line in EXAMPLES])
def test_example(kind: str, name: str, line: str) -> None:
    record, origin = decode(line), Origin("data.jsonl", 1)
    format = recognise(record, origin)
    if kind == "format":
        assert format == name
        conversation = convert(record, format=format, origin=origin)
        assert conversation.unused_keys == ()
        return
    assert name in (format, "key")
    with pytest.raises(DataError) as caught:
        convert(record, format=format, origin=origin)
    assert caught.value.place == "data.jsonl:1"
    if name != "key":
        assert name in caught.value.message


def test_recipe_example_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)\n```", PAGE, re.DOTALL)
    section = DataSection.model_validate(yaml.safe_load(block), strict=True)
    assert [source.weight for source in section.train] == [1.0, 1.0, 1.0, 2.0, 1.0]
