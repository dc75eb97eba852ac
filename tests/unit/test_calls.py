"""Calls of tools: both written forms, what is none stays text, the same in any pieces."""

import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dspark.serving.answer import Answer, AnswerParser, gather
from dspark.serving.calls import (
    Call,
    CallReader,
    JsonReader,
    PairReader,
    reader_of,
)

TOOLS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"a": {"type": "number"}, "b": {"type": ["integer", "null"]}}},
    "say": {
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tone": {"enum": ["3", "4"]},
            "list": {"type": "array"},
        }
    },
    "now": {},
}
Reader = Callable[[Any], CallReader]


def pair(name: str, **arguments: str) -> str:
    pairs = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}\n</tool_call>"


def call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def hermes(body: Any) -> str:
    return f"<tool_call>\n{body if isinstance(body, str) else json.dumps(body)}\n</tool_call>"


ADD = hermes({"name": "add", "arguments": {"a": 1}})
CASES: list[tuple[Reader, str, Answer]] = [
    (JsonReader, ADD, Answer("", "", (call("add", a=1),))),
    (JsonReader, f"on it\n{ADD}\n{ADD}\n", Answer("on it", "", (call("add", a=1),) * 2)),
    (JsonReader, f"{ADD}\ndone\n", Answer("done\n", "", (call("add", a=1),))),
    (JsonReader, hermes({"name": "now"}), Answer("", "", (call("now"),))),
    (JsonReader, hermes({"name": "now", "parameters": {}}), Answer("", "", (call("now"),))),
    (JsonReader, hermes({"name": "now", "arguments": None}), Answer("", "", (call("now"),))),
    (
        JsonReader,
        hermes({"name": "say", "arguments": '{"text": "x"}'}),
        Answer("", "", (call("say", text="x"),)),
    ),
    # the closing mark, a brace and an escaped quote inside a text
    (
        JsonReader,
        hermes({"name": "say", "arguments": {"text": 'a</tool_call>}"\\'}}),
        Answer("", "", (call("say", text='a</tool_call>}"\\'),)),
    ),
    # no closing mark at the end of the output
    (JsonReader, ADD[: -len("</tool_call>")], Answer("", "", (call("add", a=1),))),
    (JsonReader, ADD[:-3], Answer("", "", (call("add", a=1),))),
    (PairReader, pair("now"), Answer("", "", (call("now"),))),
    (PairReader, "<tool_call>now</tool_call>", Answer("", "", (call("now"),))),
    (
        PairReader,
        "a\n" + pair("add", a="1", b="null") + "\n" + pair("add", a="x"),
        Answer("a", "", (call("add", a=1, b=None), call("add", a="x"))),
    ),
    (
        PairReader,
        pair("say", text="1\n</tool_call>{", maybe="null", tone="3", list='["é"]', new="2"),
        Answer(
            "",
            "",
            (call("say", text="1\n</tool_call>{", maybe=None, tone="3", list=["é"], new=2),),
        ),
    ),
]

