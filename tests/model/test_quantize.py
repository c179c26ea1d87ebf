"""NF4 and int8: the gradient is that of the dequantized weights, before and after a forward without gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from tiny import make_config, make_model_folder

from finetune.model.config import plan_model
from finetune.model.load import load_model
from finetune.model.quantize import unquantized_bytes
from finetune.recipe.schema import ModelSection


def section(folder: Path, **values: object) -> ModelSection:
    return ModelSection.model_validate({"path": str(folder), "quantization": "nf4", "device": "cpu"} | values)


def input_gradient(model: torch.nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
    inputs = embeddings.clone().requires_grad_()
    logits = model(inputs_embeds=inputs, use_cache=False).logits
    logits.float().square().mean().backward()
    assert inputs.grad is not None
    return inputs.grad


def with_dequantized_weights(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with each NF4 layer replaced by a plain one that holds what NF4 stands for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, dtype=weight.dtype)
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
    return model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_the_gradient_survives_a_forward_in_evaluation_mode(tmp_path: Path, init: str, dtype: str) -> None:
    """bitsandbytes rearranges weights for inference there on some CPUs, after which gradients stop at each layer."""
    folder = make_model_folder(tmp_path / "model", "qwen3")
    plan = plan_model(section(folder, init=init, dtype=dtype))
    model = load_model(plan, seed=3).train()
    embeddings = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0)).to(plan.dtype)
    before = input_gradient(model, embeddings)
    with torch.no_grad():
        model.eval()(inputs_embeds=embeddings, use_cache=False)
    after = input_gradient(model.train(), embeddings)
    assert torch.equal(before, after)
    reference = input_gradient(with_dequantized_weights(model), embeddings)
    assert torch.allclose(before, reference, rtol=1e-4 if dtype == "fp32" else 0.05, atol=1e-8)


def test_random_weights_have_the_buffers_and_norms_of_stock(tmp_path: Path) -> None:
    """Drawn module by module from the meta device, nothing may be left as uninitialised memory."""
    from transformers import AutoModelForCausalLM

    folder = make_model_folder(tmp_path / "model", "llama", weights=False)
    model = load_model(plan_model(section(folder, init="random")), seed=0)
    stock = AutoModelForCausalLM.from_config(make_config("llama"))
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in stock.named_buffers())
    norms = {name: value for name, value in stock.named_parameters() if "norm" in name}
    assert norms
    assert all(torch.equal(model.get_parameter(name), value) for name, value in norms.items())
    deviation = dequantize_4bit(
        model.model.layers[0].mlp.up_proj.weight.data, model.model.layers[0].mlp.up_proj.weight.quant_state
    ).std()
    assert deviation.item() == pytest.approx(0.02, rel=0.1)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "qwen3", weights=False)
    model = load_model(plan_model(section(folder, init="random")), seed=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_experts_that_stay_in_full_are_counted(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "qwen3_moe")
    model = load_model(plan_model(section(folder)), seed=0)
    assert unquantized_bytes(model) == 2 * 4 * (2 * 32 * 64 + 64 * 32) * 4


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_int8_is_what_its_weights_stand_for(tmp_path: Path, init: str) -> None:
    """Loaded or drawn, with the gradient of the dequantized weights up to the rounding of the inputs to 8 bits."""
    folder = make_model_folder(tmp_path / "model", "qwen3")
    plan = plan_model(section(folder, init=init, quantization="int8"))
    model = load_model(plan, seed=3).train()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear8bitLt)}
    assert len(layers) == 14
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    plain = {n: int8_vectorwise_dequant(m.weight.data.clone(), m.weight.SCB.clone()) for n, m in layers.items()}
    assert all(weight.std().item() == pytest.approx(0.02, rel=0.15) for weight in plain.values())
    embeddings = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    gradient = input_gradient(model, embeddings)
    for name, weight in plain.items():
        replaced = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        replaced.weight = torch.nn.Parameter(weight, requires_grad=False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced)
    reference = input_gradient(model, embeddings)
    assert (gradient - reference).norm() < 0.05 * reference.norm()
