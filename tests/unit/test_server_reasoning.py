"""Reasoning over HTTP: its own field, in the message and in deltas, and its own count."""

from typing import Any

import pytest

from dspark.testing import tiny_target
from tests.unit.served import (
    CHAT,
    MESSAGES,
    THINKING,
    answer,
    chunks_of,
    client_of,
    deltas_of,
    says,
    tokenizer_of,
)

BODY: dict[str, Any] = {"messages": MESSAGES}
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("sizes", [(1,), (2, 5), (40,)])
@pytest.mark.parametrize("special", [False, True])
def test_reasoning_has_a_field_and_a_count_of_its_own(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], special: bool
) -> None:
    tokenizer = tokenizer_of(THINKING, special=special)
    says(monkeypatch, tokenizer, "\nwhy é\n</think>\n\nso", sizes, "stop")
    with client_of(tiny_target(vocab_size=len(tokenizer)), None, tokenizer) as client:
        whole = answer(client, CHAT, BODY)
        chunks = chunks_of(client, CHAT, {**BODY, **USAGE})
        left = answer(client, CHAT, {**BODY, "separate_reasoning": False})
        closed = answer(client, CHAT, {**BODY, **CLOSED})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why é", "so")
    said = deltas_of(chunks)
    assert (said["reasoning_content"], said["content"]) == ("why é", "so")
    usage = whole["usage"]
    # break, w h y, space, two bytes, break, mark
    tokens = 8 + (1 if special else len("</think>"))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens
    assert usage["completion_tokens"] == tokens + 5
    assert chunks[-1]["usage"] == usage
    message = left["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (
        None,
        "\nwhy é\n</think>\n\nso",
    )
    assert left["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    # the prompt has closed it, so that a stray mark is text
    assert closed["choices"][0]["message"]["content"] == "\nwhy é\n</think>\n\nso"


def test_an_answer_may_open_its_reasoning_itself(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of()
    says(monkeypatch, tokenizer, "<think>a</think>b")
    with client_of(*pair, tokenizer) as client:
        whole = answer(client, CHAT, BODY)
        said = deltas_of(chunks_of(client, CHAT, BODY))
        text = answer(client, "/v1/completions", {"prompt": "a"})
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", "b")
    assert (said["reasoning_content"], said["content"]) == ("a", "b")
    assert text["choices"][0]["text"] == "<think>a</think>b", "a completion is plain text"


def test_a_user_who_ends_with_the_mark_opens_nothing(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    says(monkeypatch, tokenizer, "a</think>b")
    with client_of(*pair, tokenizer) as client:
        whole = answer(client, CHAT, {"messages": [{"role": "user", "content": "x<think>"}]})
    assert whole["choices"][0]["message"]["content"] == "a</think>b"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_the_draft_changes_neither_part(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(THINKING)
    body = {**BODY, **options, "max_tokens": 24, "ignore_eos": True}
    said = []
    for draft in (pair[1], None):
        with client_of(pair[0], draft, tokenizer) as client:
            whole = answer(client, CHAT, body)
            streamed = deltas_of(chunks_of(client, CHAT, body))
        message = whole["choices"][0]["message"]
        assert message["reasoning_content"] == streamed["reasoning_content"] != ""
        said.append((message, whole["usage"]["completion_tokens_details"]["reasoning_tokens"]))
    assert said[0] == said[1]
