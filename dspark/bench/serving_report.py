"""The figures of a serving benchmark, how they are computed, and the table for people.

Definitions: `dspark.bench.definitions`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from dspark.errors import RunError

__all__ = ["RequestTiming", "ServingReport", "above_ceiling", "percentile", "shown", "summarise"]

_PHASE = 1.05
"""One-second buckets cut the stream at arbitrary points, which is worth about 5%."""


@dataclass
class RequestTiming:
    """What a client saw of one request; times from one clock, in seconds."""

    started: float
    ended: float = 0.0
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    """Each chunk with text: when it came, and the tokens so far where the server tells."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    """Of the prompt, those that the server did not read again; None: it does not tell."""
    error: str | None = None
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """The server's own figures of this request, where it is ours."""

    @property
    def ttft_s(self) -> float:
        return self.chunks[0][0] - self.started if self.chunks else self.e2e_s

    @property
    def e2e_s(self) -> float:
        return self.ended - self.started

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    def record(self, origin: float) -> dict[str, Any]:
        """For JSON; times in ms, the start after ``origin``."""
        if self.error is not None:
            return {"error": self.error}
        tpot_s = self.tpot_s
        return {
            "start_ms": 1000 * (self.started - origin),
            "ttft_ms": 1000 * self.ttft_s,
            "e2e_ms": 1000 * self.e2e_s,
            "tpot_ms": None if tpot_s is None else 1000 * tpot_s,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "cached_tokens": self.num_cached_tokens,
            "accept_length": self.figures.get("accept_length"),
            "rounds": self.figures.get("rounds"),
        }

    def tokens(self) -> Iterator[tuple[float, float, float]]:
        """(when, how many, seconds since the chunk before) for each chunk with text.

        Where the server does not tell tokens by chunk, all chunks count alike.
        """
        before_s, before = self.started, 0.0
        each = self.num_output_tokens / len(self.chunks) if self.chunks else 0.0
        for when, so_far in self.chunks:
            count = each if so_far is None else so_far - before
            yield when, count, when - before_s
            before_s, before = when, before + count


