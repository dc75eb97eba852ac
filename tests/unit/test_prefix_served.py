"""Reuse of prompts as a client sees it: counts, figures, flush and off switch."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dspark.errors import ConfigError
from dspark.serving.settings import ServeSettings
from dspark.target import base
from dspark.testing import tiny_draft, tiny_ling, tiny_tokenizer
from tests.unit.served import chunks_of, client_of

PROMPT = "b" * 70
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", 32)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    target = tiny_ling()
    return target, tiny_draft(target)


@pytest.fixture
def client(models: tuple[Any, Any]) -> Iterator[httpx.Client]:
    with client_of(*models, tiny_tokenizer()) as http:
        yield http


def complete(client: httpx.Client, prompt: str = PROMPT, **more: Any) -> tuple[str, int]:
    """Text, and how many tokens of the prompt were not read again."""
    whole = client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **more}).json()
    cached: int = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    return whole["choices"][0]["text"], cached


def test_what_was_reused_is_told_wherever_tokens_are_counted(client: httpx.Client) -> None:
    first = complete(client)
    assert first == (first[0], 0)
    assert complete(client) == (first[0], 64)
    # held apart from what is decoded without the draft
    assert complete(client, dspark_draft=False) == (first[0], 0)
    asked = {"prompt": PROMPT, **GREEDY, "stream": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(client, "/v1/completions", asked)
    assert {one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in chunks} == {64}
    native = {"text": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    for chunk in chunks_of(client, "/generate", {**native, "stream": True}):
        assert chunk["meta_info"]["cached_tokens"] == 64
    info = client.get("/server_info").json()
    assert info["prefix_reuse"] == {"limit_bytes": 1 << 30, "piece_tokens": 32}
    assert info["internal_states"][0]["cached_tokens"] == 3 * 64
    metrics = client.get("/metrics").text
    assert f"\ndspark:cached_tokens_total {3 * 64}.0" in metrics
    assert f"\nsglang:cached_tokens_total {3 * 64}.0" in metrics


def test_a_flush_forgets_earlier_prompts(client: httpx.Client) -> None:
    text = complete(client)[0]
    assert complete(client) == (text, 64)
    assert client.get("/server_info").json()["internal_states"][0]["cached_tokens"] == 64
    assert "no earlier prompt" in client.post("/flush_cache").text
    assert complete(client) == (text, 0)
    assert client.get("/server_info").json()["internal_states"][0]["cached_tokens"] == 0
    assert complete(client) == (text, 64)


def test_it_can_be_turned_off(models: tuple[Any, Any], client: httpx.Client) -> None:
    text = complete(client)[0]
    settings = ServeSettings(prefix_cache_bytes=0)
    with client_of(*models, tiny_tokenizer(), settings) as http:
        assert [complete(http) for _ in range(2)] == [(text, 0)] * 2
        assert http.get("/server_info").json()["prefix_reuse"]["limit_bytes"] == 0
        assert http.post("/flush_cache").status_code == 200
    with pytest.raises(ConfigError, match=r"serve\.prefix_cache_bytes must be >= 0, got -1"):
        ServeSettings(prefix_cache_bytes=-1)
