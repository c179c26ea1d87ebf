"""Tiny models, tokenizers and data files, made in a moment and without a network: what the tests build on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3_window": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
}


def make_tokenizer(*, template: str | None = CHATML) -> Any:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens, `<|im_end|>` being EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def make_config(kind: str, **changes: Any) -> Any:
    """The config of a tiny model of one architecture."""
    from transformers import AutoConfig

    values = SMALL | KINDS[kind]
    architecture = values.pop("model_type", kind)
    values |= {"vocab_size": 260, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None}
    config = AutoConfig.for_model(architecture, **(values | changes))
    config.dtype = "float32"
    return config


def make_model_folder(folder: Path, kind: str, *, seed: int = 0, weights: bool = True, **changes: Any) -> Path:
    """Writes config, tokenizer and (unless told otherwise) random weights; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    config = make_config(kind, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder)
    if weights:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def make_chat_file(path: Path, *, rows: int = 40, seed: int = 0) -> Path:
    """Writes conversations of unequal length that a tiny model can learn something of; returns the path."""
    generator = random.Random(seed)
    words = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "bird"]
    lines = []
    for _ in range(rows):
        chosen = [generator.choice(words) for _ in range(generator.randint(1, 6))]
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": "say: " + " ".join(chosen)},
                    {"role": "assistant", "content": " ".join(chosen)},
                ]
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def make_recipe(model: Path, data: Path, out: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe as a dict: LoRA, packed rows of 64 tokens, on the CPU; `sections` are laid over it."""
    recipe: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu"},
        "adapter": {"type": "lora", "rank": 4, "alpha": 8},
        # Files of `make_chat_file` are made of so few words that some conversations are in any two of them.
        "data": {"train": [{"path": str(data)}], "max_length": 64, "cache": False, "leakage": "keep"},
        "training": {
            "rows_per_step": 4,
            "rows_per_micro_batch": 2,
            "learning_rate": 0.01,
            "max_steps": 4,
            "epochs": 100,
            "warmup_fraction": 0.0,
        },
        "evaluation": {"samples": 0},
        "output": {"dir": str(out)},
    }
    for name, values in sections.items():
        recipe[name] = values if "type" in values else {**recipe.get(name, {}), **values}
    return recipe
