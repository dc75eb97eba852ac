"""Client of one server: streams requests, times their chunks, reads the server's own figures."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from dspark.bench.serving_report import RequestTiming
from dspark.errors import ConfigError, RunError

__all__ = ["Client", "Prompt", "connect"]

Prompt = str | list[int] | list[dict[str, Any]]
"""A text or ids for /v1/completions, or messages for /v1/chat/completions."""

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@asynccontextmanager
async def connect(
    address: str, *, concurrency: int = 1, model: str | None = None, api_key: str | None = None
) -> AsyncIterator["Client"]:
    """A client of the server at ``address``, which must answer.

    Raises:
        ConfigError: ``address`` is none.
        RunError: nothing answers there, now or later, or it names no model.
    """
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address '{address}' must begin with http://, as in http://{address}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # one connection a slot stays open: connection set-up is no part of a token's time
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    try:
        async with httpx.AsyncClient(
            # OpenAI's clients are given the address with /v1
            base_url=address.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=_TIMEOUT,
            limits=limits,
        ) as http:
            client = Client(http, model or await _first_model(http))
            client.by_chunk = await client.info() is not None
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunError(
            f"no answer from {address} ({type(error).__name__}: {error}); start a server with "
            "`dspark serve` and give its address"
        ) from error


async def _first_model(http: httpx.AsyncClient) -> str:
    response = await http.get("/v1/models")
    try:
        name: str = response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RunError(
            f"{response.url} names no model ({response.status_code}: {_problem(response)})"
        ) from error
    return name


class Client:
    """Sends requests to one server and times them."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self.model = model
        self.by_chunk = False
        """The server can tell its token count in every chunk (ours and SGLang)."""

    async def info(self) -> dict[str, Any] | None:
        """/server_info, or None where there is no such thing."""
        response = await self._http.get("/server_info")
        if response.status_code != 200:
            return None
        try:
            body = response.json()
        except ValueError:
            return None
        return body if isinstance(body, dict) and "internal_states" in body else None

    async def flush(self) -> bool:
        """Let the server's figures start anew; False if it cannot."""
        return (await self._http.post("/flush_cache")).status_code == 200

    async def send(self, prompt: Prompt, options: dict[str, Any]) -> RequestTiming:
        """Stream one request; a failure is noted in the timing."""
        body = {**options, "model": self.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.by_chunk:
            body["stream_options"]["continuous_usage_stats"] = True
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            path, body["messages"] = "/v1/chat/completions", prompt
        else:
            path, body["prompt"] = "/v1/completions", prompt
        timing = RequestTiming(started=time.perf_counter())
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    timing.error = f"{response.status_code}: {_problem(response)}"
                else:
                    await _read(response, timing)
        except httpx.HTTPError as error:
            timing.error = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError, IndexError) as error:
            timing.error = f"an event of the stream is none of OpenAI's ({error})"
        if timing.error is None and not timing.num_output_tokens:
            timing.error = "the stream ended without a token count"
        return timing


async def _read(response: httpx.Response, timing: RequestTiming) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        now = time.perf_counter()
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            timing.error = str(chunk["error"].get("message", chunk["error"]))
            return
        usage = chunk.get("usage") or {}
        if usage:
            timing.num_prompt_tokens = usage["prompt_tokens"]
            timing.num_output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            timing.num_cached_tokens = details.get("cached_tokens", timing.num_cached_tokens)
        if not chunk["choices"]:
            continue
        choice = chunk["choices"][0]
        timing.ended = now
        delta = choice.get("delta") or {}
        new = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if new or delta.get("tool_calls"):
            timing.chunks.append((now, usage.get("completion_tokens")))
            timing.text += new or ""
        if choice.get("finish_reason") is not None:
            timing.figures = chunk.get("dspark") or {}


def _problem(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
