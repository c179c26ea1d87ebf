"""What kinds of attention layers a model has, and whether packed rows are right for it at all; from its skeleton."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from finetune.optimizations.attention.types import AttentionLayer
from finetune.optimizations.support import Support

STATEFUL_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "ssm", "gated_delta", "hybrid")
"""Kinds of layers, as configs name them, that carry a state from one token to the next."""

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_rope_head_dim")
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Returns the distinct kinds of attention layers, in the order of their first use."""
    config = model.config.get_text_config()
    kinds = [
        _layer(module, config)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
    return list(dict.fromkeys(kinds))


def _layer(module: nn.Module, config: PretrainedConfig) -> AttentionLayer:
    heads = config.num_attention_heads
    width = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(module, "sliding_window", None)
    if window is None and not hasattr(module, "sliding_window") and getattr(config, "layer_types", None) is None:
        # Mistral hands the config's window to every layer.
        window = getattr(config, "sliding_window", None)
    return AttentionLayer(
        num_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=int(width),
        window=window,
        softcap=getattr(module, "attn_logit_softcapping", None),
        has_sinks=isinstance(getattr(module, "sinks", None), nn.Parameter),
    )


def packs_exactly(model: PreTrainedModel) -> Support:
    """Says whether nothing but attention looks at other tokens. A layer with a state or a convolution over time would
    carry it from one document of a row into the next, and no attention backend could prevent that."""
    config = model.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if stateful := sorted(kind for kind in kinds if any(word in kind for word in STATEFUL_LAYERS)):
        return Support(False, f"it has layers of kind {', '.join(stateful)}, whose state crosses documents")
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            return Support(False, f"its layer {name} ({type(module).__name__}) carries a state across documents")
    return Support(True)


def takes_backends(model: PreTrainedModel) -> Support:
    """Says whether the architecture's attention is of the kinds that the backends compute: it asks transformers'
    registry, and has nothing but full and sliding causal attention with keys and values of one width."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        return Support(False, f"{name} does not take attention backends in transformers")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - KNOWN_LAYERS
    if kinds:
        return Support(False, f"{name} has layers of kind {', '.join(sorted(kinds))}, which no backend computes")
    if getattr(config, "attention_chunk_size", None):
        return Support(False, f"{name} attends inside chunks of {config.attention_chunk_size}")
    if any(getattr(config, key, None) for key in LATENT_KEYS):
        return Support(False, f"{name} has latent attention, whose keys and values differ in width")
    for key in DROPOUT_KEYS:
        if rate := getattr(config, key, None):
            return Support(False, f"{name} has attention dropout ({key} {rate}), which no backend has")
    return Support(True)
