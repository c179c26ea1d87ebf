"""LoRA and its kinds: from the targets to a plain PEFT model in which just the planned weights are trained.

Targets are handed to PEFT as plain names; afterwards what it wrapped is compared with the plan, since PEFT treats some
names of its own accord (`all-linear` on an MoE trains the router, and a module to save is found by its last letters).
"""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import RecipeError
from finetune.model.new_tokens import NewTokens
from finetune.model.targets import AdapterTargets, is_tied, module_name, names_for_peft, outside
from finetune.recipe.schema import Adapter, LoraAdapter


def add_adapter(
    model: PreTrainedModel, adapter: Adapter, *, targets: AdapterTargets | None, new_tokens: NewTokens | None = None
) -> nn.Module:
    """Wraps the model with LoRA (first values from torch's global generator), or returns it as it is.

    Adapter weights and the rows of new tokens are fp32 whatever the base is; modules trained in full keep the base's
    number format. The result is a plain PEFT model.

    Args:
        new_tokens: whose rows are trained, where the adapter does not train the whole embedding; the model must have
            them already.
    """
    if targets is None or not isinstance(adapter, LoraAdapter):
        return model
    rows = _token_rows(model, targets, new_tokens)
    was_tied = is_tied(model)
    peft_model = get_peft_model(model, _peft_config(model, adapter, targets, rows))
    _require_planned(peft_model, targets, rows)
    _require_ties(peft_model, was_tied=was_tied)
    for module in peft_model.modules():
        if isinstance(module, TrainableTokensWrapper):
            # TRL's fused LM head asks for the bias too, which PEFT's wrapper does not pass on. There is none.
            module.register_parameter("bias", None)
    return peft_model


def _peft_config(
    model: PreTrainedModel, adapter: LoraAdapter, targets: AdapterTargets, rows: dict[str, list[int]]
) -> LoraConfig:
    names = outside((name for name, _ in model.named_modules()), targets.saved)
    parameters = outside((name for name, _ in model.named_parameters()), targets.saved)
    modules = names_for_peft(targets.modules, names, parts=1, layers=adapter.layers)
    are_full = set(modules) == set(targets.modules)  # a full name counts in every layer, whatever the list of layers
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] - PEFT computes with floats as well
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=modules,
        target_parameters=names_for_peft(targets.parameters, parameters, parts=3) or None,
        layers_to_transform=None if are_full else adapter.layers,
        modules_to_save=list(targets.saved) or None,
        trainable_token_indices=rows or None,
        ensure_weight_tying=is_tied(model) and module_name(model, model.get_input_embeddings()) in targets.saved,
        task_type="CAUSAL_LM",
        bias="none",
    )


def _token_rows(model: PreTrainedModel, targets: AdapterTargets, new_tokens: NewTokens | None) -> dict[str, list[int]]:
    """Returns the rows to train by the module that holds them; a tied LM head follows its embedding in PEFT."""
    if new_tokens is None:
        return {}
    holders = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None and not is_tied(model):
        holders.append(head)
    names = [module_name(model, module) for module in holders]
    rows = {name: list(new_tokens.ids) for name in names if name not in targets.saved}
    if rows and getattr(head, "bias", None) is not None:
        raise RecipeError(
            "the model's LM head has a bias, which PEFT leaves out where it trains single rows",
            place="model.new_tokens",
            remedy="Train the whole embedding and LM head: adapter.modules_to_save=[embed_tokens, lm_head].",
        )
    return rows


def _require_planned(model: PeftModel, targets: AdapterTargets, rows: dict[str, list[int]]) -> None:
    """Compares what PEFT wrapped with the plan, so that nothing is trained that the table does not show."""
    named = list(model.get_base_model().named_modules())
    planned = set(targets.modules) | {name.rpartition(".")[0] for name in targets.parameters}
    wrapped = {_plain_name(name) for name, module in named if isinstance(module, LoraLayer)}
    _require_same("adapter.targets", wrapped, planned)
    saved = {name for name, module in named if isinstance(module, ModulesToSaveWrapper)}
    _require_same("adapter.modules_to_save", saved, set(targets.saved))
    trained = {
        name
        for name, module in named
        if isinstance(module, TrainableTokensWrapper) and module.token_adapter.tied_adapter is None
    }
    _require_same("model.new_tokens", trained, set(rows))


def _require_same(place: str, wrapped: set[str], planned: set[str]) -> None:
    if wrapped == planned:
        return
    extra, missing = sorted(wrapped - planned), sorted(planned - wrapped)
    raise RecipeError(
        f"PEFT wrapped other modules than planned: {len(extra)} more ({', '.join(extra[:3])}), "
        f"{len(missing)} fewer ({', '.join(missing[:3])})",
        place=place,
        remedy="Name them by longer endings, such as `self_attn.q_proj`, so that each means one kind of layer.",
    )


def _require_ties(model: PeftModel, *, was_tied: bool) -> None:
    """Embedding and LM head that were one weight must be trained as one."""
    base = model.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]  # pyright: ignore[reportCallIssue]
    if not was_tied or all(isinstance(end, TrainableTokensWrapper) for end in ends):
        return  # rows of new tokens are shared by PEFT, and its merged weights are made anew each time
    if ends[0].weight is not ends[1].weight:
        raise RecipeError(
            "PEFT untied the embedding from the LM head",
            place="adapter.modules_to_save",
            remedy="Leave the embedding and the LM head out of adapter.modules_to_save.",
        )


def _plain_name(name: str) -> str:
    """A wrapped module's name as the base model knows it: PEFT nests parameter wrappers as `base_layer`."""
    return name.replace(".base_layer", "")
