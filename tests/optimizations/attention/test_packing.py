"""Whole models: packed equals separate for logits and every gradient, no document sees another, builds are counted, no
host wait, other models stay untouched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_waits import NoHostWait
from tiny import make_config
from transformers import AutoModelForCausalLM

from finetune.data.packed_metadata import PackedMetadata, build_packed_metadata
from finetune.optimizations.attention.backends import BACKENDS
from finetune.optimizations.attention.feed import MetadataFeed
from finetune.optimizations.attention.interface import (
    MissingMetadata,
    attention_set_to,
    register_backends,
)

KINDS = ("qwen3", "qwen3_window", "llama", "qwen3_moe", "gpt_oss")
LENGTHS = (20, 13, 31)
ROW = 72


def make_model(kind: str, backend: str | None = None) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(kind), attn_implementation="eager", dtype=torch.float32)
    if backend is not None:
        register_backends()
        model.set_attn_implementation(BACKENDS[backend].registered)
    return model.train()


def make_ids() -> torch.Tensor:
    return torch.randint(0, 256, (1, ROW), generator=torch.Generator().manual_seed(1))


def make_metadata() -> PackedMetadata:
    return build_packed_metadata([LENGTHS], row_length=ROW)


def packed_logits(model: Any, ids: torch.Tensor, *, is_cached: bool = True) -> torch.Tensor:
    metadata = make_metadata()
    argument = MetadataFeed(is_cached=is_cached).argument(metadata)
    return model(input_ids=ids, position_ids=metadata.position_ids, packed_metadata=argument, use_cache=False).logits[0]


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "rebuilt"])
@pytest.mark.parametrize("backend", ["sdpa", "segments"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_separate(kind: str, backend: str, is_cached: bool) -> None:
    """P24: each document of a row gets the logits and gradients that it gets alone, in every parameter."""
    plain, packed = make_model(kind), make_model(kind, backend)
    ids = make_ids()
    documents = ids[0, : sum(LENGTHS)].split(LENGTHS)
    alone = torch.cat([plain(input_ids=document[None], use_cache=False).logits[0] for document in documents])
    together = packed_logits(packed, ids, is_cached=is_cached)[: sum(LENGTHS)]
    assert torch.allclose(together, alone, atol=2e-5), (together - alone).abs().max()
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(2))
    true, found = gradients(plain, (alone * weights).sum()), gradients(packed, (together * weights).sum())
    assert true.keys() == found.keys()
    for name, gradient in true.items():
        assert torch.allclose(found[name], gradient, atol=2e-5 * gradient.abs().max().item() + 1e-7), name
    if kind == "gpt_oss":
        assert any("sinks" in name for name in true)


@pytest.mark.parametrize("backend", ["sdpa", "segments"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_does_not_see_its_neighbour(kind: str, backend: str) -> None:
    model = make_model(kind, backend)
    ids, changed = make_ids(), make_ids()
    changed[0, : LENGTHS[0]] = (changed[0, : LENGTHS[0]] + 7) % 256
    before, after = packed_logits(model, ids), packed_logits(model, changed)
    others = slice(LENGTHS[0], sum(LENGTHS))
    assert torch.allclose(before[others], after[others], atol=1e-5)
    assert not torch.allclose(before[: LENGTHS[0]], after[: LENGTHS[0]], atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_builds_are_one_a_batch_or_one_a_layer_and_pass(kind: str) -> None:
    model = make_model(kind, "sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.config.num_hidden_layers
    for is_cached, expected in ((True, 1), (False, 2 * layers)):
        feed, metadata = MetadataFeed(is_cached=is_cached), make_metadata()
        model(
            input_ids=make_ids(), position_ids=metadata.position_ids, packed_metadata=feed.argument(metadata),
            use_cache=False,
        ).logits.sum().backward()  # fmt: skip
        assert feed.num_builds == expected
        windows = 2 if kind in ("gpt_oss", "qwen3_window") else 1
        assert metadata.num_derived == (windows if is_cached else 0)


@contextmanager
def counting_attention(model: Any) -> Iterator[None]:
    """Watches the attention layers only: what a router or a loss waits for is not packing's affair."""
    modes: list[NoHostWait] = []

    def enter(*_: object) -> None:
        modes.append(NoHostWait())
        modes[-1].__enter__()

    def leave(*_: object) -> None:
        modes.pop().__exit__(None, None, None)

    layers = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    lists = torch.Tensor.tolist

    def no_list(tensor: torch.Tensor) -> Any:  # on the CPU it dispatches nothing that the mode could see
        assert not modes, "tolist waits for the device"
        return lists(tensor)

    torch.Tensor.tolist = no_list  # type: ignore[method-assign]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield
    finally:
        while modes:  # left by a layer that failed
            leave()
        torch.Tensor.tolist = lists  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("backend", ["sdpa", "segments"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_attention_path_does_not_wait_for_the_device(kind: str, backend: str) -> None:
    model = make_model(kind, backend)
    with counting_attention(model):
        packed_logits(model, make_ids())


def test_the_watch_for_host_waits_sees_one() -> None:
    model = make_model("qwen3", "segments")
    with counting_attention(model), pytest.raises(AssertionError, match="waits for the device"):
        packed_logits(model, make_ids(), is_cached=False)


def test_another_model_of_the_process_is_untouched() -> None:
    plain = make_model("qwen3")
    ids = make_ids()
    before = plain(input_ids=ids, use_cache=False).logits
    packed = make_model("qwen3", "segments")
    packed_logits(packed, ids)
    assert plain.config._attn_implementation == "eager"
    assert torch.equal(before, plain(input_ids=ids, use_cache=False).logits)


def test_a_call_without_boundaries_is_an_error() -> None:
    with pytest.raises(MissingMetadata, match="set_attn_implementation"):
        make_model("qwen3", "sdpa")(input_ids=make_ids(), use_cache=False)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_generation_takes_stock_attention_for_a_while(kind: str) -> None:
    model, plain = make_model(kind, "segments").eval(), make_model(kind).eval()
    ids = make_ids()[:, :9]
    with attention_set_to(model, "eager"):
        answer = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert model.config._attn_implementation == BACKENDS["segments"].registered
    assert answer.tolist() == plain.generate(input_ids=ids, max_new_tokens=5, do_sample=False).tolist()
