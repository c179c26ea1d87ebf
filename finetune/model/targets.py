"""Which modules of a model get an adapter, and which are trained in full beside it.

Settled on the model's skeleton, before any weight is read, so that a name which matches nothing costs no time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from finetune.errors import RecipeError
from finetune.model.trainable import layer_pattern
from finetune.recipe.schema import LoraAdapter

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
"""The first number of a path is its layer's; later ones number experts."""
EMBEDDING_NAMES = ("embed_tokens", "lm_head")
"""PEFT keeps an embedding and its LM head tied only where they are called so (`EMBEDDING_LAYER_NAMES`, PEFT 0.21)."""


@dataclass(frozen=True)
class AdapterTargets:
    """Full names of what an adapter trains."""

    modules: tuple[str, ...]
    """Linear modules that get an adapter."""
    parameters: tuple[str, ...]
    """Expert parameters that get an adapter."""
    saved: tuple[str, ...] = ()
    """Modules trained in full. Of a tied embedding and LM head both stand here, and are one weight."""


def choose_targets(skeleton: PreTrainedModel, adapter: LoraAdapter, *, is_quantized: bool = False) -> AdapterTargets:
    """Resolves the recipe's names against the model.

    Raises:
        RecipeError: a name or a layer matches nothing, or what it matches cannot be trained so.
    """
    linears = _linear_modules(skeleton)
    experts = _expert_parameters(skeleton)
    saved = _saved_modules(skeleton, adapter.modules_to_save, is_quantized=is_quantized)
    if adapter.targets == "all-linear":
        chosen = AdapterTargets(tuple(linears), tuple(experts), saved)
    elif adapter.targets == "attention":
        chosen = AdapterTargets(tuple(name for name in linears if _is_attention(name)), (), saved)
    else:
        chosen = _named_targets(adapter.targets, linears, experts, saved)
    if not chosen.modules and not chosen.parameters:
        raise _nothing_matches(str(adapter.targets), linears, experts)
    if adapter.layers is not None:
        chosen = _in_layers(chosen, adapter.layers, skeleton)
    chosen = AdapterTargets(outside(chosen.modules, saved), outside(chosen.parameters, saved), saved)
    if not chosen.modules and not chosen.parameters:
        raise RecipeError(
            f"every target of the adapter lies in a module of adapter.modules_to_save ({', '.join(saved[:3])})",
            place="adapter.modules_to_save",
            remedy="Name fewer modules to save, or other targets.",
        )
    if chosen.parameters:
        _require_plain_lora(adapter, chosen.parameters[0])
    return chosen


def is_tied(model: PreTrainedModel) -> bool:
    """Says whether the LM head's weight is the embedding's."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Returns the full name of a module of the model."""
    return next(name for name, module in model.named_modules() if module is wanted)


def names_for_peft(
    chosen: Iterable[str], everything: Iterable[str], *, parts: int, layers: list[int] | None = None
) -> list[str]:
    """Returns the shortest names that mean just the chosen ones to PEFT.

    Their last parts, such as `q_proj`, where no other of `everything` ends so (in `layers`, if PEFT is told of them
    too, and no path has a second number), else the full names.
    """
    wanted = set(chosen)
    short = {suffix(name, parts=parts) for name in wanted}
    meant = {name for name in everything if any(ends_with(name, ending) for ending in short)}
    if layers is not None:
        if any(len(LAYER_NUMBER.findall(name)) > 1 for name in meant):
            return sorted(wanted)  # PEFT may take the 3 of `layers.0.experts.3` for the layer
        meant = {name for name in meant if layer_number(name) in layers}
    return sorted(short if meant == wanted else wanted)


def layer_number(name: str) -> int | None:
    """Returns the number of the layer that a module or parameter lies in; None for those outside all layers."""
    found = LAYER_NUMBER.search(name)
    return int(found.group(1)) if found else None


