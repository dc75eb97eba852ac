"""Calls of tools in an answer's text, in the two forms that open chat templates write.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen, Hermes) and
`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>` (Ling, GLM).

A reader looks at the text behind one opening mark as it grows and never reads a letter twice. It
gives up at the first one that no call can have: a mark that is only talked about is text again
within a few letters.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "MARKS",
    "OPEN_CALL",
    "Call",
    "CallReader",
    "JsonReader",
    "PairReader",
    "Verdict",
    "reader_of",
]

OPEN_CALL, _CLOSE_CALL = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
MARKS = (OPEN_CALL, _CLOSE_CALL, _KEY, _END_KEY, _VALUE, _END_VALUE)

Tools = Mapping[str, Mapping[str, Any]]
"""Parameters of each tool, as JSON schema, by its name."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``call`` is None where the text is no call; else it ends before letter ``end``."""

    call: Call | None
    end: int = 0


NO_CALL = Verdict(None)


class CallReader(Protocol):
    """Reads one call."""

    def scan(self, text: str) -> Verdict | None:
        """``text``: all that stands behind the opening mark so far. None: more is needed."""

    def finish(self) -> Call | None:
        """The call, where no more text is to come and nothing but the closing mark is missing."""


def reader_of(template: str) -> Callable[[Tools], CallReader] | None:
    """The form in which a chat template writes calls; None: none of the two."""
    if _KEY in template:
        return PairReader
    # `<function=` is a third form between the same marks
    if OPEN_CALL in template and "<function=" not in template:
        return JsonReader
    return None


class JsonReader:
    """`{"name": …, "arguments": {…}}`."""

    _PLAIN = re.compile(r"[\s\w+\-.,:]*")
    _MARK = re.compile(r'["\\]')

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._at = self._depth = 0
        self._quoted = False
        self._call: Call | None = None

    def scan(self, text: str) -> Verdict | None:
        while self._call is None:
            if self._quoted:
                mark = self._MARK.search(text, self._at)
                if mark is None:
                    self._at = len(text)
                    return None
                if mark[0] == "\\":
                    if mark.end() == len(text):
                        self._at = mark.start()
                        return None
                    self._at = mark.end() + 1
                else:
                    self._quoted, self._at = False, mark.end()
                continue
            plain = self._PLAIN.match(text, self._at)
            assert plain is not None, "the pattern matches nothing at least"
            if not self._depth and plain[0].strip():
                return NO_CALL
            self._at = plain.end()
            if self._at == len(text):
                return None
            letter = text[self._at]
            if letter not in '{}[]"' or (not self._depth and letter != "{"):
                return NO_CALL
            self._at += 1
            self._quoted = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth and letter in "}]":
                self._call = self._read(text[: self._at])
                if self._call is None:
                    return NO_CALL
        rest = text[self._at :].lstrip()
        if rest.startswith(_CLOSE_CALL):
            return Verdict(self._call, len(text) - len(rest) + len(_CLOSE_CALL))
        return None if _CLOSE_CALL.startswith(rest) else NO_CALL

    def finish(self) -> Call | None:
        return self._call

    def _read(self, text: str) -> Call | None:
        body = _json(text)
        name = body.get("name") if isinstance(body, dict) else None
        if not isinstance(name, str) or name not in self._tools:
            return None
        given = body.get("arguments", body.get("parameters"))
        # some models write the object as a text
        given = _json(given) if isinstance(given, str) else given
        return _call(name, {} if given is None else given)


class PairReader:
    """`name<arg_key>k</arg_key><arg_value>v</arg_value>…`.

    Texts stand as they are and everything else as JSON, so that only the tool's schema tells 3
    from "3". What should be JSON and is none is taken as text.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._at = self._seen = 0
        self._name = self._key = ""
        self._pairs: dict[str, Any] = {}
        self._stage: Callable[[str], Verdict | bool] = self._named

    def scan(self, text: str) -> Verdict | None:
        while (found := self._stage(text)) is True:
            pass
        self._seen = len(text)
        return found or None

    def finish(self) -> Call | None:
        return None

    # Each stage: True goes on with the next one, False waits for more text.

    def _named(self, text: str) -> Verdict | bool:
        end = text.find("<")
        name = text[: end if end >= 0 else len(text)].strip()
        if end < 0:
            return False if any(one.startswith(name) for one in self._tools) else NO_CALL
        if name not in self._tools:
            return NO_CALL
        self._name, self._at, self._stage = name, end, self._keyed
        return True

    def _keyed(self, text: str) -> Verdict | bool:
        mark = self._expect(text, _KEY, _CLOSE_CALL)
        if not isinstance(mark, str):
            return mark
        if mark == _KEY:
            self._stage = self._key_ended
            return True
        call = _call(self._name, self._pairs)
        return Verdict(call, self._at) if call is not None else NO_CALL

    def _key_ended(self, text: str) -> Verdict | bool:
        key = self._until(text, _END_KEY)
        if key is None:
            return False
        self._key, self._stage = key.strip(), self._valued
        return True

    def _valued(self, text: str) -> Verdict | bool:
        mark = self._expect(text, _VALUE)
        if not isinstance(mark, str):
            return mark
        self._stage = self._value_ended
        return True

    def _value_ended(self, text: str) -> Verdict | bool:
        value = self._until(text, _END_VALUE)
        if value is None:
            return False
        schemas = self._tools[self._name].get("properties")
        schema = schemas.get(self._key) if isinstance(schemas, dict) else None
        self._pairs[self._key] = _value(value, schema)
        self._stage = self._keyed
        return True

    def _expect(self, text: str, *marks: str) -> str | Verdict | bool:
        rest = text[self._at :].lstrip()
        for mark in marks:
            if rest.startswith(mark):
                self._at = len(text) - len(rest) + len(mark)
                return mark
        return NO_CALL if not any(mark.startswith(rest) for mark in marks) else False

    def _until(self, text: str, mark: str) -> str | None:
        end = text.find(mark, max(self._at, self._seen - len(mark)))
        if end < 0:
            return None
        found, self._at = text[self._at : end], end + len(mark)
        return found


def _value(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    value = _json(text)
    return text if value is _NOTHING else value


def _kinds(schema: Any) -> set[str]:
    """JSON types that a schema allows, as far as it says so plainly."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else []:
            # one level: a schema may name itself
            kinds |= _kinds({"type": option.get("type")}) if isinstance(option, dict) else set()
    choices = schema.get("enum")
    if isinstance(choices, list) and any(isinstance(one, str) for one in choices):
        kinds.add("string")
    return kinds


_NOTHING = object()


def _json(text: str) -> Any:
    """The value, or `_NOTHING`."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _call(name: str, arguments: Any) -> Call | None:
    if not isinstance(arguments, dict):
        return None
    try:
        # 1e999 is read as infinity, which is no JSON
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # a lone surrogate is JSON, but no text that can be sent
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            text = json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    return Call(name, text)
