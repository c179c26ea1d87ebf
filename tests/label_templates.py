"""Chat templates of the shapes that models come with, written for the tests, each with a tokenizer that fits it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == questions[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{% set function = call.function or call %}
{{- '{"name": "' + function.name + '", "arguments": ' + function.arguments | tojson + '}' }}
{{- ', ' if not loop.last else ']' + eos_token }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
LLAMA_3_2 = """{{ bos_token }}{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}
{%- else %}{% set date_string = '26 Jul 2024' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
OPENS_THINK = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'assistant' %}{% set c = m.content or '' %}
{%- if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}
{{- '<|Assistant|>' + c }}
{%- for call in m.tool_calls or [] %}{% if loop.first %}{{ '<|calls|>' }}{% endif %}
{{- '<|call|>' + call.function.name + '\n' + call.function.arguments + '<|/call|>' }}
{%- if loop.last %}{{ '<|/calls|>' }}{% endif %}{% endfor %}{{ eos_token }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}
{%- else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
ITEMS = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ '<function=' + call.function.name + '>' }}
{%- for name, value in call.function.arguments | items %}{{ '<' + name + '>' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '</' + name + '>' }}{% endfor %}{{ '</function>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(frozen=True)
class Shape:
    """A template with its special tokens and the text that ends a turn."""

    template: str
    special: tuple[str, ...]
    eos: str
    end: str
    bos: str | None = None
    has_system: bool = True
    has_tools: bool = False
    words_before: tuple[str, ...] = field(default=("",))
    """White space that may stand between generation's prompt and an answer, and is learned."""

    def tokenizer(self, template: str | None = None) -> Any:
        return special_tokenizer(template or self.template, self.special, bos=self.bos, eos=self.eos)


SHAPES = {
    "smollm": Shape(CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "base-chatml": Shape(CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>", "<|im_end|>"),
    "gemma": Shape(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<end_of_turn>",
        bos="<bos>",
        has_system=False,
    ),
    "mistral": Shape(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
        "</s>",
        bos="<s>",
        has_system=False,
        has_tools=True,
        words_before=(" ",),
    ),
    "llama3.2": Shape(
        LLAMA_3_2,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "phi": Shape(
        PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>"), "<|endoftext|>", "<|end|>"
    ),
    "opens-think": Shape(
        OPENS_THINK,
        (
            *("<s>", "<|User|>", "<|Assistant|>", "<|end|>", "<|output|>", "<|/output|>"),
            *("<|calls|>", "<|call|>", "<|/call|>", "<|/calls|>"),
        ),
        "<|end|>",
        "<|end|>",
        bos="<s>",
        has_tools=True,
    ),
    "items": Shape(ITEMS, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>", has_tools=True),
}


def special_tokenizer(template: str | None, special: tuple[str, ...], *, bos: str | None, eos: str) -> Any:
    """Returns a byte-level tokenizer with some merges over white space; it puts BOS before a text where it has one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    newline, space = "\u010a", "\u0120"
    merges = [(newline, newline), (space, "a"), (newline, "f"), ("o", "o"), (space + "a", "n"), (space, "{")]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def call(name: str, arguments: Any, *, as_text: bool = False) -> dict[str, Any]:
    """Returns a tool call; `as_text` gives the arguments as JSON text, as OpenAI's API does."""
    shown = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": shown}}
