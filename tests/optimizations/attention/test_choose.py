"""Which attention a run takes: by hardware and what is installed, with the reason; what cannot be packed is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import make_config
from torch import nn
from transformers import AutoModelForCausalLM

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.optimizations.apply import plan_metadata_cache
from finetune.optimizations.attention import flash4
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.choose import AttentionChoice, choose_attention
from finetune.optimizations.attention.layers import attention_layers, packs_exactly
from finetune.optimizations.attention.types import AttentionLayer
from finetune.optimizations.support import Hardware, Support

T4, RTX3090, RTX4090 = (Hardware("cuda", capability, "GPU") for capability in ((7, 5), (8, 6), (8, 9)))
H200, B200, RTX5090 = (Hardware("cuda", capability, "GPU") for capability in ((9, 0), (10, 0), (12, 0)))
CPU = Hardware("cpu")


def skeleton(kind: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config(kind, head_dim=64, **changes))


def choose(kind: str, wanted: str, hardware: Hardware, *, packing: bool = True, **more: Any) -> AttentionChoice:
    dtype = more.get("dtype", torch.bfloat16)
    model = more.get("model") or skeleton(kind)
    stock = "eager" if kind == "gpt_oss" or wanted == "eager" else "sdpa"
    return choose_attention(
        wanted,
        skeleton=model,
        stock=stock,
        hardware=hardware,
        dtype=dtype,
        packing=packing,
        row_length=more.get("row_length", 16_384),
        num_rows=more.get("num_rows", 1),
    )


@pytest.fixture(params=[True, False], ids=["flash-attn-4", "without"])
def has_flash4(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    support = Support(True) if request.param else Support(False, "the package flash-attn-4 is not installed (pip ...)")
    monkeypatch.setattr(flash4, "installed", lambda: support)
    return request.param


@pytest.mark.parametrize(
    ("hardware", "kind", "with_flash4", "without"),
    [
        (CPU, "qwen3", "segments", "segments"),
        (T4, "qwen3", "segments", "segments"),
        (RTX3090, "qwen3", "varlen", "varlen"),
        (RTX4090, "gpt_oss", "varlen", "varlen"),
        (H200, "qwen3", "flash4", "varlen"),
        (H200, "gpt_oss", "flash4", "varlen"),
        (B200, "gpt_oss", "flash4", "varlen"),
        (RTX5090, "qwen3", "varlen", "varlen"),
    ],
)
def test_auto_takes_the_fastest_that_is_right(
    has_flash4: bool, hardware: Hardware, kind: str, with_flash4: str, without: str
) -> None:
    choice = choose(kind, "auto", hardware)
    assert choice.name == (with_flash4 if has_flash4 else without)
    if hardware in (H200, B200) and not has_flash4:
        assert "flash4 would be faster" in choice.faster and "pip" in choice.faster
    assert "the fastest that is right on" in choice.reason


def test_short_rows_take_torchs_own_kernel(has_flash4: bool) -> None:
    choice = choose("qwen3", "auto", H200, row_length=4096)
    assert (choice.name, choice.faster) == ("varlen", "")


def test_fp32_and_fp16_on_old_cards() -> None:
    assert choose("qwen3", "auto", RTX3090, dtype=torch.float32).name == "segments"
    assert choose("qwen3", "auto", T4, dtype=torch.float16).name == "segments"


@pytest.mark.parametrize("name", ["flash4", "varlen", "flex", "flash2", "flash3"])
def test_a_named_backend_that_is_not_to_be_had_is_an_error(name: str) -> None:
    with pytest.raises(EnvironmentProblem, match=f"model.attention is {name}, which cannot be used here: it") as caught:
        choose("qwen3", name, CPU)
    assert caught.value.remedy == "Set model.attention to auto, which takes segments here."


def test_wrong_gradients_on_new_cards_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "installed", lambda: Support(True))
    with pytest.raises(EnvironmentProblem, match="gradients of packed rows are wrong"):
        choose("qwen3", "flash4", RTX5090)
    with pytest.raises(EnvironmentProblem, match=r"right for multiples of 32"):
        choose("qwen3", "flash4", H200, model=skeleton_of_width(80))


def skeleton_of_width(width: int) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config("qwen3", head_dim=width))


def test_kinds_of_layers() -> None:
    assert attention_layers(skeleton("llama")) == [AttentionLayer(4, 2, 64)]
    assert attention_layers(skeleton("gpt_oss")) == [
        AttentionLayer(4, 2, 64, 16, None, True),
        AttentionLayer(4, 2, 64, None, None, True),
    ]
    assert [layer.window for layer in attention_layers(skeleton("qwen3_window"))] == [None, 7]


def test_stock_attention_that_mixes_documents_is_refused() -> None:
    with pytest.raises(RecipeError, match="would see each other") as caught:
        choose("gpt_oss", "eager", CPU)
    assert "model.attention=auto" in caught.value.remedy
    assert choose("gpt_oss", "eager", CPU, packing=False).backend is None
    assert choose("qwen3", "eager", CPU).name == "eager"


def test_a_state_that_crosses_documents_is_refused_before_the_weights() -> None:
    model = skeleton("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(RecipeError, match="kind linear_attention, whose state crosses documents") as caught:
        choose("qwen3", "auto", CPU, model=model)
    assert "data.packing=false" in caught.value.remedy
    model.config.layer_types = ["full_attention"] * 2
    model.model.layers[0].short_conv = nn.Conv1d(4, 4, 3, device="meta")
    support = packs_exactly(model)
    assert not support.ok and "model.layers.0.short_conv (Conv1d)" in support.reason


def test_an_architecture_without_backends_keeps_its_own() -> None:
    model = skeleton("qwen3")
    model._supports_attention_backend = False
    choice = choose("qwen3", "auto", CPU, model=model)
    assert (choice.backend, choice.name) == (None, "sdpa")
    applied = plan_metadata_cache(True, choice)
    assert applied.state == "not applicable" and "own attention" in applied.reason
    with pytest.raises(RecipeError, match="does not take attention backends"):
        choose("qwen3", "segments", CPU, model=model)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("attention_dropout", 0.1, "attention dropout"),
        ("attention_chunk_size", 8, "inside chunks of 8"),
        ("kv_lora_rank", 16, "latent attention"),
        ("layer_types", ["full_attention", "chunked_attention"], "kind chunked_attention"),
    ],
)
def test_attention_of_other_kinds_stays_with_transformers(setting: str, value: object, reason: str) -> None:
    model = skeleton("qwen3")
    setattr(model.config, setting, value)
    choice = choose("qwen3", "auto", CPU, model=model)
    assert choice.backend is None and reason in choice.reason
    with pytest.raises(RecipeError, match=reason):
        choose("qwen3", "segments", CPU, model=model)


TOO_LONG = 2**31 // (4 * 64)
"""Slots of a row of the test's models, 4 heads of 64, that 32 bits cannot number."""


