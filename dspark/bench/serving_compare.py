"""Two servers, or one with its draft on and off, request by request in one run.

Every prompt goes to both sides, one right after the other, the first side alternating: what the
machine does to one (clocks, neighbours, heat) it does to the other. Intervals are over the pairs.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from dspark.acceptance import AcceptStats
from dspark.bench.serving import check_counts, limits_of, options_of, warm_up
from dspark.bench.serving_client import Client, Prompt, connect
from dspark.bench.serving_report import RequestTiming, ServingReport, summarise
from dspark.errors import ConfigError, RunError
from dspark.progress import Bar

__all__ = ["NO_DRAFT", "Comparison", "Figure", "compare", "paired"]

NO_DRAFT = "no-draft"
"""As a base: the same server, told to decode without its draft."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class Figure:
    """One figure of both sides; intervals are 95%, None with fewer than two pairs."""

    name: str
    unit: str
    measured: float
    base: float
    difference: float
    """Measured less base."""
    difference_interval: tuple[float, float] | None
    ratio: float
    """How many times better than the base."""
    ratio_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found out."""

    measured: ServingReport
    base: ServingReport
    base_name: str
    pairs: int
    """Requests that both sides answered."""
    same_output: int
    """Pairs with the same text."""
    figures: list[Figure]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self)

    def check(self) -> None:
        """Raise for a figure of either side above its ceiling.

        Raises:
            RunError: a clock or a counter is wrong.
        """
        self.measured.check()
        self.base.check()

    def rows(self) -> list[tuple[str, ...]]:
        """Figure, both sides, difference and ratio with their intervals."""
        return [
            (
                f"{one.name}, {one.unit}",
                f"{one.measured:.3f}",
                f"{one.base:.3f}",
                f"{one.difference:+.3f}{_shown(one.difference_interval, '+.3f')}",
                f"{one.ratio:.3f}{_shown(one.ratio_interval, '.3f')}",
            )
            for one in self.figures
        ]

    def verdict(self) -> str:
        """Whether both sides said the same."""
        return f"{self.same_output} of {self.pairs} pairs have the same output"

    def table(self) -> Table:
        """`rows` for people."""
        measured = f"{self.measured.model}{self.measured.caveat()}"
        table = Table(title=f"{measured} against {self.base_name}: {self.verdict()}")
        for name in ("figure", "measured", "base", "difference", "times better"):
            table.add_column(name, justify="left" if name == "figure" else "right")
        for row in self.rows():
            table.add_row(*row)
        return table


def compare(
    address: str,
    base: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | Sequence[int] = 256,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    api_key: str | None = None,
) -> Comparison:
    """Send every prompt to ``address`` and to ``base``, an address or `NO_DRAFT`.

    Raises:
        ConfigError: an argument is out of range, or the server cannot do without its draft.
        RunError: a server does not answer, no pair succeeds, or counts of tokens disagree.
    """
    limits = limits_of(prompts, max_tokens, concurrency)
    options = options_of(temperature, seed, ignore_eos)
    if base != NO_DRAFT and not base.startswith(("http://", "https://")):
        raise ConfigError(f"--compare must be {NO_DRAFT} or begin with http://, got '{base}'")

    async def run() -> Comparison:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                connect(address, concurrency=concurrency, api_key=api_key)
            )
            other, their_options = client, {**options, "dspark_draft": False}
            if base == NO_DRAFT:
                await _check_switch(client, address)
            else:
                other, their_options = (
                    await stack.enter_async_context(
                        connect(base, concurrency=concurrency, api_key=api_key)
                    ),
                    options,
                )
            sides = ((client, options), (other, their_options))
            return await _run(sides, base, prompts, limits, concurrency)

    return asyncio.run(run())


async def _check_switch(client: Client, address: str) -> None:
    info = await client.info() or {}
    if not info.get("num_draft_tokens"):
        raise ConfigError(f"--compare {NO_DRAFT}: the server at {address} has no draft to turn off")
    if info.get("engine") == "graph":
        raise ConfigError(
            f"--compare {NO_DRAFT}: the graph engine's captured step holds the draft's kernels, "
            "which would count for the base; start a second server without --draft and give "
            "its address"
        )


Side = tuple[Client, dict[str, Any]]


async def _run(
    sides: tuple[Side, Side],
    base: str,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    concurrency: int,
) -> Comparison:
    # the base first: flushed last, a shared server counts what the run alone has sent
    flushed = [await warm_up(client, prompts[0], limits[0], asked) for client, asked in sides[::-1]]
    slots = asyncio.Semaphore(concurrency)
    with Bar("pairs", len(prompts)) as bar:

        async def pair(index: int) -> tuple[RequestTiming, RequestTiming]:
            async with slots:
                done = [
                    await client.send(prompts[index], {**asked, "max_tokens": limits[index]})
                    for client, asked in (sides if index % 2 == 0 else sides[::-1])
                ]
            bar.advance()
            first, second = done if index % 2 == 0 else done[::-1]
            return first, second

        pairs = await asyncio.gather(*(pair(index) for index in range(len(prompts))))
    measured, others = [one for one, _ in pairs], [other for _, other in pairs]
    (client, _), (other, _) = sides
    infos = [await one.info() for one in (client, other)]
    if client is other:
        if all(flushed):
            check_counts([*measured, *others], infos[0])
        infos = [_of_requests(measured, infos[0]), _of_requests(others, infos[1], draft=False)]
    elif all(flushed):
        check_counts(measured, infos[0])
        check_counts(others, infos[1])
    reports = [
        summarise(
            timings,
            sum(one.e2e_s for one in timings if one.error is None) / concurrency or 1.0,
            model=one.model,
            info=info,
        )
        for timings, one, info in zip((measured, others), (client, other), infos, strict=True)
    ]
    good = [(one, two) for one, two in pairs if one.error is None and two.error is None]
    if not good:
        raise RunError("no request was answered by both sides")
    return Comparison(
        measured=reports[0],
        base=reports[1],
        base_name=base,
        pairs=len(good),
        same_output=sum(one.text == two.text for one, two in good),
        figures=paired(good),
    )


def _of_requests(
    timings: Sequence[RequestTiming], info: dict[str, Any] | None, *, draft: bool = True
) -> dict[str, Any]:
    """/server_info as one side alone would have it, from the figures of its own answers."""
    info = info or {}
    stats = AcceptStats(info["num_draft_tokens"] if draft else 0)
    decode_ms, rounds = _sums(timings, "decode_ms"), _sums(timings, "rounds")
    histogram = np.zeros(info["num_draft_tokens"] + 2, dtype=int)
    for one in timings:
        if one.figures:
            histogram += np.array(one.figures["accept_histogram"])
    stats.rounds = int(rounds)
    stats.histogram = histogram[: stats.block_size + 2].tolist()
    stats.emitted = sum(n * count for n, count in enumerate(stats.histogram))
    # requests without proposals count in no slot: the server's shares are the draft's alone
    shared = (info.get("internal_states") or [{}])[0]
    state = {
        "accept_rate": shared.get("accept_rate"),
        "survival": shared.get("survival"),
        "avg_spec_accept_length": stats.accept_length,
        "accept_histogram": stats.histogram,
        "step_ms": {"mean": decode_ms / rounds} if rounds and decode_ms else None,
    }
    return {**info, "num_draft_tokens": stats.block_size, "internal_states": [state]}


def _sums(timings: Sequence[RequestTiming], name: str) -> float:
    return sum(float(one.figures.get(name) or 0) for one in timings)


def paired(pairs: Sequence[tuple[RequestTiming, RequestTiming]], *, seed: int = 0) -> list[Figure]:
    """TPOT, TTFT, accept length and step of (measured, base) requests, with intervals.

    Accept length and step are sums over steps, as everywhere; they need servers that tell them.
    """
    draws = np.random.default_rng(seed).integers(len(pairs), size=(_RESAMPLES, len(pairs)))
    figures: list[Figure] = []

    def add(
        name: str,
        unit: str,
        top: Callable[[RequestTiming], float],
        bottom: Callable[[RequestTiming], float],
        *,
        more_is_better: bool = False,
    ) -> None:
        # [pair, side, top or bottom]
        counts = np.array([[(top(one), bottom(one)) for one in pair] for pair in pairs])
        sums = counts.sum(0)
        if not (sums > 0).all():
            return
        values = sums[:, 0] / sums[:, 1]
        resampled = counts[draws].sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = resampled[..., 0] / resampled[..., 1]
            ratios = each[:, 0] / each[:, 1] if more_is_better else each[:, 1] / each[:, 0]
        measured, base = map(float, values)
        figures.append(
            Figure(
                name,
                unit,
                measured,
                base,
                measured - base,
                _interval(each[:, 0] - each[:, 1], len(pairs)),
                measured / base if more_is_better else base / measured,
                _interval(ratios, len(pairs)),
            )
        )

    add("mean TPOT", "ms", lambda one: 1000 * (one.tpot_s or 0), lambda one: one.tpot_s is not None)
    add("mean TTFT", "ms", lambda one: 1000 * one.ttft_s, lambda one: 1)
    add("accept length", "tokens/step", _emitted, _rounds, more_is_better=True)
    add("mean step", "ms", lambda one: float(one.figures.get("decode_ms") or 0), _rounds)
    return figures


def _rounds(timing: RequestTiming) -> float:
    return float(timing.figures.get("rounds") or 0)


def _emitted(timing: RequestTiming) -> float:
    return float(
        sum(n * count for n, count in enumerate(timing.figures.get("accept_histogram") or ()))
    )


def _interval(values: npt.NDArray[np.float64], pairs: int) -> tuple[float, float] | None:
    known = values[np.isfinite(values)]
    if pairs < 2 or not len(known):
        return None
    low, high = np.quantile(known, (0.025, 0.975))
    return float(low), float(high)


def _shown(interval: tuple[float, float] | None, form: str) -> str:
    return f" ({interval[0]:{form}} .. {interval[1]:{form}})" if interval else ""
