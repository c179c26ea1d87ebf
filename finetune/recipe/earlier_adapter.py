"""An earlier adapter's own settings, from the `adapter_config.json` that PEFT wrote, in the recipe's words.

With `adapter.continue_from` they are the adapter section; what the recipe gives beside them has to agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.recipe.schema import LoraAdapter, Recipe

CONFIG_FILE = "adapter_config.json"
SAME_VALUE = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
"""Keys of the recipe that must equal those of PEFT. Targets are compared tensor by tensor on the model instead, since
`all-linear` and a list may mean the same; dropout acts in training alone and may differ."""
FIRST_VALUES_ONLY = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that say how the adapter began; the others change the base model's weights too."""
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
READ_HERE = frozenset(
    {
        "bias",
        "init_lora_weights",
        "layers_to_transform",
        "lora_dropout",
        "modules_to_save",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        *SAME_VALUE.values(),
    }
)


@dataclass(frozen=True)
class EarlierAdapter:
    """What `adapter_config.json` says, or why it cannot be continued."""

    path: Path
    values: dict[str, Any]
    fault: str | None = None


def read_earlier_adapter(folder: str) -> EarlierAdapter:
    """Reads the config of a PEFT adapter; `fault` says what keeps this program from training it on."""
    path = Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return EarlierAdapter(path, {}, f"{path} cannot be read ({error.strerror})")
    except ValueError as error:
        return EarlierAdapter(path, {}, f"{path} is no JSON ({error})")
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        return EarlierAdapter(path, {}, f"{path} has the peft_type {kind!r}, and only LORA is trained here")
    return EarlierAdapter(path, values, _not_trained_here(path, values))


def take_earlier_adapter(recipe: Recipe) -> Recipe:
    """Returns the recipe with the earlier adapter's settings in place of those that it leaves out."""
    adapter = recipe.adapter
    if not isinstance(adapter, LoraAdapter) or adapter.continue_from is None:
        return recipe
    earlier = read_earlier_adapter(adapter.continue_from).values
    layers = earlier.get("layers_to_transform")
    taken = {
        "rank": earlier["r"],
        "alpha": float(earlier["lora_alpha"]),
        "rslora": bool(earlier.get("use_rslora")),
        "dora": bool(earlier.get("use_dora")),
        "dropout": float(earlier.get("lora_dropout") or 0.0),
        "targets": sorted([*(earlier.get("target_modules") or []), *(earlier.get("target_parameters") or [])]),
        "layers": [layers] if isinstance(layers, int) else layers,
        "modules_to_save": sorted(earlier.get("modules_to_save") or []),
    }
    left_out = {key: value for key, value in taken.items() if key not in adapter.model_fields_set}
    return recipe.model_copy(update={"adapter": adapter.model_copy(update=left_out)})


def _not_trained_here(path: Path, values: dict[str, Any]) -> str | None:
    if not isinstance(values.get("r"), int) or not isinstance(values.get("lora_alpha"), int | float):
        return f"{path} has no r and lora_alpha"
    if values.get("bias", "none") != "none":
        return f"{path} has bias {values['bias']!r}, which is not trained here"
    if values.get("init_lora_weights", True) not in FIRST_VALUES_ONLY:
        return f"{path} has init_lora_weights {values['init_lora_weights']!r}, which changes the base model's weights"
    if isinstance(values.get("target_modules"), str):
        return f"{path} names its targets by the pattern {values['target_modules']!r}, not as a list"
    others = sorted(key for key, value in values.items() if value and key not in WITHOUT_EFFECT | READ_HERE)
    return f"{path} sets {others[0]} to {values[others[0]]!r}, which is not trained here" if others else None
