"""Calls of tools in an answer's text, in the two forms that open templates write.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen, Hermes) and
`<tool_call>name <arg_key>k</arg_key><arg_value>v</arg_value> …</tool_call>` (Ling, GLM), whose
values carry no types: 3 and "3" are written alike.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "given_calls", "same_calls", "split_calls"]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call."""

    name: str
    arguments: dict[str, Any]
    typed: bool = True
    """False: all values are texts, as the form writes them."""


def split_calls(text: str) -> tuple[str, list[Call] | None]:
    """The text before the first call, and the calls; None if one of them cannot be read."""
    start = text.find("<tool_call>")
    if start < 0:
        return text, []
    found = [_call(inner.strip()) for inner in _CALL.findall(text)]
    calls = [call for call in found if call is not None]
    readable = len(calls) == text.count("<tool_call>")
    return text[:start].rstrip("\n"), calls if readable else None


def given_calls(calls: list[dict[str, Any]]) -> list[Call]:
    """The `tool_calls` of a normalised message (`messages.conversation`)."""
    return [Call(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def same_calls(one: list[Call], other: list[Call]) -> bool:
    """Whether names and arguments agree, in order; where one side has no types, as texts."""
    if len(one) != len(other):
        return False
    for left, right in zip(one, other, strict=True):
        typed = left.typed and right.typed
        if left.name != right.name or _written(left, typed) != _written(right, typed):
            return False
    return True


def _call(inner: str) -> Call | None:
    if not inner.startswith("{"):
        name = inner.partition("<arg_key>")[0].strip()
        return Call(name, dict(_PAIR.findall(inner)), typed=False) if name else None
    try:
        value = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, arguments)


def _written(call: Call, typed: bool) -> dict[str, str]:
    return {
        key: value if not typed and isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in call.arguments.items()
    }
