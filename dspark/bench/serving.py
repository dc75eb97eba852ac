"""Latency and throughput of a running server; `definitions` says what each figure means."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from dspark.bench.serving_client import Client, Prompt, connect
from dspark.bench.serving_report import RequestTiming, ServingReport, summarise
from dspark.errors import ConfigError, RunError
from dspark.progress import Bar

__all__ = ["check_counts", "limits_of", "measure", "options_of", "warm_up"]

_WARM_UP_TOKENS = 32


def measure(
    address: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | Sequence[int] = 256,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    model: str | None = None,
    api_key: str | None = None,
) -> ServingReport:
    """Send every prompt once, ``concurrency`` at a time, and report.

    ``address`` like http://127.0.0.1:8000; any OpenAI-compatible server. The accept histogram, the
    step time and the ceiling need ours. ``max_tokens``: one for all, or one a prompt. Whether a
    figure lies above the ceiling: `ServingReport.check`.

    Raises:
        ConfigError: no prompts, or an argument out of range.
        RunError: nothing answers there, every request fails, or the server's token counts
            disagree with the client's.
    """
    limits = limits_of(prompts, max_tokens, concurrency)
    options = options_of(temperature, seed, ignore_eos)

    async def run() -> ServingReport:
        async with connect(
            address, concurrency=concurrency, model=model, api_key=api_key
        ) as client:
            return await _run(client, prompts, limits, options, concurrency)

    return asyncio.run(run())


def limits_of(
    prompts: Sequence[Prompt], max_tokens: int | Sequence[int], concurrency: int
) -> list[int]:
    """The output limit of each prompt.

    Raises:
        ConfigError: no prompts, or an argument out of range.
    """
    if not prompts:
        raise ConfigError("bench serving needs at least one prompt")
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    assert len(limits) == len(prompts)
    for name, value in (("max-tokens", min(limits)), ("concurrency", concurrency)):
        if value < 1:
            raise ConfigError(f"--{name} must be >= 1, got {value}")
    return limits


def options_of(temperature: float, seed: int | None, ignore_eos: bool) -> dict[str, Any]:
    """What every request of a run asks for."""
    options: dict[str, Any] = {"temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    if ignore_eos:
        options["ignore_eos"] = True
    return options


async def warm_up(client: Client, prompt: Prompt, limit: int, options: dict[str, Any]) -> bool:
    """One short request, then the server's figures start anew; False where they cannot.

    Raises:
        ConfigError: the server does not want what this client was told to send.
        RunError: it fails in another way.
    """
    short = {**options, "max_tokens": min(limit, _WARM_UP_TOKENS)}
    done = await client.send(prompt, short)
    if done.error is not None:
        kind = ConfigError if done.error.startswith("400:") else RunError
        raise kind(f"the warm-up request failed: {done.error}")
    return await client.flush()


async def _run(
    client: Client,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    options: dict[str, Any],
    concurrency: int,
) -> ServingReport:
    flushed = await warm_up(client, prompts[0], limits[0], options)
    slots = asyncio.Semaphore(concurrency)
    with Bar("requests", len(prompts)) as bar:

        async def one(prompt: Prompt, limit: int) -> RequestTiming:
            async with slots:
                timing = await client.send(prompt, {**options, "max_tokens": limit})
            bar.advance()
            return timing

        begun = time.perf_counter()
        timings = await asyncio.gather(
            *(one(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True))
        )
        info = await client.info()
        wall_s = time.perf_counter() - begun
    if flushed:
        check_counts(timings, info)
    return summarise(timings, wall_s, model=client.model, info=info)


def check_counts(timings: Sequence[RequestTiming], info: dict[str, Any] | None) -> None:
    """Steps and prefills of this run must have emitted what the client received.

    Raises:
        RunError: they have not.
    """
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
