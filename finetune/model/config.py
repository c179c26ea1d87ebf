"""What is known of a model before its weights: config, device, number format, attention, weight files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.recipe.schema import ModelSection

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WEIGHT_PATTERN = "*.safetensors"


@dataclass(frozen=True)
class ModelPlan:
    """The model of a recipe, settled before any weight is read."""

    section: ModelSection
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    attention: str
    """transformers' own implementation that the model is loaded with; what trains packed rows is chosen elsewhere."""
    skeleton: PreTrainedModel
    """The model on the meta device: names, shapes and classes, no memory."""

    @property
    def model_type(self) -> str:
        return self.config.model_type


def plan_model(section: ModelSection) -> ModelPlan:
    """Reads the config and settles device, format and attention.

    Raises:
        EnvironmentProblem: no config, no weights, no CUDA where it was asked for.
        RecipeError: a setting that this architecture cannot have.
    """
    device = choose_device(section.device)
    config = _load_config(section)
    if section.init == "pretrained":
        _require_weights(section)
    dtype = _choose_dtype(section, config)
    if dtype == torch.float16 and device.type == "cpu":
        raise EnvironmentProblem(
            "fp16 is trained on a GPU only (its loss scaling has no CPU version)",
            place="model.dtype",
            remedy="Set model.dtype to bf16 or fp32, or train on a CUDA device.",
        )
    skeleton = _make_skeleton(section, config, dtype)
    return ModelPlan(section, config, device, dtype, _loading_attention(section, skeleton), skeleton)


def choose_device(wanted: str) -> torch.device:
    """Returns the device to train on.

    Raises:
        EnvironmentProblem: `cuda` is wanted and torch sees no CUDA device.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise EnvironmentProblem(
            f"model.device is cuda, but torch {torch.__version__} ({build}) sees no CUDA device",
            place="model.device",
            remedy="Check `nvidia-smi` and the driver, install a CUDA build of torch, or set model.device=cpu.",
        )
    return torch.device("cuda", torch.cuda.current_device())


def _load_config(section: ModelSection) -> PretrainedConfig:
    folder = Path(section.path)
    if folder.is_absolute() and not folder.is_dir():
        raise EnvironmentProblem(
            "the model's folder does not exist",
            place=f"model.path: {folder}",
            remedy="Correct model.path, or name a hub id such as Qwen/Qwen3-14B.",
        )
    if folder.is_absolute() and not (folder / "config.json").is_file():
        raise EnvironmentProblem(
            f"no config.json among the folder's files: {_listing(folder)}",
            place=f"model.path: {folder}",
            remedy="Point model.path at the folder that holds the model's config.json and weights.",
        )
    try:
        return AutoConfig.from_pretrained(section.path, revision=section.revision)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(
            f"the model's config cannot be read: {_first_line(error)}",
            place=f"model.path: {section.path}",
            remedy="Check the name, the network and, for a gated model, `hf auth login`; a local folder needs none.",
        ) from error


def _require_weights(section: ModelSection) -> None:
    folder = Path(section.path)
    if not folder.is_absolute() or any(folder.glob(WEIGHT_PATTERN)):
        return
    raise EnvironmentProblem(
        f"the folder holds no weights ({WEIGHT_PATTERN}), only: {_listing(folder)}",
        place=f"model.path: {folder}",
        remedy="Download the weights into the folder, or set model.init=random to start from random ones.",
    )


def _choose_dtype(section: ModelSection, config: PretrainedConfig) -> torch.dtype:
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    stored = getattr(config, "dtype", None)
    if isinstance(stored, torch.dtype) and stored in DTYPES.values():
        return stored
    raise RecipeError(
        f"model.dtype is auto, but the model's config.json names {stored!r} as its dtype",
        place=f"model.path: {section.path}",
        remedy=f"Set model.dtype to one of {', '.join(DTYPES)}.",
    )


def _make_skeleton(section: ModelSection, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise EnvironmentProblem(
            f"transformers has no causal language model for `{config.model_type}`: {_first_line(error)}",
            place=f"model.path: {section.path}",
            remedy="Use a causal language model, or a transformers release that knows this architecture.",
        ) from error


def _loading_attention(section: ModelSection, skeleton: PreTrainedModel) -> str:
    has_sdpa = bool(getattr(skeleton, "_supports_sdpa", False))
    return "sdpa" if has_sdpa and section.attention != "eager" else "eager"


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names else "nothing"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
