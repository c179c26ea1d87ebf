"""An earlier adapter that is trained on: its tensors are compared with the plan before any weight of the base is read,
and after loading each is compared with what stands in the model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.new_tokens import NewTokens
from finetune.recipe.earlier_adapter import CONFIG_FILE

WEIGHTS_FILE = "adapter_model.safetensors"


def check_earlier_adapter(
    skeleton: PeftModel, folder: str, *, base_path: str, new_tokens: NewTokens | None
) -> list[str]:
    """Compares an adapter's file with the planned adapter, by the names and shapes of its tensors.

    Args:
        skeleton: with the planned adapter, on the meta device.
        base_path: the recipe's `model.path`.

    Returns:
        A warning where the adapter says that it belongs to another base model.

    Raises:
        RecipeError: it has other tensors, or other token rows, than the recipe would train.
        EnvironmentProblem: its weights cannot be read.
    """
    place = f"adapter.continue_from: {folder}"
    planned = {name: tuple(tensor.shape) for name, tensor in _state(skeleton).items()}
    there = _shapes(Path(folder) / WEIGHTS_FILE, place)
    different = sorted(name for name in planned.keys() | there.keys() if planned.get(name) != there.get(name))
    if different:
        name = different[0]
        raise RecipeError(
            f"{len(different)} tensors differ between the earlier adapter and this recipe on this model, such as "
            f"{name}: {_shape(there, name)} in the file, {_shape(planned, name)} here",
            place=place,
            remedy="Use the base model that the adapter was trained on, and leave adapter.targets, adapter.layers, "
            "adapter.modules_to_save and model.new_tokens as they were then.",
        )
    values = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    rows = values.get("trainable_token_indices") or {}
    lists = [rows] if isinstance(rows, list) else list(rows.values())
    if new_tokens is not None and any(sorted(ids) != sorted(new_tokens.ids) for ids in lists):
        raise RecipeError(
            f"the earlier adapter trains the token ids {lists[0]}, this recipe {list(new_tokens.ids)}",
            place=place,
            remedy="Name the same tokens in model.new_tokens, in the same order.",
        )
    base = values.get("base_model_name_or_path")
    if not base or Path(base).name == Path(base_path).name:
        return []
    return [f"the adapter in {folder} was trained on {base}; its tensors fit {base_path}, but is it the same model?"]


@torch.no_grad()
def load_earlier_adapter(model: PeftModel, folder: str) -> None:
    """Puts an earlier adapter's weights into the adapter of `model`, which stays trainable.

    Raises:
        EnvironmentProblem: a tensor of the file is not finite, or did not arrive.
    """
    device = str(next(model.parameters()).device)
    weights = load_peft_weights(folder, device=device)
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise EnvironmentProblem(
            f"{len(broken)} of {len(weights)} tensors of the earlier adapter hold NaN or infinite values, such as "
            f"{broken[0]}",
            place=str(Path(folder) / WEIGHTS_FILE),
            remedy="Name another adapter in adapter.continue_from; this one's training went wrong.",
        )
    set_peft_model_state_dict(model, dict(weights))
    loaded = _state(model)
    lost = [name for name, tensor in weights.items() if not _equals(loaded.get(name), tensor)]
    if lost or loaded.keys() != weights.keys():
        raise EnvironmentProblem(
            f"{len(lost)} of {len(weights)} tensors of the earlier adapter did not arrive in the model, such as "
            f"{(lost or sorted(loaded.keys() ^ weights.keys()))[0]}",
            place=f"adapter.continue_from: {folder}",
            remedy="Save the adapter again with the PEFT release that is installed here.",
        )


def _state(model: PeftModel) -> dict[str, torch.Tensor]:
    return get_peft_model_state_dict(model, save_embedding_layers=False)


def _equals(there: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return there is not None and torch.equal(there, tensor.to(there))


def _shapes(path: Path, place: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(
            f"the earlier adapter's weights cannot be read: {error}",
            place=place,
            remedy=f"The folder needs {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT saves them.",
        ) from error


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return "x".join(map(str, shapes[name])) if name in shapes else "absent"