NO_CALLS: list[tuple[Reader, str]] = [
    (JsonReader, "use <tool_call> to call"),
    (JsonReader, "<tool_call>"),
    (JsonReader, "<tool_call>{}</tool_call>"),
    (JsonReader, "<tool_call>[1]</tool_call>"),
    (JsonReader, "<tool_call>\n{'name': 'now'}\n</tool_call>"),
    (JsonReader, hermes({"name": "other", "arguments": {}})),
    (JsonReader, hermes({"name": ["now"], "arguments": {}})),
    (JsonReader, hermes({"name": "now", "arguments": [1]})),
    (JsonReader, hermes({"name": "now", "arguments": "x"})),
    (JsonReader, hermes('{"name": "now", "arguments": {"a": NaN}}')),
    (JsonReader, hermes('{"name": "now", "arguments": {"a": 1e999}}')),
    (JsonReader, hermes('{"name": "now"} and more')),
    (JsonReader, hermes('{"name": "now", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}")),
    (JsonReader, '<tool_call>{"name": "now", "argu'),
    (PairReader, "<tool_call>other</tool_call>"),
    (PairReader, "<tool_call>now"),
    (PairReader, "<tool_call>now <b>"),
    (PairReader, "<tool_call>now<arg_key>a</arg_key>1</tool_call>"),
    (PairReader, "<tool_call>now<arg_key>a</arg_key><arg_value>1</tool_call>"),
    (PairReader, "<tool_call>now<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>"),
    (PairReader, '<tool_call>{"name": "now"}</tool_call>'),
]


def read(reader: Reader, pieces: list[str], *, opened: bool = False) -> Answer:
    parser = AnswerParser(opened=opened, calls=partial(reader, TOOLS))
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    assert all((part.kind == "call") == (part.call is not None) for part in parts)
    assert all(part.text or part.call for part in parts)
    return gather(parts)


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(12)))
    return [text[one:other] for one, other in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize(("reader", "text", "wanted"), CASES)
def test_a_call_is_read_however_it_arrives(reader: Reader, text: str, wanted: Answer) -> None:
    assert read(reader, list(text)) == wanted
    for at in range(len(text) + 1):
        assert read(reader, [text[:at], text[at:]]) == wanted, at


@pytest.mark.parametrize(("reader", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(reader: Reader, text: str) -> None:
    places = range(len(text) + 1) if len(text) < 200 else (1, 40, 5000, len(text) - 1)
    assert read(reader, list(text)) == Answer(text, "")
    for at in places:
        assert read(reader, [text[:at], text[at:]]) == Answer(text, ""), at


def test_a_call_behind_one_that_is_none_is_found() -> None:
    bad = "<tool_call>{'name'}</tool_call>"
    assert read(JsonReader, [f"{bad}\n{ADD}"]) == Answer(bad, "", (call("add", a=1),))
    inner = f"say <tool_call>{ADD}"
    assert read(JsonReader, [inner]) == Answer("say <tool_call>", "", (call("add", a=1),))


@pytest.mark.parametrize("reader", [JsonReader, PairReader])
def test_a_call_inside_reasoning_that_was_not_closed_is_found(reader: Reader) -> None:
    one = ADD if reader is JsonReader else pair("add", a="1")
    for text in (f"so\n{one}", f"<think>so\n{one}"):
        for at in range(len(text) + 1):
            wanted = Answer("", "so", (call("add", a=1),))
            assert read(reader, [text[:at], text[at:]], opened=True) == wanted
    # closed behind the call
    assert read(reader, [f"so\n{one}\nmore\n</think>\nend"], opened=True) == Answer(
        "end", "somore", (call("add", a=1),)
    )
    # only talked about
    assert read(reader, ["so <tool_call>\n</think>x"], opened=True) == Answer("x", "so <tool_call>")


def test_a_lone_surrogate_can_be_sent() -> None:
    text = hermes('{"name": "now", "arguments": {"a": "\\ud800"}}')
    (found,) = read(JsonReader, [text]).calls
    found.arguments.encode()
    assert json.loads(found.arguments) == {"a": "\ud800"}


@pytest.mark.parametrize("reader", [JsonReader, PairReader])
def test_random_texts_are_read_alike_in_any_pieces(reader: Reader) -> None:
    rng = random.Random(0)
    bits = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", "x", "<", "now"]
    bits += ['{"name": "now"', "}", '"', "\\", '"arguments": {', "{", ", ", ADD]
    bits += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", pair("now", a="1")]
    for _ in range(400):
        text = "".join(rng.choices(bits, k=rng.randrange(1, 14)))
        opened = rng.random() < 0.5
        wanted = read(reader, [text], opened=opened)
        for pieces in (list(text), *(cut(text, rng) for _ in range(4))):
            assert read(reader, pieces, opened=opened) == wanted, (text, pieces)


def test_the_form_is_the_templates_own() -> None:
    assert reader_of("… <tool_call>{name}</tool_call> …") is JsonReader
    assert reader_of("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>") is PairReader
    assert reader_of("<tool_call><function={{ name }}>") is None
    assert reader_of("[TOOL_CALLS]") is None
