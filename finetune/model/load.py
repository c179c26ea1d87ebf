"""The tokenizer and the model with its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils.quantization_config import Mxfp4Config

from finetune.errors import EnvironmentProblem, RecipeError
from finetune.model.config import ModelPlan
from finetune.model.quantize import build_random_quantized, keep_training_layout, quantization_config
from finetune.recipe.schema import ModelSection


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Returns the rows of the embedding: the ids that the model knows, which may be more than the tokenizer's."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def choose_pad_token(tokenizer: PreTrainedTokenizerBase, *, num_rows: int) -> int:
    """Returns an id inside the embedding (of `num_rows` rows) to fill pad slots with; nothing is resized for it.

    Which one does not matter to training: pad slots are a document of their own and carry no label.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int) and 0 <= token_id < num_rows:
            return token_id
    return 0


def load_model(plan: ModelPlan, *, seed: int, say: Callable[[str], None] = print) -> PreTrainedModel:
    """Loads or draws the weights on the plan's device, in its number format, quantized where the recipe says so.

    Args:
        seed: of random weights.
        say: prints a warning about tensors that the model has no use for.

    Raises:
        EnvironmentProblem: weights are missing, broken, or do not fit the config.
    """
    set_seed(seed)
    section = plan.section
    if section.init == "random":
        return _draw(plan)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues] - a pair here
            section.path,
            revision=section.revision,
            dtype=plan.dtype,
            attn_implementation=plan.attention,
            quantization_config=_quantization(plan),
            device_map={"": plan.device},
            use_safetensors=True,  # pickled weights can run code
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise EnvironmentProblem(
            f"the model's weights cannot be loaded: {str(error).strip().splitlines()[0]}",
            place=f"model.path: {section.path}",
            remedy="Download the model again, or check that its weights belong to its config.json.",
        ) from error
    _require_complete(section, info)
    if unused := sorted(info.get("unexpected_keys", ())):
        say(
            f"{len(unused)} tensors of the weights' files are not part of this model, such as {unused[0]}: does "
            f"config.json belong to them?"
        )
    keep_training_layout(model)
    return model


def _draw(plan: ModelPlan) -> PreTrainedModel:
    if plan.section.quantization != "none":
        return build_random_quantized(plan)
    with plan.device:
        return AutoModelForCausalLM.from_config(plan.config, dtype=plan.dtype, attn_implementation=plan.attention)


def _quantization(plan: ModelPlan) -> object | None:
    stored = getattr(plan.config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method == "mxfp4":
        if plan.section.quantization != "none":
            raise RecipeError(
                f"model.quantization is {plan.section.quantization}, but the weights are stored as mxfp4",
                place="model.quantization",
                remedy="Set model.quantization=none: the experts are unpacked to 16 bits while loading.",
            )
        return Mxfp4Config(dequantize=True)
    if method is not None:
        raise RecipeError(
            f"the weights are stored quantized ({method}), which this program does not train",
            place=f"model.path: {plan.section.path}",
            remedy="Use the model's 16-bit release and set model.quantization=nf4 to train it in 4 bits.",
        )
    return quantization_config(plan) if plan.section.quantization != "none" else None


def _require_complete(section: ModelSection, info: dict) -> None:
    """Refuses weights that transformers filled up with random ones."""
    missing = sorted(info.get("missing_keys", ()))
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if not missing and not mismatched:
        return
    what = f"{len(missing)} tensors are missing" if missing else f"{len(mismatched)} tensors have other shapes"
    raise EnvironmentProblem(
        f"the weights do not fit the config: {what}, such as {(missing or mismatched)[0]}",
        place=f"model.path: {section.path}",
        remedy="Download the model again, or check that its weights belong to its config.json.",
    )