def outside(names: Iterable[str], modules: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that are none of the modules and lie in none of them."""
    around = tuple(modules)
    return tuple(n for n in names if not any(n == module or n.startswith(module + ".") for module in around))


def ends_with(name: str, ending: str) -> bool:
    """Says whether a path is `ending`, or ends with it after a dot."""
    return name == ending or name.endswith("." + ending)


def suffix(name: str, *, parts: int = 1) -> str:
    """Returns the last parts of a name, such as `q_proj`, or `mlp.experts.gate_up_proj` of three."""
    return ".".join(name.split(".")[-parts:])


def _linear_modules(skeleton: PreTrainedModel) -> list[str]:
    """Linear layers of the decoder, without the LM head and the routers."""
    head = skeleton.get_output_embeddings()
    routers = [name for name, module in skeleton.named_modules() if _is_router(name, module)]
    linears = [n for n, module in skeleton.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return list(outside(linears, routers))


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


def _named_targets(wanted: list[str], linears: list[str], experts: list[str], saved: tuple[str, ...]) -> AdapterTargets:
    modules: list[str] = []
    parameters: list[str] = []
    for target in wanted:
        in_modules = [name for name in linears if ends_with(name, target)]
        in_parameters = [name for name in experts if ends_with(name, target)]
        if not in_modules and not in_parameters:
            raise _nothing_matches(target, linears, experts)
        modules += in_modules
        parameters += in_parameters
    return AdapterTargets(tuple(dict.fromkeys(modules)), tuple(dict.fromkeys(parameters)), saved)


def _in_layers(chosen: AdapterTargets, layers: list[int], skeleton: PreTrainedModel) -> AdapterTargets:
    """Keeps the targets of some layers; each layer must have one."""
    numbers = {number for name, _ in skeleton.named_modules() if (number := layer_number(name)) is not None}
    if unknown := sorted(set(layers) - numbers):
        raise RecipeError(
            f"adapter.layers names {_joined(unknown)}, but the model has the layers 0 to {max(numbers, default=0)}",
            place="adapter.layers",
            remedy="Name layers that the model has, counted from 0.",
        )
    modules = tuple(name for name in chosen.modules if layer_number(name) in layers)
    parameters = tuple(name for name in chosen.parameters if layer_number(name) in layers)
    if empty := sorted(set(layers) - {layer_number(name) for name in (*modules, *parameters)}):
        raise RecipeError(
            f"adapter.layers names {_joined(empty)}, where adapter.targets matches nothing",
            place="adapter.layers",
            remedy="Leave these layers out, or add targets that they have.",
        )
    return AdapterTargets(modules, parameters, chosen.saved)


def _saved_modules(skeleton: PreTrainedModel, wanted: list[str], *, is_quantized: bool) -> tuple[str, ...]:
    named = {
        name: module for name, module in skeleton.named_modules() if name and any(True for _ in module.parameters())
    }
    saved: list[str] = []
    for name in wanted:
        matches = [full for full in named if ends_with(full, name)]
        if not matches:
            raise _no_module(name, list(named))
        saved += matches
    saved = _with_tied_ends(skeleton, saved)
    if inner := [name for name in saved if not outside([name], [other for other in saved if other != name])]:
        raise RecipeError(
            f"adapter.modules_to_save names `{inner[0]}` as well as a module around it",
            place="adapter.modules_to_save",
            remedy="Name one of them.",
        )
    if is_quantized:
        head = skeleton.get_output_embeddings()
        inside = (m for name in saved for m in named[name].modules())
        if any(isinstance(module, nn.Linear) and module is not head for module in inside):
            raise RecipeError(
                f"adapter.modules_to_save names quantized linear layers ({', '.join(saved[:3])}), which cannot be "
                "trained in full",
                place="adapter.modules_to_save",
                remedy="Give them an adapter through adapter.targets, or set model.quantization=none.",
            )
    return tuple(saved)


def _with_tied_ends(skeleton: PreTrainedModel, saved: list[str]) -> list[str]:
    """Adds the other end of a tied embedding, so that neither is trained away from the other."""
    head = skeleton.get_output_embeddings()
    ends = [module_name(skeleton, m) for m in (skeleton.get_input_embeddings(), head) if m is not None]
    if not is_tied(skeleton) or not set(ends) & set(saved):
        return list(dict.fromkeys(saved))
    if any(suffix(end) not in EMBEDDING_NAMES for end in ends):
        raise RecipeError(
            f"`{ends[0]}` and `{ends[1]}` are one weight, which PEFT does not keep tied under these names",
            place="adapter.modules_to_save",
            remedy=f"Leave both out of adapter.modules_to_save; PEFT ties {' and '.join(EMBEDDING_NAMES)}.",
        )
    return list(dict.fromkeys([*saved, *ends]))


def _require_plain_lora(adapter: LoraAdapter, parameter: str) -> None:
    """PEFT adapts expert parameters by their sum with the adapter, which has no place for dropout or DoRA."""
    for key, value, off in (("dropout", adapter.dropout, 0), ("dora", adapter.dora, False)):
        if value:
            raise RecipeError(
                f"adapter.{key} is {str(value).lower()}, but adapters on expert weights ({layer_pattern(parameter)}) "
                f"cannot have {'DoRA' if key == 'dora' else key}",
                place=f"adapter.{key}",
                remedy=f"Set adapter.{key}={str(off).lower()}, or adapter.targets=attention to leave the experts out.",
            )


def _nothing_matches(target: str, linears: list[str], experts: list[str]) -> RecipeError:
    known = sorted({suffix(name) for name in linears} | {suffix(name, parts=3) for name in experts})
    return RecipeError(
        f"the target `{target}` matches no linear layer and no expert weight of the model",
        place="adapter.targets",
        remedy=f"The model has: {', '.join(known) or 'no linear layers'}.{_nearest(target, [*known, *linears])}",
    )


def _no_module(name: str, named: list[str]) -> RecipeError:
    known = sorted({suffix(full) for full in named if not suffix(full).isdigit()})
    return RecipeError(
        f"adapter.modules_to_save names `{name}`, and the model has no module with weights whose path ends so",
        place="adapter.modules_to_save",
        remedy=f"The model has: {', '.join(known)}.{_nearest(name, [*known, *named])}",
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Nearest: `{near[0]}`." if near else ""


def _joined(numbers: list[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
