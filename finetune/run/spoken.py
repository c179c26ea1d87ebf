"""What a person said in a rendered prompt, for places with room for a line: without the template's words around it.

Where a template's marks are not known, what is left of the text is told whole; the files of a run keep all of it.
"""

from __future__ import annotations

import re

_CONTROL_TOKEN = re.compile(
    "<[|\uff5c][^|<>\uff5c]{1,40}[|\uff5c]>"  # ChatML, Llama 3, harmony, DeepSeek
    r"|</?s>|<(?:bos|eos|pad)>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)
_ROLE = re.compile(r"^(system|developer|user|human|assistant|model|ai|tool|bot)\b:?[ \t]*(?:\n|$)", re.IGNORECASE)
_ASKING = frozenset({"user", "human"})


def without_control_tokens(text: str) -> str:
    """Returns a text with its control tokens replaced by spaces."""
    return _CONTROL_TOKEN.sub(" ", text)


def last_question(prompt: str) -> str:
    """Returns the last user's message of a rendered prompt; all of it, without control tokens, where none is found."""
    said: list[str] = []
    is_asked = False
    for part in _CONTROL_TOKEN.split(prompt):
        text = part.strip()
        role = _ROLE.match(text)
        if role is not None:
            is_asked = role.group(1).lower() in _ASKING
            text = text[role.end() :].strip()
            if is_asked:
                said = []
        if is_asked and text:
            said.append(text)
    return " ".join(said) or without_control_tokens(prompt)