@dataclass(frozen=True)
class ServingReport:
    """Everything `measure` found out. Times in ms, throughput in tokens a second."""

    model: str
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_e2e_ms: float
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None
    median_itl_ms: float | None
    p99_itl_ms: float | None
    output_throughput: float
    peak_throughput: float
    total_throughput: float
    concurrency: float
    accept_length: float | None
    """None without a draft, or where the server does not tell."""
    accept_histogram: list[int] | None
    """Steps by emitted tokens, index 0..proposals + 1."""
    step_ms: dict[str, float] | None
    """mean, min, p50, p90, p99 as the server measured them."""
    num_draft_tokens: int | None
    ceiling: float | None
    """Tokens a second if every step emitted all it can."""
    accept_rate: list[float] | None = None
    """By slot, given the slots before it."""
    survival: list[float] | None = None
    """By slot, it and all slots before."""
    cached_tokens: int | None = None
    """Of the prompts, tokens that were not read again; None where the server does not tell."""
    above_ceiling: str | None = None
    """The figure that lies above the ceiling, and by how much."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Each request by itself, in the order of the prompts."""
    server: dict[str, Any] = field(default_factory=dict)
    """Device, dtype, version and engine the server reported, and what of it is made up."""

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self)

    def check(self) -> None:
        """Raise for a figure above its ceiling.

        Raises:
            RunError: a clock or a counter is wrong.
        """
        if self.above_ceiling is not None:
            raise RunError(self.above_ceiling)

    def rows(self) -> list[tuple[str, float | None, str]]:
        """(figure, value, unit): the published table's, then what they have to agree with."""
        step = self.step_ms or {}
        return [
            ("mean TPOT", self.mean_tpot_ms, "ms"),
            ("median TPOT", self.median_tpot_ms, "ms"),
            ("output throughput", self.output_throughput, "tok/s"),
            ("peak output throughput", self.peak_throughput, "tok/s"),
            ("accept length", self.accept_length, "tokens/step"),
            ("mean step", step.get("mean"), "ms"),
            ("p50 step", step.get("p50"), "ms"),
            ("p90 step", step.get("p90"), "ms"),
            ("p99 step", step.get("p99"), "ms"),
            ("ceiling", self.ceiling, "tok/s"),
            ("prompt tokens", self.prompt_tokens, "tokens"),
            ("reused prompt tokens", self.cached_tokens, "tokens"),
            ("mean TTFT", self.mean_ttft_ms, "ms"),
            ("median TTFT", self.median_ttft_ms, "ms"),
            ("mean ITL", self.mean_itl_ms, "ms"),
            ("p99 ITL", self.p99_itl_ms, "ms"),
            ("mean E2E", self.mean_e2e_ms, "ms"),
            ("total throughput", self.total_throughput, "tok/s"),
            ("concurrency", self.concurrency, ""),
        ]

    def caveat(self) -> str:
        """What these figures are not: of real weights, of proposals that were judged."""
        said = []
        if self.server.get("synthetic_weights"):
            said.append("SYNTHETIC weights")
        if self.server.get("simulate_accept_length") is not None:
            said.append("SIMULATED acceptance")
        return "".join(f", {one}" for one in said)

    def table(self) -> Table:
        """The rows, and behind them the steps by tokens."""
        table = Table(title=f"serving {self.model}, {self.completed} requests{self.caveat()}")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value, unit in self.rows():
            table.add_row(name, shown(value, unit))
        for emitted, count in enumerate(self.accept_histogram or []):
            if emitted:
                share = count / max(1, sum(self.accept_histogram or []))
                table.add_row(f"steps that emitted {emitted}", f"{count} ({share:.1%})")
        if self.failed:
            table.add_row("failed requests", str(self.failed))
        return table


def shown(value: float | None, unit: str) -> str:
    """A figure of the table; tokens are whole."""
    if value is None:
        return "-"
    return (f"{value:,.0f} {unit}" if unit == "tokens" else f"{value:.2f} {unit}").strip()


def summarise(
    timings: Sequence[RequestTiming],
    wall_s: float,
    *,
    model: str,
    info: dict[str, Any] | None,
) -> ServingReport:
    """Compute the report. ``info``: /server_info after the run, None where there is none.

    Raises:
        RunError: no request succeeded.
    """
    done = [one for one in timings if one.error is None]
    if not done:
        raise RunError(f"all {len(timings)} requests failed; the first: {timings[0].error}")
    ttfts = [1000 * one.ttft_s for one in done]
    tpots = [1000 * tpot for one in done if (tpot := one.tpot_s) is not None]
    itls = [1000 * gap for one in done for gap in _gaps(one)]
    outputs = sum(one.num_output_tokens for one in done)
    prompts = sum(one.num_prompt_tokens for one in done)
    cached = [one.num_cached_tokens for one in done if one.num_cached_tokens is not None]
    states = (info or {}).get("internal_states") or [{}]
    step_ms = states[0].get("step_ms")
    num_draft_tokens = (info or {}).get("num_draft_tokens")
    ceiling = None
    if step_ms is not None and num_draft_tokens is not None:
        ceiling = 1000 * (num_draft_tokens + 1) / step_ms["mean"]
    origin = min(one.started for one in timings)
    report = ServingReport(
        model=model,
        completed=len(done),
        failed=len(timings) - len(done),
        prompt_tokens=prompts,
        output_tokens=outputs,
        wall_s=wall_s,
        mean_ttft_ms=statistics.fmean(ttfts),
        median_ttft_ms=statistics.median(ttfts),
        p99_ttft_ms=percentile(ttfts, 0.99),
        mean_e2e_ms=1000 * statistics.fmean(one.e2e_s for one in done),
        mean_tpot_ms=statistics.fmean(tpots) if tpots else None,
        median_tpot_ms=statistics.median(tpots) if tpots else None,
        p99_tpot_ms=percentile(tpots, 0.99) if tpots else None,
        mean_itl_ms=statistics.fmean(itls) if itls else None,
        median_itl_ms=statistics.median(itls) if itls else None,
        p99_itl_ms=percentile(itls, 0.99) if itls else None,
        output_throughput=outputs / wall_s,
        peak_throughput=_peak(done),
        total_throughput=(prompts + outputs) / wall_s,
        concurrency=sum(one.e2e_s for one in done) / wall_s,
        accept_length=states[0].get("avg_spec_accept_length"),
        accept_histogram=states[0].get("accept_histogram") if num_draft_tokens else None,
        step_ms=step_ms,
        num_draft_tokens=num_draft_tokens,
        ceiling=ceiling,
        accept_rate=states[0].get("accept_rate") if num_draft_tokens else None,
        survival=states[0].get("survival") if num_draft_tokens else None,
        cached_tokens=sum(cached) if cached else None,
        requests=[one.record(origin) for one in timings],
        server=_server(info or {}),
    )
    return replace(report, above_ceiling=above_ceiling(report, done))


