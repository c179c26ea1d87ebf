"""NF4 and int8: frozen linear layers in 4 or 8 bits, loaded from 16-bit weights or drawn at random.

bitsandbytes quantizes `nn.Linear` only: an MoE's fused expert weights keep their 16 bits. `unquantized_bytes` says how
much that is, so that it is never a surprise.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from bitsandbytes.functional import int8_vectorwise_quant
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from finetune.model.config import ModelPlan


def quantization_config(plan: ModelPlan) -> BitsAndBytesConfig:
    """Returns the quantization of the recipe.

    `nf4`: blocks of 64 with their scales quantized once more (Dettmers et al., "QLoRA", 2023), products in the plan's
    number format. `int8`: one scale a row, products of 8-bit inputs, columns with inputs beyond 6.0 in fp16 (Dettmers
    et al., "LLM.int8()", 2022).
    """
    if plan.section.quantization == "int8":
        # bitsandbytes says at every product that inputs not in fp16 are cast to it, which is part of LLM.int8.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=plan.dtype,
    )


def build_random_quantized(plan: ModelPlan) -> PreTrainedModel:
    """Draws a quantized model on its device, one module at a time, so that the 16-bit weights never all exist.

    The values come from torch's global generator; seed it before. Standard deviations are the config's.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.config, dtype=plan.dtype, attn_implementation=plan.attention)
    quantizer = AutoHfQuantizer.from_config(quantization_config(plan))
    quantizer.preprocess_model(model=model, device_map={"": plan.device})
    deviation = getattr(plan.config, "initializer_range", None) or 0.02
    for module in model.modules():
        if isinstance(module, Linear4bit | Linear8bitLt):
            _materialize(module, deviation, plan)
        elif _holds_meta_tensors(module):
            module.to_empty(device=plan.device, recurse=False)
            model._init_weights(module)
    model.tie_weights()
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer  # `from_pretrained` leaves it there, and the trainer asks it
    keep_training_layout(model)
    return model


def keep_training_layout(model: nn.Module) -> None:
    """Keeps NF4 layers in the layout that has gradients.

    On CPUs with AVX512-BF16, a Linear4bit rearranges its weights for inference in its first forward in evaluation mode
    and goes on with an inference product that passes no gradient on, also when training follows (bitsandbytes 0.50.2,
    `Linear4bit.forward` and `matmul_4bit`).
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def unquantized_bytes(model: nn.Module) -> int:
    """Bytes of the expert weights (one tensor `[experts, ., .]` for a layer) that quantization leaves as they are."""
    experts = (p for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name.split("."))
    return sum(p.numel() * p.element_size() for p in experts if p.is_floating_point())


def _materialize(module: Linear4bit | Linear8bitLt, deviation: float, plan: ModelPlan) -> None:
    shape = (module.out_features, module.in_features)
    values = torch.empty(shape, dtype=plan.dtype, device=plan.device).normal_(std=deviation)
    # Both kinds of weights are made by `__new__`, whose arguments the checker does not see.
    make: Any = Params4bit if isinstance(module, Linear4bit) else Int8Params
    if isinstance(module, Linear4bit):
        weight = make(values, requires_grad=False, quant_type="nf4", compress_statistics=True, module=module)
        module.weight = weight.to(plan.device)
    else:
        quantized, scales, _ = int8_vectorwise_quant(values.half())
        module.weight = make(quantized, requires_grad=False, has_fp16_weights=False, CB=quantized, SCB=scales)
    if module.bias is not None:
        module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=plan.dtype, device=plan.device))


def _holds_meta_tensors(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)
