"""Tools over HTTP: into the prompt through the model's template, and calls out of the answer."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dspark.testing import tiny_target
from tests.unit.served import (
    CHAT,
    MESSAGES,
    answer,
    chunks_of,
    client_of,
    deltas_of,
    refusal,
    says,
    tokenizer_of,
)

_HEAD = (
    "{% if tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
)
_TAIL = "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]"
QWEN = (
    _HEAD + "<tool_call>{{ c.function.name }}={{ c.function.arguments.a }}</tool_call>"
    "" + _TAIL + "{% endif %}"
)
LING = _HEAD + "<tool_call>{{ c.function.name }}<arg_key>" + _TAIL + "<think>{% endif %}"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
BODY: dict[str, Any] = {"messages": MESSAGES, "tools": [ADD]}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
PAIRS = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%d</arg_value>\n</tool_call>"


@pytest.fixture(scope="module")
def client(pair: tuple[Any, Any]) -> Iterator[httpx.Client]:
    with client_of(*pair, tokenizer_of(QWEN)) as http:
        yield http


@pytest.mark.parametrize("sizes", [(1,), (2, 7), (100,)])
def test_calls_come_out_whole_and_streamed(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    text = f"on it\n{HERMES % 1}\n{HERMES % 2}"
    says(monkeypatch, tokenizer_of(QWEN), text, sizes, "stop")
    choice = answer(client, CHAT, BODY)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "on it"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": f'{{"a": {n}}}'} for n in (1, 2)
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(call["type"] == "function" for call in message["tool_calls"])
    chunks = chunks_of(client, CHAT, BODY)
    said = deltas_of(chunks)
    assert said["content"] == "on it"
    assert said["finish_reason"] == "tool_calls"
    assert {
        index: (call["name"], call["arguments"]) for index, call in said["tool_calls"].items()
    } == {0: ("add", '{"a": 1}'), 1: ("add", '{"a": 2}')}
    assert all(call["id"] and call["type"] == "function" for call in said["tool_calls"].values())


def test_a_cut_output_and_text_that_is_no_call_have_their_usual_reasons(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, tokenizer_of(QWEN), HERMES % 1, reason="length")
    choice = answer(client, CHAT, BODY)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert len(choice["message"]["tool_calls"]) == 1
    text = HERMES.replace("add", "sub") % 1
    says(monkeypatch, tokenizer_of(QWEN), text, reason="stop")
    choice = answer(client, CHAT, BODY)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("size", [3, 100])
def test_tokens_of_a_call_are_told_once_and_while_it_is_read(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    text = f"on it\n{HERMES % 1}"
    says(monkeypatch, tokenizer_of(QWEN), text, (size,))
    chunks = chunks_of(client, CHAT, {**BODY, "dspark_tokens": True})
    counts = [chunk["dspark"]["num_tokens"] for chunk in chunks[:-1] if "dspark" in chunk]
    left = len(text) - 1
    assert counts == [1, *[size] * (left // size), left % size]
    said = deltas_of(chunks)
    assert (said["content"], said["tool_calls"][0]["name"]) == ("on it", "add")


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, {"tools": []}])
def test_without_tools_nothing_is_a_call(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    says(monkeypatch, tokenizer_of(QWEN), HERMES % 1)
    whole = answer(client, CHAT, {**BODY, **options, "return_token_ids": True})
    assert whole["choices"][0]["message"]["content"] == HERMES % 1
    assert tokenizer_of().decode(whole["prompt_token_ids"]) == "[user]hi[assistant]"


@pytest.mark.parametrize("special", [False, True])
def test_lings_form_inside_reasoning_that_is_not_closed(
    monkeypatch: pytest.MonkeyPatch, special: bool
) -> None:
    tokenizer = tokenizer_of(LING, special=special)
    says(monkeypatch, tokenizer, f"so\n{PAIRS % 3}", (3,), "stop")
    with client_of(tiny_target(vocab_size=len(tokenizer)), None, tokenizer) as http:
        whole = answer(http, CHAT, BODY)
        said = deltas_of(chunks_of(http, CHAT, BODY))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", None)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3}'}
    assert whole["choices"][0]["finish_reason"] == said["finish_reason"] == "tool_calls"
    assert said["tool_calls"][0]["arguments"] == '{"a": 3}'
    assert said["reasoning_content"] == "so"
    # s, o and the break before the call
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_tools_and_earlier_calls_stand_in_the_prompt(client: httpx.Client) -> None:
    called = {"id": "c1", "type": "function", "index": 0}
    body = {
        **BODY,
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**called, "function": {"name": "add", "arguments": '{"a": 7}'}}],
            },
            {"role": "tool", "content": "8", "tool_call_id": "c1"},
        ],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    prompt = tokenizer_of().decode(answer(client, CHAT, body)["prompt_token_ids"])
    head, _, rest = prompt.partition("[user]")
    assert json.loads(head) == ADD["function"]
    assert rest == "hi[assistant]<tool_call>add=7</tool_call>[tool]8[assistant]"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tools": [ADD, ADD]}, "tools", "same name"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "leave it out"),
        ({"tool_choice": "required"}, "tool_choice", "grammar"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    client: httpx.Client, options: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(client, CHAT, {**BODY, **options})
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', "[1]", "{"])
def test_arguments_of_an_earlier_call_are_json(client: httpx.Client, text: str) -> None:
    call = {"function": {"name": "add", "arguments": text}}
    messages = [*BODY["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    error = refusal(client, CHAT, {**BODY, "messages": messages})
    assert "must be the text of a JSON object" in error["message"]


def test_a_template_that_would_lose_tools_refuses_them(pair: tuple[Any, Any]) -> None:
    with client_of(*pair, tokenizer_of()) as http:
        assert "knows none" in refusal(http, CHAT, BODY)["message"]
        call = {"function": {"name": "add", "arguments": "{}"}}
        messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
        error = refusal(http, CHAT, {"messages": messages})
        assert error["param"] == "messages.1.tool_calls"
    with client_of(*pair, tokenizer_of("{{ tools }}[TOOL_CALLS]")) as http:
        assert "neither as" in refusal(http, CHAT, BODY)["message"]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_the_draft_changes_no_answer_with_tools(
    pair: tuple[Any, Any], client: httpx.Client, options: dict[str, Any]
) -> None:
    body = {**BODY, **options, "max_tokens": 24, "ignore_eos": True}
    with client_of(pair[0], None, tokenizer_of(QWEN)) as plain:
        one, other = (answer(http, CHAT, body) for http in (client, plain))
        assert one["choices"] == other["choices"]
        said, alone = (deltas_of(chunks_of(http, CHAT, body)) for http in (client, plain))
    assert said == alone
