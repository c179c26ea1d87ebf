"""NF4: frozen linear layers in 4 bits, loaded from 16-bit weights or drawn at random.

bitsandbytes quantizes `nn.Linear` only: an MoE's fused expert weights keep their 16 bits. `unquantized_bytes` says how
much that is, so that it is never a surprise.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from finetune.model.config import ModelPlan


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Returns the quantization of QLoRA: NF4 blocks of 64 with their scales quantized once more (Dettmers et al.,
    "QLoRA", 2023), products in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def build_random_nf4(plan: ModelPlan) -> PreTrainedModel:
    """Draws an NF4 model on its device, one module at a time, so that the 16-bit weights never all exist.

    The values come from torch's global generator; seed it before. Standard deviations are the config's.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.config, dtype=plan.dtype, attn_implementation=plan.attention)
    quantizer = AutoHfQuantizer.from_config(nf4_config(plan.dtype))
    quantizer.preprocess_model(model=model, device_map={"": plan.device})
    deviation = getattr(plan.config, "initializer_range", None) or 0.02
    for module in model.modules():
        if isinstance(module, Linear4bit):
            _materialize_nf4(module, deviation, plan)
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
    """Bytes of the expert weights (one tensor `[experts, ., .]` for a layer) that NF4 leaves as they are."""
    experts = (p for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name.split("."))
    return sum(p.numel() * p.element_size() for p in experts if p.is_floating_point())


def _materialize_nf4(module: Linear4bit, deviation: float, plan: ModelPlan) -> None:
    shape = (module.out_features, module.in_features)
    values = torch.empty(shape, dtype=plan.dtype, device=plan.device).normal_(std=deviation)
    # Params4bit is made by `__new__`, whose arguments the checker does not see.
    make: Any = Params4bit
    weight = make(values, requires_grad=False, quant_type="nf4", compress_statistics=True, module=module)
    module.weight = weight.to(plan.device)
    if module.bias is not None:
        module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=plan.dtype, device=plan.device))


def _holds_meta_tensors(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)
