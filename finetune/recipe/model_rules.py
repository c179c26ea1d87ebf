"""Rules of the model and its adapter. See `rules.py`."""

from __future__ import annotations

from pathlib import Path

from finetune.recipe.earlier_adapter import SAME_VALUE, read_earlier_adapter
from finetune.recipe.paths import is_hub_id
from finetune.recipe.schema import LoraAdapter, NoAdapter, Recipe
from finetune.recipe.violation import Violation


def quantized_weights_need_an_adapter(recipe: Recipe) -> Violation | None:
    """Weights in 4 or 8 bits cannot be trained themselves."""
    if recipe.model.quantization == "none" or isinstance(recipe.adapter, LoraAdapter):
        return None
    return Violation(
        keys=("model.quantization", "adapter.type"),
        found=recipe.model.quantization,
        allowed="`none` with `adapter.type: none`",
        reason="quantized weights are frozen and would leave nothing to train",
        remedy="Set `adapter.type: lora`, or `model.quantization: none`.",
    )


def full_fine_tuning_in_fp16_is_refused(recipe: Recipe) -> Violation | None:
    """Weights in fp16 lose small updates and overflow; adapters are kept in fp32."""
    if recipe.model.dtype != "fp16" or not isinstance(recipe.adapter, NoAdapter):
        return None
    return Violation(
        keys=("model.dtype", "adapter.type"),
        found=recipe.model.dtype,
        allowed="`auto`, `bf16` or `fp32` with `adapter.type: none`",
        reason="updates of weights held in fp16 vanish or overflow",
        remedy="Set `model.dtype: bf16` (or fp32), or `adapter.type: lora`.",
    )


def modules_in_fp16_are_not_trained(recipe: Recipe) -> Violation | None:
    """Modules that are trained in full keep the base's number format, and fp16 loses their small updates."""
    adapter = recipe.adapter
    if recipe.model.dtype != "fp16" or not isinstance(adapter, LoraAdapter) or not adapter.modules_to_save:
        return None
    return Violation(
        keys=("adapter.modules_to_save", "model.dtype"),
        found=list(adapter.modules_to_save),
        allowed="empty while `model.dtype` is fp16",
        reason="updates of weights held in fp16 vanish or overflow",
        remedy="Set `model.dtype: bf16` (or fp32), or remove `adapter.modules_to_save`.",
    )


def adapter_names_are_names(recipe: Recipe) -> Violation | None:
    """An empty name would match every module, and a negative number no layer; none may stand twice."""
    if not isinstance(recipe.adapter, LoraAdapter):
        return None
    names, layers = recipe.adapter.modules_to_save, recipe.adapter.layers or []
    if "" in names or len(set(names)) < len(names):
        return Violation(
            keys=("adapter.modules_to_save",),
            found=list(names),
            allowed="a list of different names",
            reason="a name is empty or stands twice",
            remedy="Name modules by their path or its end, such as [norm, lm_head].",
        )
    if any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
        return Violation(
            keys=("adapter.layers",),
            found=list(layers),
            allowed="a list of different numbers, 0 or more",
            reason="a number is negative or stands twice",
            remedy="Name layers from 0, such as [0, 1, 2].",
        )
    return None


def earlier_adapter_agrees(recipe: Recipe) -> Violation | None:
    """An adapter that is trained on keeps its rank, scale and kind."""
    adapter = recipe.adapter
    if not isinstance(adapter, LoraAdapter) or adapter.continue_from is None:
        return None
    earlier = read_earlier_adapter(adapter.continue_from)
    if earlier.fault is not None:
        return Violation(
            keys=("adapter.continue_from",),
            found=adapter.continue_from,
            allowed="the folder of a LoRA adapter that PEFT saved",
            reason=earlier.fault,
            remedy="Name a folder such as runs/NAME/adapter, or remove the key to begin a new adapter.",
        )
    for key, name in SAME_VALUE.items():
        value, theirs = getattr(adapter, key), earlier.values.get(name) or False
        if key in adapter.model_fields_set and value != theirs:
            return Violation(
                keys=(f"adapter.{key}",),
                found=value,
                allowed=f"{str(theirs).lower()}, or left out",
                reason=f"{earlier.path} has {name} {str(theirs).lower()}",
                remedy=f"Remove `adapter.{key}`, or `adapter.continue_from` to begin a new adapter.",
            )
    return None


def new_tokens_are_texts(recipe: Recipe) -> Violation | None:
    """A token is a text of its own, without space around it, which tokenizers treat unlike each other."""
    names = [*recipe.model.new_tokens, *recipe.model.new_special_tokens]
    wrong = [name for name in names if not name or name != name.strip() or names.count(name) > 1]
    if not wrong:
        return None
    return Violation(
        keys=("model.new_tokens" if wrong[0] in recipe.model.new_tokens else "model.new_special_tokens",),
        found=wrong[0],
        allowed="different texts without space around them",
        reason="it is empty, begins or ends with space, or stands twice",
        remedy="Write each new token once, such as `new_tokens: [<cite>, </cite>]`.",
    )


def revision_needs_a_hub_id(recipe: Recipe) -> Violation | None:
    """A folder has no revisions."""
    if recipe.model.revision is None or is_hub_id(recipe.model.path):
        return None
    return Violation(
        keys=("model.revision", "model.path"),
        found=recipe.model.revision,
        allowed="`null` when `model.path` is a folder",
        reason=f"{recipe.model.path} is a folder and has no revisions",
        remedy="Remove `model.revision`, or give a hub id such as Qwen/Qwen3-14B as `model.path`.",
    )


def chat_template_exists(recipe: Recipe) -> Violation | None:
    """The template file must be there before anything is loaded."""
    template = recipe.model.chat_template
    if template is None or Path(template).is_file():
        return None
    return Violation(
        keys=("model.chat_template",),
        found=template,
        allowed="an existing file",
        reason="it is a folder" if Path(template).is_dir() else "there is no such file",
        remedy="Correct the path (relative to the file that names it), or remove the key to use the tokenizer's own.",
    )


def lora_targets_are_names(recipe: Recipe) -> Violation | None:
    """An empty list would train nothing; an empty name would match every module."""
    targets = recipe.adapter.targets if isinstance(recipe.adapter, LoraAdapter) else "all-linear"
    if isinstance(targets, str) or (targets and all(targets)):
        return None
    return Violation(
        keys=("adapter.targets",),
        found=list(targets),
        allowed="`all-linear`, `attention` or a list of one or more module names",
        reason="without a name there is nothing to adapt",
        remedy="Name modules by the end of their path, such as [q_proj, v_proj], or use `all-linear`.",
    )


def lora_leaves_the_lm_head_alone(recipe: Recipe) -> Violation | None:
    """The loss is computed from the LM head's weight directly, past any adapter on it."""
    targets = recipe.adapter.targets if isinstance(recipe.adapter, LoraAdapter) else "all-linear"
    if isinstance(targets, str) or not any(name.split(".")[-1] == "lm_head" for name in targets):
        return None
    return Violation(
        keys=("adapter.targets",),
        found=list(targets),
        allowed="a list without `lm_head`",
        reason="the fused loss reads the LM head's weight itself, so an adapter on it would be ignored without a word",
        remedy="Remove `lm_head` from `adapter.targets`; `adapter.modules_to_save: [lm_head]` trains it in full.",
    )
