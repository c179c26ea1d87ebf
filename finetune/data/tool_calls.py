"""Bring tool definitions and tool calls into the one form that chat templates read.

    definition  {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}
    call        {"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}

Arguments given as a JSON string become an object: templates write them as JSON themselves, and would encode a string
a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.console import ordinal
from finetune.data.record_fields import parsed, text_of, wrong, wrong_record
from finetune.data.shorten import shorten
from finetune.data.types import Message, Origin
from finetune.errors import DataError

CALL_KEYS = frozenset({"id", "type", "function", "index"})
FUNCTION_KEYS = frozenset({"name", "arguments"})


def tools_of(record: dict[str, Any], origin: Origin) -> tuple[dict[str, Any], ...]:
    """Returns the definitions under `tools`, which may be a list or a JSON string of one; empty without any.

    Raises:
        DataError: `tools` is neither, or a definition has no name or the name of another.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = parsed(tools, "tools", origin) if tools.strip() else None
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise wrong("tools", "a list of definitions, or a JSON string of one", tools, origin)
    definitions = tuple(_definition_of(tool, f"tools[{index}]", origin) for index, tool in enumerate(tools))
    names = [definition["function"]["name"] for definition in definitions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise DataError(
                f"tools[{index}] defines {shorten(name)} a second time",
                place=str(origin),
                kind="`tools` defines a tool a second time",
                remedy="Keep one definition of each tool.",
            )
    return definitions


def _definition_of(tool: Any, where: str, origin: Origin) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(where, "an object", tool, origin)
    definition = tool if "function" in tool else {"type": "function", "function": tool}
    function = definition["function"]
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "an object", function, origin)
    text_of(function, "name", origin, where=f"{where}.function" if "function" in tool else where)
    return definition


def calls_of(value: Any, where: str, origin: Origin) -> list[dict[str, Any]]:
    """Returns tool calls in the form above; `value` is a call, a list of calls, or a JSON string of either.

    Raises:
        DataError: a call has no name, or its arguments are neither an object nor a JSON string of one.
    """
    if isinstance(value, str):
        value = parsed(value, where, origin)
    calls = value if isinstance(value, list) else [value]
    return [
        _call_of(call, f"{where}[{index}]" if isinstance(value, list) else where, origin)
        for index, call in enumerate(calls)
    ]


def _call_of(call: Any, where: str, origin: Origin) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise wrong(where, "an object with the tool's name and its arguments", call, origin)
    if "function" not in call:
        outer = {key: item for key, item in call.items() if key in CALL_KEYS}
        inner = {key: item for key, item in call.items() if key not in CALL_KEYS}
        call = {**outer, "type": "function", "function": inner}
    else:
        _refuse_unknown(call, CALL_KEYS, where, origin)
        where = f"{where}.function"
    function = call["function"]
    if not isinstance(function, dict):
        raise wrong(where, "an object with name and arguments", function, origin)
    text_of(function, "name", origin, where=where)
    if "parameters" in function and "arguments" not in function:  # the spelling of Llama 3.1's own template
        function = {("arguments" if key == "parameters" else key): item for key, item in function.items()}
    _refuse_unknown(function, FUNCTION_KEYS, where, origin)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}.arguments", origin) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise wrong(f"{where}.arguments", "an object, or a JSON string of one", arguments, origin)
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse_unknown(values: dict[str, Any], known: frozenset[str], where: str, origin: Origin) -> None:
    """Refuses keys that are not understood: arguments under another name would be left out, and `{}` be learned."""
    unknown = sorted(set(values) - known)
    if unknown:
        raise wrong_record(
            where,
            f"holds {', '.join(f'`{key}`' for key in unknown)}, which is not understood",
            origin,
            remedy='Write a call as {"function": {"name": ..., "arguments": {...}}}; remove or rename other keys.',
        )


def require_defined(messages: Sequence[Message], tools: Sequence[dict[str, Any]], origin: Origin) -> None:
    """Raises where a call names a tool that the record does not define, unless it defines none at all.

    Raises:
        DataError: a call without a definition.
    """
    if not tools:
        return
    names = {tool["function"]["name"] for tool in tools}
    for index, message in enumerate(messages):
        for call in message.extra.get("tool_calls", []):
            name = call["function"]["name"]
            if name not in names:
                raise DataError(
                    f"the {ordinal(index + 1)} message calls the tool {shorten(name)}, which `tools` does not define; "
                    f"it defines {shorten(', '.join(sorted(names)))}",
                    place=str(origin),
                    kind="a tool is called that `tools` does not define",
                    remedy="Add the tool's definition to `tools`, or correct the name of the call.",
                )
