"""Tiny MLPs of several architectures with every kind of weights, and what they give: what the tests of tiling share."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

HIDDEN, INTERMEDIATE = 64, 128
Context = Callable[[], AbstractContextManager[Any]]


def make_mlp(kind: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The MLP of one architecture, with random weights."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    made = {"qwen3": Qwen3MLP, "llama": LlamaMLP, "gemma3_text": Gemma3MLP, "phi3": Phi3MLP}[kind]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE} | changes
    torch.manual_seed(seed)
    return made(AutoConfig.for_model(kind, pad_token_id=0, **sizes)).to(dtype)


def with_lora(mlp: nn.Module, *, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> nn.Module:
    """The same module, its linear layers wrapped by PEFT; adapters whose B is not zero."""
    targets = [name for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj") if hasattr(mlp, name)]
    torch.manual_seed(seed)
    get_peft_model(mlp, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **changes), autocast_adapter_dtype=False)
    for name, parameter in mlp.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return mlp


def with_nf4(mlp: nn.Module, *, compute_dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    """The same module, its linear layers replaced by NF4 ones; without a `compute_dtype` the first input chooses it."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, linear in list(mlp.named_children()):
        if isinstance(linear, nn.Linear):
            made = Linear4bit(
                linear.in_features, linear.out_features, bias=False, quant_type="nf4", compute_dtype=compute_dtype
            )
            made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            made.support_avx512bf16_for_cpu = False
            setattr(mlp, name, made.to(linear.weight.device))
    return mlp


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Always the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def trained(mlp: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in mlp.named_parameters() if parameter.requires_grad}


def results(mlp: nn.Module, x: Tensor, *, around: Context = nullcontext) -> dict[str, Tensor]:
    """Output and gradients of x and the trained weights, for a loss that weighs each number differently."""
    x = x.detach().requires_grad_()
    mlp.zero_grad()
    with around():
        y = mlp(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    (y * weights).sum().backward()
    found = {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in trained(mlp).items()}
    assert all(tensor is not None for tensor in found.values()), "something has no gradient"
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


def truth(mlp: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the untiled module gives when everything is computed in fp32."""
    exact = copy.deepcopy(mlp).float()
    for module in exact.modules():
        if hasattr(module, "compute_dtype"):  # an NF4 layer, which would go on in its own format
            module.compute_dtype = torch.float32
    return results(exact, x.float())


def error(found: Tensor, true: Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30)).item()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are still alive, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)
