"""The request surface: everything is understood, neutral, or refused by name."""

import contextlib
import json
import random
from typing import Any

import pytest

from dspark.serving.options import NEUTRAL_VALUES
from dspark.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    parse,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**options: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": MESSAGES, **options}).encode())


def refusal(model: Any, body: Any) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(model, raw)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 10}),
        ("echo", True),
        ("min_tokens", 3),
        ("reasoning_effort", "high"),
        ("store", True),
    ],
)
def test_an_unsupported_option_is_refused_by_its_name(name: str, value: Any) -> None:
    error = refusal(ChatRequest, {"messages": MESSAGES, name: value})
    assert error.param == name
    assert error.code == "unsupported_parameter"
    assert f"'{name}'" in error.message


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("suffix", "end")])
def test_an_unsupported_completion_option_is_refused(name: str, value: Any) -> None:
    assert refusal(CompletionRequest, {"prompt": "a", name: value}).param == name


def test_neutral_values_of_unsupported_options_are_accepted() -> None:
    for model, body in (
        (ChatRequest, {"messages": MESSAGES}),
        (CompletionRequest, {"prompt": "a"}),
        (GenerateRequest, {"text": "a"}),
    ):
        for name, values in NEUTRAL_VALUES[model.__name__].items():
            for value in (None, *values):
                parse(model, json.dumps({**body, name: value}).encode())  # type: ignore[type-var]


def test_null_means_not_given() -> None:
    request = chat(temperature=None, max_tokens=None, stop=None, stream_options=None, seed=None)
    assert request == chat()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("tool", "tools")],
)
def test_an_unknown_key_names_the_nearest_known_one(name: str, nearest: str) -> None:
    error = refusal(ChatRequest, {"messages": MESSAGES, name: 1})
    assert error.code == "unknown_parameter"
    assert f"'{name}' (did you mean '{nearest}'?)" in error.message


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ('{"messages": [], "seed": 1, "seed": 1}', "seed"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"se\\u0065d": 1, "seed": 2}', "seed"),
        ('{"chat_template_kwargs": {"a": 1, "b": [{"c": 0, "c": null}]}}', "c"),
    ],
)
def test_a_key_that_comes_twice_is_refused(raw: str, name: str) -> None:
    with pytest.raises(ApiError, match=f"has '{name}' twice in one object") as caught:
        parse(ChatRequest, raw.encode())
    assert (caught.value.status, caught.value.param) == (400, name)


def test_unknown_keys_are_found_in_nested_objects_too() -> None:
    options = {"include_usge": True}
    error = refusal(ChatRequest, {"messages": MESSAGES, "stream_options": options})
    assert error.param == "stream_options.include_usge"
    assert "include_usage" in error.message
    message = {"role": "user", "contents": "x"}
    assert refusal(ChatRequest, {"messages": [message]}).param == "messages.0.contents"
    body = {"text": "a", "sampling_params": {"max_tokens": 3}}
    assert "max_new_tokens" in refusal(GenerateRequest, body).message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 5e-324),
        ("temperature", 9e-7),
        ("top_p", 0),
        ("top_p", 5e-324),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.5),
        ("max_completion_tokens", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", 3),
        ("stop", [1]),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("messages", []),
        ("messages", "hi"),
        ("chat_template_kwargs", []),
        ("model", 3),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_option_and_the_value(
    name: str, value: Any
) -> None:
    error = refusal(ChatRequest, {"messages": MESSAGES, name: value})
    assert error.param == name
    assert f"(got {json.dumps(value)})" in error.message
    # the library's own words are about Python's objects
    assert error.message.startswith(f"'{name}' ")
    assert not any(word in error.message for word in ("nput should", "valid", "instance"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-6),
        ("temperature", 2.0),
        ("top_p", 1e-6),
        ("top_p", 1),
        ("top_p", 0.01),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 1),
        ("min_p", 0),
        ("max_tokens", 1),
        ("seed", 2**63 - 1),
        ("stop", []),
        ("stop", ["a", "b", "c", "d"]),
    ],
)
def test_the_ends_of_the_ranges_are_accepted(name: str, value: Any) -> None:
    assert getattr(chat(**{name: value}), name) == value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    refusal(ChatRequest, raw)


@pytest.mark.parametrize(
    "message",
    [
        {},
        3,
        None,
        {"role": "user"},
        {"content": "a"},
        {"role": "function", "content": "a"},
        {"role": "user", "content": "a", "tool_call_id": "1"},
        {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "user", "content": None},
        {"role": "user", "content": 3},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["a"]},
        {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]},
    ],
)
def test_a_message_that_cannot_be_read_is_refused(message: Any) -> None:
    error = refusal(ChatRequest, {"messages": [*MESSAGES, message]})
    assert error.param is not None
    assert error.param.startswith("messages.1")


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is required"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools.0.type", "is required"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
            "must match",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools.0.function.strict",
            "not supported",
        ),
        ({"tool_choice": "required"}, "tool_choice", "bound to a grammar"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "bound to a grammar"),
        ({"tool_choice": "any"}, "tool_choice", "'auto' or 'none'"),
    ],
)
def test_tools_that_cannot_be_served_are_refused(
    options: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(ChatRequest, {"messages": MESSAGES, **options})
    assert error.param == param
    assert words in error.message


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert request.messages[0].content == "a\nb"


@pytest.mark.parametrize(
    ("given", "read"),
    [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[3]], [3]), ("", ""), ([], [])],
)
def test_a_prompt_is_a_text_or_ids(given: Any, read: Any) -> None:
    body = json.dumps({"prompt": given}).encode()
    assert parse(CompletionRequest, body).prompt == read


@pytest.mark.parametrize("given", [None, 3, ["a", "b"], [[1], [2]], [1.5], [True], [None], {}])
def test_any_other_prompt_is_refused(given: Any) -> None:
    assert refusal(CompletionRequest, {"prompt": given}).param == "prompt"


def test_the_body_of_the_sglang_benchmark_is_understood() -> None:
    body = {
        "text": "a b c",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    request = parse(GenerateRequest, json.dumps(body).encode())
    assert request.sampling_params.max_new_tokens == 16


@pytest.mark.slow
def test_random_bodies_are_read_or_refused_and_never_anything_else() -> None:
    rng = random.Random(0)
    names = [*ChatRequest.model_fields, *NEUTRAL_VALUES["ChatRequest"], "prompt", "text", "x"]
    values: list[Any] = [None, True, 0, -1, 1e308, "", "é", [], {}, [[]], [{}], {"type": "text"}]

    def anything(depth: int) -> Any:
        kind = rng.randrange(4 if depth else 2)
        if kind < 2:
            return rng.choice(values)
        if kind == 2:
            return [anything(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(names): anything(depth - 1) for _ in range(rng.randrange(3))}

    for _ in range(3000):
        body = {rng.choice(names): anything(3) for _ in range(rng.randrange(6))}
        if rng.random() < 0.5:
            body["messages"] = MESSAGES
        raw = json.dumps(body).encode()
        if rng.random() < 0.1:
            raw = raw[: rng.randrange(len(raw) + 1)]
        for model in (ChatRequest, CompletionRequest, GenerateRequest):
            with contextlib.suppress(ApiError):
                parse(model, raw)  # type: ignore[type-var]
