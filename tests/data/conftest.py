"""Tokenizers built in memory, real ones where a folder with them is named, and a cache folder of each test's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
# How byte-level vocabularies write a line break and a space.
NEWLINE, SPACE = "\u010a", "\u0120"
# Merges over a line break or a space, so that a token can lie across the border of an answer.
MERGES = [(NEWLINE, NEWLINE), (SPACE, "a"), (NEWLINE, "f"), ("o", "o"), (SPACE + "a", "n")]


def build_tokenizer(*, chat_template: str | None = CHATML, adds_bos: bool = False, extra_special: str = "") -> Any:
    """Returns a byte-level BPE tokenizer of 256 bytes, a few merges and the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    backend = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = SPECIAL_TOKENS + ([extra_special] if extra_special else [])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if adds_bos:
        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return build_tokenizer


@pytest.fixture(scope="session")
def prefix_space() -> Any:
    """A tokenizer that writes a space before each stretch of text, as Llama 2's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    space = "\u2581"
    letters = [space, *map(chr, range(33, 127))]
    merges = [(space, "a"), (space + "a", "n")]
    pieces = letters + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    backend.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def chatml() -> Any:
    return build_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes records to a JSONL file in the test's folder and returns its path."""

    def write(records: list[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("cache-home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def assets() -> Path:
    folder = os.environ.get("FINETUNE_TEST_ASSETS")
    if not folder:
        pytest.skip("FINETUNE_TEST_ASSETS is not set: no real tokenizers to try")
    return Path(folder)


@pytest.fixture(scope="session", params=["qwen3", "llama3_1", "gpt-oss"])
def real_tokenizer(request: pytest.FixtureRequest, assets: Path) -> Any:
    return _asset_tokenizer(assets, request.param)


def _asset_tokenizer(assets: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets / "tokenizers" / name)


@pytest.fixture(scope="session")
def qwen(assets: Path) -> Any:
    return _asset_tokenizer(assets, "qwen3")


@pytest.fixture(scope="session")
def llama(assets: Path) -> Any:
    return _asset_tokenizer(assets, "llama3_1")


@pytest.fixture(scope="session")
def gpt_oss(assets: Path) -> Any:
    return _asset_tokenizer(assets, "gpt-oss")
