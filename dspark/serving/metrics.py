"""Figures of the engine: accept and step statistics since the last flush, and Prometheus text.

Prometheus' default buckets start at 5 ms and would hide a sub-millisecond step, so the buckets
here start at 0.1 ms. Dashboards made for SGLang or vLLM find the names they know: each figure is
kept once, under our own name, and shown under theirs as well.
"""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dspark.acceptance import AcceptStats

__all__ = ["Metrics", "percentile"]

_BUCKETS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120),
)
_MAX_STEPS = 1 << 16

_ALIASES = {
    "prompt_tokens": ("sglang:prompt_tokens", "vllm:prompt_tokens"),
    "cached_tokens": ("sglang:cached_tokens",),
    "generation_tokens": ("sglang:generation_tokens", "vllm:generation_tokens"),
    "aborted_requests": ("sglang:num_aborted_requests",),
    "requests_running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "requests_waiting": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "time_to_first_token_seconds": (
        "sglang:time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ),
    "inter_token_latency_seconds": (
        "sglang:inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds",
    ),
    "e2e_request_latency_seconds": (
        "sglang:e2e_request_latency_seconds",
        "vllm:e2e_request_latency_seconds",
    ),
    "spec_accept_length": ("sglang:spec_accept_length",),
    "spec_accept_rate": ("sglang:spec_accept_rate",),
    "spec_drafts": ("vllm:spec_decode_num_drafts",),
    "spec_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "spec_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "spec_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile of a sorted, non-empty list; ``share`` in 0..1."""
    return values[min(len(values) - 1, max(0, round(share * (len(values) - 1))))]


class Metrics:
    """Counters of one engine. The worker writes, HTTP handlers read."""

    def __init__(self, block_size: int) -> None:
        """``block_size``: proposals of a step at most; 0 without a draft."""
        self._lock = threading.Lock()
        self._block_size = block_size
        self._stats = AcceptStats(block_size)
        self._steps: deque[float] = deque(maxlen=_MAX_STEPS)
        self._cached_tokens = 0
        self._totals = {"tokens": 0, "emitted": 0, "rounds": 0, "step_s": 0.0}
        self._registry = CollectorRegistry()
        self._sources: dict[str, Counter | Gauge | Histogram] = {}
        self._add(Counter, "prompt_tokens", "Prompt tokens of finished requests.")
        self._add(Counter, "cached_tokens", "Of these, tokens that were not read again.")
        self._add(Counter, "generation_tokens", "Output tokens of finished requests.")
        self._add(
            Counter,
            "aborted_requests",
            "Requests ended by a disconnect, /abort_request or a deadline.",
        )
        self._add(Counter, "failed_requests", "Requests ended by an error.")
        self._add(Counter, "spec_drafts", "Verify steps with proposals.")
        self._add(Counter, "spec_draft_tokens", "Tokens proposed by the draft.")
        self._add(Counter, "spec_accepted_tokens", "Proposed tokens that were kept.")
        self._add(Counter, "spec_accepted_tokens_per_pos", "The same by slot.", ["position"])
        self._add(Gauge, "requests_running", "Requests being decoded (0 or 1).")
        self._add(Gauge, "requests_waiting", "Requests in the queue.")
        self._add(Gauge, "spec_accept_length", "Tokens a verify step emits, since the last flush.")
        self._add(Gauge, "spec_accept_rate", "Kept share of the proposals, since the last flush.")
        self._add(Histogram, "time_to_first_token_seconds", "From arrival to the first token.")
        self._add(Histogram, "inter_token_latency_seconds", "Step time over its tokens, per token.")
        self._add(Histogram, "e2e_request_latency_seconds", "From arrival to the last token.")
        self._add(Histogram, "step_seconds", "One propose, verify, commit step.")
        self._registry.register(_Renamed(self._sources))

    def _add(self, kind: Any, name: str, text: str, labels: list[str] | None = None) -> None:
        extra = {"buckets": _BUCKETS} if kind is Histogram else {}
        self._sources[name] = kind(
            f"dspark:{name}", text, labelnames=labels or [], registry=self._registry, **extra
        )

    def _of(self, name: str) -> Any:
        return self._sources[name]

    def first_token(self, seconds: float) -> None:
        """A request's first token is there, ``seconds`` after its arrival."""
        with self._lock:
            self._totals["tokens"] += 1
        self._of("time_to_first_token_seconds").observe(seconds)

    def step(self, seconds: float, proposed: int, accepted: int, emitted: int) -> None:
        """One step; ``accepted`` and ``emitted`` are those after any cut."""
        with self._lock:
            self._stats.add(num_proposed=proposed, num_accepted=accepted, num_emitted=emitted)
            self._steps.append(seconds)
            for name, amount in (
                ("tokens", emitted), ("emitted", emitted), ("rounds", 1), ("step_s", seconds),
            ):  # fmt: skip
                self._totals[name] += amount
        self._of("step_seconds").observe(seconds)
        for _ in range(emitted):
            self._of("inter_token_latency_seconds").observe(seconds / emitted)
        if proposed:
            self._of("spec_drafts").inc()
            self._of("spec_draft_tokens").inc(proposed)
            self._of("spec_accepted_tokens").inc(accepted)
            for slot in range(accepted):
                self._of("spec_accepted_tokens_per_pos").labels(slot).inc()

    def ended(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        seconds: float,
        how: str,
        cached_tokens: int = 0,
    ) -> None:
        """A request came to its end after ``seconds``; ``how``: its finish reason or failure.

        ``cached_tokens``: those of the prompt that were not read again.
        """
        with self._lock:
            self._cached_tokens += cached_tokens
        self._of("prompt_tokens").inc(prompt_tokens)
        self._of("cached_tokens").inc(cached_tokens)
        self._of("generation_tokens").inc(output_tokens)
        self._of("e2e_request_latency_seconds").observe(seconds)
        if how in ("abort", "deadline"):
            self._of("aborted_requests").inc()
        elif how in ("error", "lost"):
            self._of("failed_requests").inc()

    def flush(self) -> None:
        """Start the accept and step statistics anew; Prometheus' counters only grow."""
        with self._lock:
            self._stats = AcceptStats(self._block_size)
            self._steps.clear()
            self._cached_tokens = 0

    def snapshot(self) -> dict[str, Any]:
        """Statistics since the last flush; times in ms, of the last 65,536 steps."""
        with self._lock:
            accept = self._stats.summary()
            steps, cached = sorted(self._steps), self._cached_tokens
        return {
            "avg_spec_accept_length": accept["accept_length"] if self._block_size else None,
            "accept_histogram": accept["histogram"],
            "accept_rate": accept["accept_rate"],
            "survival": accept["survival"],
            "accepted_drafts": accept["accepted_drafts"],
            "rounds": accept["rounds"],
            "emitted": accept["emitted"],
            "step_ms": _step_ms(steps),
            "cached_tokens": cached,
        }

    def live(self) -> dict[str, Any]:
        """Counters since the start, which a flush leaves alone, and acceptance since the flush.

        Sorts no steps: a page asks every second, while the worker decodes. ``tokens`` counts first
        tokens, which no step has emitted, too.
        """
        with self._lock:
            return {**self._totals, "flushed": self._stats.summary()}

    def render(self, *, running: int, waiting: int) -> bytes:
        """Prometheus text exposition."""
        with self._lock:
            length = self._stats.accept_length
            proposed, accepted = self._stats.proposed, self._stats.accepted
        self._of("requests_running").set(running)
        self._of("requests_waiting").set(waiting)
        self._of("spec_accept_length").set(length if self._block_size else 0.0)
        self._of("spec_accept_rate").set(accepted / proposed if proposed else 0.0)
        return generate_latest(self._registry)


def _step_ms(steps: list[float]) -> dict[str, float] | None:
    if not steps:
        return None
    return {
        "mean": 1000 * sum(steps) / len(steps),
        "min": 1000 * steps[0],
        "p50": 1000 * percentile(steps, 0.5),
        "p90": 1000 * percentile(steps, 0.9),
        "p99": 1000 * percentile(steps, 0.99),
    }


class _Renamed(Collector):
    """The same figures under the names of other servers."""

    def __init__(self, sources: dict[str, Counter | Gauge | Histogram]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for name, aliases in _ALIASES.items():
            for metric in self._sources[name].collect():
                for alias in aliases:
                    copy = Metric(alias, metric.documentation, metric.type)
                    for sample in metric.samples:
                        if sample.name.endswith("_created"):
                            continue
                        renamed = sample.name.replace(metric.name, alias, 1)
                        copy.samples.append(sample._replace(name=renamed))
                    yield copy
