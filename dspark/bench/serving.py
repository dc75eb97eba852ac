"""Latency and throughput of a running server, under the definitions of `sglang.bench_serving`.

For request i: s start just before the POST, f first chunk with text, e last chunk, n output tokens
(the server's count).

- TTFT: f - s; HTTP, queue and prefill are inside. E2E: e - s.
- TPOT: (e - f) / (n - 1) of requests with n > 1; mean and median over requests, unweighted.
- ITL: gap between two chunks, split evenly over the tokens of the later one.
- Output throughput: sum of n over the wall time, from the first POST until the server's own
  figures are read. Total throughput: prompt tokens too.
- Peak: most tokens in a one-second bucket; buckets are anchored at the first start.
- Concurrency: sum of E2E over the wall time.
- Accept length: tokens a verify step emits, the target's own included, since the last flush. This
  client flushes after its warm-up request, so that is this run.
- Step: one propose, verify, commit step as the server measured it, not TPOT times accept length.
- Ceiling: (proposals of a step + 1) / mean step. No figure of a run can lie above it.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from dspark.bench.serving_report import RequestTiming, ServingReport, summarise
from dspark.errors import ConfigError, RunError
from dspark.progress import Bar

__all__ = ["Prompt", "measure"]

Prompt = str | list[dict[str, Any]]
"""A text for /v1/completions, or messages for /v1/chat/completions."""

_WARM_UP_TOKENS = 32
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


def measure(
    address: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 256,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    model: str | None = None,
    api_key: str | None = None,
) -> ServingReport:
    """Send every prompt once, ``concurrency`` at a time, and report.

    ``address`` like http://127.0.0.1:8000; any OpenAI-compatible server. The accept histogram, the
    step time and the ceiling need ours.

    Raises:
        ConfigError: no prompts, or an argument out of range.
        RunError: nothing answers there, every request fails, the server's token counts disagree
            with the client's, or a figure lies above the ceiling.
    """
    if not prompts:
        raise ConfigError("bench serving needs at least one prompt")
    for name, value in (("max-tokens", max_tokens), ("concurrency", concurrency)):
        if value < 1:
            raise ConfigError(f"--{name} must be >= 1, got {value}")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address '{address}' must begin with http://, as in http://{address}")
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    if seed is not None:
        options["seed"] = seed
    if ignore_eos:
        options["ignore_eos"] = True
    return asyncio.run(_measure(address, prompts, options, concurrency, model, api_key))


async def _measure(
    address: str,
    prompts: Sequence[Prompt],
    options: dict[str, Any],
    concurrency: int,
    model: str | None,
    api_key: str | None,
) -> ServingReport:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # one connection a slot stays open: connection set-up is no part of a token's time
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    try:
        async with httpx.AsyncClient(
            base_url=address, headers=headers, timeout=_TIMEOUT, limits=limits
        ) as http:
            client = _Client(http, model or await _first_model(http), options)
            client.by_chunk = await client.info() is not None
            return await _run(client, prompts, concurrency)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunError(
            f"no answer from {address} ({type(error).__name__}: {error}); start a server with "
            "`dspark serve` and give its address"
        ) from error


async def _run(client: "_Client", prompts: Sequence[Prompt], concurrency: int) -> ServingReport:
    short = min(client.options["max_tokens"], _WARM_UP_TOKENS)
    warm_up = await client.send(prompts[0], max_tokens=short)
    if warm_up.error is not None:
        # the server does not want what this client was told to send
        kind = ConfigError if warm_up.error.startswith("400:") else RunError
        raise kind(f"the warm-up request failed: {warm_up.error}")
    flushed = await client.flush()
    slots = asyncio.Semaphore(concurrency)
    with Bar("requests", len(prompts)) as bar:

        async def one(prompt: Prompt) -> RequestTiming:
            async with slots:
                timing = await client.send(prompt)
            bar.advance()
            return timing

        begun = time.perf_counter()
        timings = await asyncio.gather(*(one(prompt) for prompt in prompts))
        info = await client.info()
        wall_s = time.perf_counter() - begun
    if flushed:
        _check_counts(timings, info)
    return summarise(timings, wall_s, model=client.model, info=info)


def _check_counts(timings: Sequence[RequestTiming], info: dict[str, Any] | None) -> None:
    """Steps and prefills of this run must have emitted what the client received."""
    states = (info or {}).get("internal_states") or [{}]
    emitted = states[0].get("emitted")
    if emitted is None or any(one.error is not None for one in timings):
        return
    received = sum(one.num_output_tokens for one in timings)
    if emitted + len(timings) != received:
        raise RunError(
            f"the server emitted {emitted + len(timings)} tokens and this client received "
            f"{received}: another client was served in between, or a counter is wrong"
        )


async def _first_model(http: httpx.AsyncClient) -> str:
    response = await http.get("/v1/models")
    try:
        name: str = response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RunError(
            f"{response.url} names no model ({response.status_code}: {_problem(response)})"
        ) from error
    return name


class _Client:
    """Sends requests to one server and times them."""

    def __init__(self, http: httpx.AsyncClient, model: str, options: dict[str, Any]) -> None:
        self._http = http
        self.model = model
        self.options = options
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

    async def send(self, prompt: Prompt, **changes: Any) -> RequestTiming:
        """Stream one request; a failure is noted in the timing."""
        body = {**self.options, **changes, "model": self.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.by_chunk:
            body["stream_options"]["continuous_usage_stats"] = True
        if isinstance(prompt, str):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            path, body["messages"] = "/v1/chat/completions", prompt
        timing = RequestTiming(started=time.perf_counter())
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                timing.error = f"{response.status_code}: {_problem(response)}"
            else:
                await _read(response, timing)
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
        if not chunk["choices"]:
            continue
        choice = chunk["choices"][0]
        timing.ended = now
        delta = choice.get("delta") or {}
        if choice.get("text") or any(
            delta.get(name) for name in ("content", "reasoning_content", "tool_calls")
        ):
            timing.chunks.append((now, usage.get("completion_tokens")))


def _problem(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
