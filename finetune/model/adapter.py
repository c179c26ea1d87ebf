"""LoRA: which modules get an adapter, and what is trained in the end.

Targets are settled on the model's skeleton, before any weight is read, so that a target which matches nothing costs
no time. They are handed to PEFT as plain names; afterwards the wrapped modules are compared with the plan, since PEFT
treats some names of its own accord (`all-linear` on an MoE trains the router).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import RecipeError
from finetune.model.trainable import layer_pattern
from finetune.recipe.schema import Adapter, LoraAdapter


@dataclass(frozen=True)
class AdapterTargets:
    """Full names of the linear modules and of the expert parameters that get an adapter."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]


def choose_targets(skeleton: PreTrainedModel, adapter: LoraAdapter) -> AdapterTargets:
    """Resolves the recipe's targets against the model.

    Raises:
        RecipeError: a target matches nothing, or dropout is asked for on expert parameters.
    """
    linears = _linear_modules(skeleton)
    experts = _expert_parameters(skeleton)
    if adapter.targets == "all-linear":
        chosen = AdapterTargets(tuple(linears), tuple(experts))
    elif adapter.targets == "attention":
        chosen = AdapterTargets(tuple(name for name in linears if _is_attention(name)), ())
    else:
        chosen = _named_targets(adapter.targets, linears, experts)
    if not chosen.modules and not chosen.parameters:
        raise _nothing_matches(str(adapter.targets), linears, experts)
    if chosen.parameters and adapter.dropout:
        raise RecipeError(
            f"adapter.dropout is {adapter.dropout}, but adapters on expert weights "
            f"({layer_pattern(chosen.parameters[0])}) cannot have dropout",
            place="adapter.dropout",
            remedy="Set adapter.dropout=0, or adapter.targets=attention to leave the experts alone.",
        )
    return chosen


def add_adapter(model: PreTrainedModel, adapter: Adapter, *, targets: AdapterTargets | None) -> nn.Module:
    """Wraps the model with LoRA (first values from torch's global generator), or returns it as it is.

    Adapter weights are fp32 whatever the base is. The result is a plain PEFT model.
    """
    if targets is None or not isinstance(adapter, LoraAdapter):
        return model
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] - PEFT computes with floats as well
        lora_dropout=adapter.dropout,
        target_modules=sorted({_suffix(name) for name in targets.modules}) or [],
        target_parameters=sorted({_suffix(name, parts=3) for name in targets.parameters}) or None,
        task_type="CAUSAL_LM",
        bias="none",
    )
    peft_model = get_peft_model(model, config)
    _require_planned(peft_model, targets)
    return peft_model


def _linear_modules(skeleton: PreTrainedModel) -> list[str]:
    """Linear layers of the decoder, without the LM head and the routers."""
    head = skeleton.get_output_embeddings()
    routers = {name for name, module in skeleton.named_modules() if _is_router(name, module)}
    return [
        name
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not _is_in(name, routers)
    ]


def _is_in(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def _is_router(name: str, module: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    return last in ("router", "gate", "shared_expert_gate") or "Router" in type(module).__name__


def _expert_parameters(skeleton: PreTrainedModel) -> list[str]:
    """Weights that hold all experts of a layer in one tensor `[experts, ., .]`."""
    return [
        name for name, parameter in skeleton.named_parameters() if parameter.dim() == 3 and "experts" in name.split(".")
    ]


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _named_targets(wanted: list[str], linears: list[str], experts: list[str]) -> AdapterTargets:
    modules: list[str] = []
    parameters: list[str] = []
    for target in wanted:
        in_modules = [name for name in linears if _ends_with(name, target)]
        in_parameters = [name for name in experts if _ends_with(name, target)]
        if not in_modules and not in_parameters:
            raise _nothing_matches(target, linears, experts)
        modules += in_modules
        parameters += in_parameters
    return AdapterTargets(tuple(dict.fromkeys(modules)), tuple(dict.fromkeys(parameters)))


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _nothing_matches(target: str, linears: list[str], experts: list[str]) -> RecipeError:
    known = sorted({_suffix(name) for name in linears} | {_suffix(name, parts=3) for name in experts})
    near = difflib.get_close_matches(target, known, n=1)
    hint = f" Nearest: `{near[0]}`." if near else ""
    return RecipeError(
        f"the target `{target}` matches no linear layer and no expert weight of the model",
        place="adapter.targets",
        remedy=f"The model has: {', '.join(known) or 'no linear layers'}.{hint}",
    )


def _suffix(name: str, *, parts: int = 1) -> str:
    """The last parts of a name, such as `q_proj`, or `mlp.experts.gate_up_proj` of three."""
    return ".".join(name.split(".")[-parts:])


def _require_planned(model: PeftModel, targets: AdapterTargets) -> None:
    """Compares what PEFT wrapped with the plan, so that nothing is trained that the table does not show."""
    base = model.get_base_model()
    wrapped = {_plain_name(name) for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    planned = set(targets.modules) | {name.rpartition(".")[0] for name in targets.parameters}
    if wrapped == planned:
        return
    extra, missing = sorted(wrapped - planned), sorted(planned - wrapped)
    raise RecipeError(
        f"PEFT wrapped other modules than planned: {len(extra)} more ({', '.join(extra[:3])}), "
        f"{len(missing)} fewer ({', '.join(missing[:3])})",
        place="adapter.targets",
        remedy="Name the targets by longer endings, such as `self_attn.q_proj`, so that each means one kind of layer.",
    )


def _plain_name(name: str) -> str:
    """A wrapped module's name as the base model knows it: PEFT nests parameter wrappers as `base_layer`."""
    return name.replace(".base_layer", "")