def _server(info: dict[str, Any]) -> dict[str, Any]:
    told = ("version", "device", "dtype", "model_path", "engine", "synthetic_weights")
    found = {key: info[key] for key in told if key in info}
    settings = info.get("settings") or {}
    for name in ("tp", "simulate_accept_length"):
        if name in settings:
            found[name] = settings[name]
    return found


def above_ceiling(report: ServingReport, done: Sequence[RequestTiming]) -> str | None:
    """The first figure that lies above what the steps allow, in words; None: all hold."""
    if report.ceiling is None or report.num_draft_tokens is None or report.step_ms is None:
        return None
    most = report.num_draft_tokens + 1
    figures = [
        ("accept length", report.accept_length or 0.0, float(most)),
        ("output throughput", report.output_throughput, report.ceiling),
    ]
    if "min" in report.step_ms:
        # what the fastest step allows, for figures that do not average over all steps
        fastest = 1000 * most / report.step_ms["min"]
        later = [(one, one.num_output_tokens - _first_tokens(one)) for one in done if one.chunks]
        decode_s = sum(one.ended - one.chunks[0][0] for one, _ in later)
        decoded = sum(count for _, count in later)
        peak_limit = fastest * _PHASE + most + report.completed
        figures += [
            ("peak output throughput", report.peak_throughput, peak_limit),
            ("decode throughput", decoded / decode_s if decode_s else 0.0, fastest * _PHASE),
        ]
    for name, value, limit in figures:
        if value > limit:
            return (
                f"{name} {value:.2f} lies above its ceiling {limit:.2f} ({most} tokens a step, "
                f"step {report.step_ms['mean']:.3f} ms): a clock or a counter is wrong"
            )
    return None


def _first_tokens(timing: RequestTiming) -> float:
    return next(timing.tokens())[1]


def _gaps(timing: RequestTiming) -> Iterator[float]:
    """One inter-token latency a token behind the first chunk, in seconds."""
    for index, (_, count, gap) in enumerate(timing.tokens()):
        if index and count:
            yield from [gap / count] * max(1, round(count))


def _peak(done: Sequence[RequestTiming]) -> float:
    origin = min(one.started for one in done)
    buckets: Counter[int] = Counter()
    for one in done:
        for index, (when, count, gap) in enumerate(one.tokens()):
            whole = max(1, round(count))
            for token in range(whole):
                # the tokens of a later chunk are spread over the gap before it
                at = when if index == 0 else when - gap + gap * (token + 1) / whole
                buckets[int(at - origin)] += 1
    return float(max(buckets.values(), default=0))


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between ranks, as numpy's default."""
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
