"""Bodies that no client should send: each gets an error in OpenAI's shape, and at once."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_draft, tiny_target
from tests.unit.served import CHAT, MESSAGES, answer, client_of, tokenizer_of

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "ab"},
    "/generate": {"text": "ab"},
}
TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if mode %}{{ mode | tojson }}{% endif %}"
)
LIMIT = 1_000_000


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    target = tiny_target()
    settings = ServeSettings(max_body_bytes=LIMIT, max_output_tokens=100)
    with client_of(target, tiny_draft(target), tokenizer_of(TOOLS), settings) as http:
        yield http
        # whatever came, the server goes on
        assert answer(http, CHAT, {"messages": MESSAGES, "max_tokens": 2})["choices"]


def refused(client: httpx.Client, path: str, raw: Any, status: int = 400) -> dict[str, Any]:
    begun = time.monotonic()
    response = client.post(path, content=raw)
    assert time.monotonic() - begun < 5
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 1000
    return error


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_50_mb_is_turned_away_with_both_numbers(client: httpx.Client, path: str) -> None:
    size = 50_000_000
    said = refused(client, path, b"x" * size, 413)["message"]
    assert str(size) in said
    assert str(LIMIT) in said
    parts = (b"x" * 100_000 for _ in range(500))
    assert str(LIMIT) in refused(client, path, parts, 413)["message"]


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b"\x00" * 1000,
        b"[" * 900_000,
        b'{"a":' * 150_000,
        b'{"seed": NaN}',
        b'{"seed": -Infinity}',
        b'{"seed": ' + b"9" * 100_000 + b"}",
    ],
    ids=["utf8", "surrogate", "zeros", "lists", "objects", "nan", "infinity", "digits"],
)
def test_what_is_no_json_is_refused(client: httpx.Client, path: str, raw: bytes) -> None:
    assert "not valid JSON" in refused(client, path, raw)["message"]


@pytest.mark.parametrize("depth", [300, 990, 5000])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_deep_json_is_refused_wherever_it_stands(
    client: httpx.Client, depth: int, kind: str
) -> None:
    opening, closing = ("[", "]") if kind == "list" else ('{"a":', "}")
    deep = opening * depth + "0" + closing * depth
    for path, body in BODIES.items():
        for name in ("stop", "seed", "messages", "prompt", "text", "input_ids", "tools", "none"):
            raw = json.dumps({**body, name: "DEEP"}).replace('"DEEP"', deep)
            refused(client, path, raw)
    for name in ("mode", "none"):
        raw = json.dumps(
            {**BODIES[CHAT], "chat_template_kwargs": {name: "DEEP"}, "max_tokens": 101}
        )
        refused(client, CHAT, raw.replace('"DEEP"', deep))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": "DEEP"}}}
    raw = json.dumps({**BODIES[CHAT], "tools": [tool], "max_tokens": 101}).replace('"DEEP"', deep)
    refused(client, CHAT, raw)


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_what_is_too_deep_for_the_template_is_named(client: httpx.Client, name: str) -> None:
    deep = "[" * 700 + "]" * 700
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": "DEEP"}}}
    given: Any = [tool] if name == "tools" else {"mode": "DEEP"}
    raw = json.dumps({**BODIES[CHAT], name: given}).replace('"DEEP"', deep)
    error = refused(client, CHAT, raw)
    depth = 700 + (4 if name == "tools" else 1)
    assert error["param"] == name
    assert error["message"] == f"'{name}' is nested {depth} deep, too deeply for the chat template"


def in_place(path: str, name: str, value: Any) -> dict[str, Any]:
    """The body with this option, by the name that the route has for it."""
    if path != "/generate":
        return {**BODIES[path], name: value}
    native = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    return {**BODIES[path], "sampling_params": {native.get(name, name): value}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1, ["-1", "0"]),
        ("temperature", 1e308, ["1e+308", "2"]),
        ("top_p", -0.5, ["-0.5", "1e-06"]),
        ("top_p", 2**70, [str(2**70), "1"]),
        ("min_p", -1e300, ["-1e+300", "0"]),
        ("top_k", -2, ["-2", "-1"]),
        ("seed", -1, ["-1", "0"]),
        ("seed", 2**70, [str(2**70), str(2**63 - 1)]),
        ("max_tokens", 0, ["0", "1"]),
        ("max_tokens", -5, ["-5", "1"]),
        ("max_tokens", 2**70, [str(2**70), "100"]),
        ("stop_token_ids", [-1], ["-1"]),
        ("stop_token_ids", [2**70], [str(2**70)]),
        ("stream_interval", -1, ["-1", "1"]),
        ("stop", ["x"] * 10_000, ["10000", "4"]),
        ("stop", [str(number) for number in range(10_000)], ["10000", "4"]),
    ],
)
def test_numbers_out_of_range_are_refused_with_both_numbers(
    client: httpx.Client, path: str, name: str, value: Any, words: list[str]
) -> None:
    error = refused(client, path, json.dumps(in_place(path, name, value)))
    assert name in (error["param"] or "") or name in ("max_tokens", "seed"), error
    for word in words:
        assert word in error["message"], error


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_over_the_context_is_refused_with_both_numbers(
    client: httpx.Client, path: str
) -> None:
    text = "a" * 900_000
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {}
    error = refused(client, path, json.dumps(body or {next(iter(BODIES[path])): text}))
    assert error["code"] == "context_length_exceeded"
    assert "900000" in error["message"]
    assert "512" in error["message"]


def test_an_unknown_model_is_a_404_whatever_its_name(client: httpx.Client) -> None:
    for name in ("gpt-4", "", "../../etc/passwd", "x" * 100_000, "\u2028\x00"):
        for path in (CHAT, "/v1/completions", "/tokenize"):
            body = {"prompt": "a"} if path != CHAT else BODIES[CHAT]
            error = refused(client, path, json.dumps({**body, "model": name}), 404)
            assert error["code"] == "model_not_found"


def test_leaving_in_the_middle_of_a_body_is_no_error_of_the_server(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
            connection.sendall(head + b'{"text": ')
            time.sleep(0.05)
    time.sleep(0.1)
    assert client.get("/health").status_code == 200
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