@pytest.mark.parametrize("name", ["flash4", "varlen", "flex"])
def test_a_row_that_32_bits_cannot_number_is_refused_before_the_run(has_flash4: bool, name: str) -> None:
    if name == "flash4" and not has_flash4:
        pytest.skip("refused for another reason")
    with pytest.raises(EnvironmentProblem, match=f"a row of {TOO_LONG} slots with 256 numbers each") as caught:
        choose("qwen3", name, H200, row_length=TOO_LONG)
    assert f"data.max_length up to {TOO_LONG - 129}" in caught.value.message
    assert "takes segments here" in caught.value.remedy
    assert choose("qwen3", "auto", H200, row_length=TOO_LONG).name == "segments"
    assert choose("qwen3", name, H200, row_length=TOO_LONG - 129, num_rows=4).name == name


@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_flash_of_transformers_counts_in_32_bits_too(name: str) -> None:
    support = BACKENDS[name].supported(H200, torch.bfloat16, [AttentionLayer(4, 2, 64)], row_length=TOO_LONG)
    assert "passes the 2^31 that it can count" in support.reason


@pytest.mark.parametrize("name", ["sdpa", "segments"])
def test_dense_attention_counts_further(name: str) -> None:
    assert choose("qwen3", name, H200, row_length=TOO_LONG).name == name
