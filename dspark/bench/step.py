"""`dspark bench step`: the time of a decode step beside the bytes it must read.

One rank of a Ling-3.0 target, or a dense one, with SYNTHETIC weights, and a draft of true shape (a
DSpark model or the target's own NEXTN block), run as they are served: captured, two launches
queued, state on the device. With several ranks the exchanges between them are left out and a stated
constant is given beside the measured time. Acceptance is SIMULATED: a schedule says how many
proposals every step keeps.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dspark.bench.ablations import without
from dspark.bench.roofline import Floor, step_floor
from dspark.bench.step_options import OUTPUT, StepOptions, settle
from dspark.bench.targets import dense_target
from dspark.decoding import DecodeParams
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.errors import ConfigError
from dspark.export.random_draft import fill_draft
from dspark.serving.graph.decoder import wait_for
from dspark.serving.graph.step import GraphStep
from dspark.target import HFTarget, LingTarget
from dspark.target.config import LingConfig
from dspark.target.drawn import keep_to_pool
from dspark.target.families import DenseShape
from dspark.target.sizes import Routing
from dspark.target.synthetic import random_model

__all__ = ["StepBench", "StepTimes"]

_EXCHANGE_US = 6.0
"""Assumed time of one exchange between ranks (a sum of 16 rows, fused with the norm)."""
_WARM_UP = 50
_PATIENCE_S = 60.0


@dataclass
class StepTimes:
    """Times of one run, microseconds."""

    steps_us: list[float] = field(default_factory=list)
    launch_us: list[float] = field(default_factory=list)
    """Of the host, to enqueue a step and to read one."""
    ahead: list[bool] = field(default_factory=list)
    """Whether a step was enqueued before the one before it had ended."""
    emitted: list[int] = field(default_factory=list)
    """Tokens a step."""

    def summary(self) -> dict[str, float]:
        """Percentiles and shares."""
        p50, p90, p99 = np.percentile(self.steps_us, [50, 90, 99]).tolist()
        return {
            "step_us_p50": p50,
            "step_us_p90": p90,
            "step_us_p99": p99,
            "step_us_max": max(self.steps_us),
            "steps": len(self.steps_us),
            "host_us_p50": float(np.percentile(self.launch_us, 50)),
            "host_us_p99": float(np.percentile(self.launch_us, 99)),
            "enqueued_ahead": sum(self.ahead) / max(1, len(self.ahead)),
            "accept_length": sum(self.emitted) / len(self.emitted),
            "tpot_us": sum(self.steps_us) / sum(self.emitted),
        }


class StepBench:
    """A rank with synthetic weights, ready to step.

    ``shared``: another one whose target is taken, with whatever it was filled with.
    """

    def __init__(
        self, options: StepOptions, shared: "StepBench | None" = None, *, with_nextn: bool = False
    ) -> None:
        self.options = options
        self.config, settled = settle(options)
        if not torch.cuda.is_available():
            raise ConfigError("the captured step needs a GPU; dspark inspect gives the bytes")
        self.device = torch.device("cuda")
        self.routing = Routing.parse(options.routing)
        if shared is None:
            self.target, self.embedding = self._filled(with_nextn or options.nextn > 0)
        else:
            self.target, self.embedding = shared.target, shared.embedding
        draft = self._draft(settled.shape) if settled.shape is not None else None
        self.step = GraphStep(
            self.target,
            draft,
            context=min(options.context + 2 * OUTPUT, self.config.max_position_embeddings),
            num_draft_tokens=settled.proposals or None,
            embedding=self.embedding,
            nextn=options.nextn,
        )
        del draft
        gc.collect()
        generator = torch.Generator(self.device).manual_seed(options.seed)
        for cache in self.step.caches.tensors():
            cache.normal_(0, 0.1, generator=generator)
        self.rows = self.step.limit + 1
        self.schedule = settled.schedule
        self.experts = self._route()

    def floor(self, bandwidth: float) -> Floor:
        """Bytes of a step at the context's middle, and their time."""
        return step_floor(
            self.step.weights, self.step.draft, self.experts,
            self.options.context + OUTPUT // 2, bandwidth, nextn=self.step.nextn,
            passes=self.step.limit, kept=1 + sum(self.schedule) / len(self.schedule),
        )  # fmt: skip

    def run(self, *, depth: int = 2, eager: bool = False) -> StepTimes:
        """Steps in requests of 1024 tokens each, behind a warm-up."""
        times = StepTimes()
        left = self.options.steps
        self._request(_WARM_UP, depth, eager, None)
        # a collection in the middle of a step would be the host's time, not the loop's
        with _quiet():
            while left > 0:
                left -= self._request(left, depth, eager, times)
        return times

    def component(self, name: str) -> float:
        """Microseconds a step of the kernels of one component, alone in a graph."""
        step = self.step
        self.start()
        step.run_body()  # rows are live and experts chosen
        step.arena.only = name
        try:
            step.run_body()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step.run_body()
            taken: list[float] = []
            for _ in range(30):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) * 1e3)
        finally:
            step.arena.only = None
        return sorted(taken)[len(taken) // 2]

    def ablate(self, name: str) -> StepTimes:
        """`run` without one technique of `ablations.ABLATIONS`.

        Raises:
            ConfigError: there is none of that name.
        """
        with without(name, self.step):
            return self.run(depth=1 if name == "run-ahead" else 2, eager=name == "graph")

    @property
    def exchanges(self) -> int:
        """Sums between ranks that a step needs: two a layer, and some for draft and head."""
        if self.options.ranks == 1:
            return 0
        draft = self.step.draft
        more = 2 * len(draft.layers) + 2 if draft else 3 * self.options.nextn
        return 2 * self.config.num_hidden_layers + 1 + more

    def _filled(self, nextn: bool) -> tuple[LingTarget | HFTarget, torch.Tensor | None]:
        """The target, and the whole embedding table where the target has a part of it."""
        options, config = self.options, self.config
        if isinstance(config, DenseShape):
            return dense_target(config, self.device, seed=options.seed), None
        model = random_model(
            config, self.device, ranks=options.ranks, seed=options.seed, nextn=nextn
        )
        embedding = None
        if options.ranks > 1:
            shape = (config.vocab_size, config.hidden_size)
            embedding = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            embedding.normal_(0, 0.02)
        return LingTarget(model, "synthetic"), embedding

    def _draft(self, shape: DSparkConfig) -> DSparkDraftModel:
        with torch.device("meta"):
            draft = DSparkDraftModel(shape)
        draft.to(torch.bfloat16).to_empty(device=self.device)
        fill_draft(draft, self.options.seed + 1)
        # no weights, hence left empty by to_empty
        fresh = type(draft.rotary_emb)(shape)
        draft.rotary_emb.inv_freq = fresh.inv_freq.to(self.device)
        draft.requires_grad_(False)
        return draft

    def start(self) -> None:
        """A request of 1024 tokens behind the context, whose caches hold noise."""
        self.step.set_state(
            cursor=self.options.context,
            anchor=17,
            left=OUTPUT,
            params=DecodeParams(max_new_tokens=OUTPUT),
            schedule=self.schedule,
        )

    def _request(self, most: int, depth: int, eager: bool, times: StepTimes | None) -> int:
        """One request of at most ``most`` steps; the number of steps."""
        step = self.step
        self.start()
        torch.cuda.synchronize()
        reading, done, clock, steps = step.launched, False, 0, 0
        while not done and steps < most:
            begun = time.perf_counter()
            ahead = None
            with _no_waiting():
                while step.launched - reading < depth:
                    queued = step.launched > reading
                    ahead = step.read(step.launched - 1) is None if queued else None
                    step.launch(eager=eager)
            enqueued = time.perf_counter()
            record = wait_for(step, reading, _PATIENCE_S)
            reading += 1
            steps += 1
            done = record.done != 0
            # the first steps of a request start on an idle device
            if times is not None and steps > 2 and not done:
                times.steps_us.append((record.clock_ns - clock) / 1e3)
                times.emitted.append(len(record.token_ids))
                times.launch_us.append((enqueued - begun) * 1e6)
                if ahead is not None:
                    times.ahead.append(ahead)
            clock = record.clock_ns
        while reading < step.launched:
            wait_for(step, reading, _PATIENCE_S)
            reading += 1
        return steps

    def _route(self) -> float:
        """Make the routing what was asked for; distinct experts of a layer, measured."""
        config = self.config
        self.expert_pool: int | None = None
        """What `synthetic_weights.expert_pool` is for the same routing; None: all experts."""
        if isinstance(config, DenseShape):
            return 0.0
        wanted = self.routing.experts(config, self.rows)
        pool = config.num_experts
        found = self._distinct(config, pool)
        if self.routing.independent:
            return found
        low, high = config.num_experts_per_tok, pool
        while high - low > 1 and abs(found - wanted) > 0.25:
            pool = (low + high) // 2
            found = self._distinct(config, pool)
            low, high = (pool, high) if found < wanted else (low, pool)
        self.expert_pool = pool
        return found

    def _distinct(self, config: LingConfig, pool: int) -> float:
        """Distinct experts of a layer and step, if routers may choose among ``pool`` only."""
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        for layer in self.step.weights.layers:
            if (bias := getattr(layer.ffn, "bias", None)) is not None:
                bias.normal_(0, 0.1, generator=generator)
                keep_to_pool(bias, config, pool)
        seen: list[float] = []
        body = self.step.target_body
        plain = body.experts

        def counted(*given: Any) -> None:
            plain(*given)
            ids = self.step.arena.ids[: self.rows]
            seen.append(len(torch.unique(ids)))

        self.start()
        body.experts = counted  # type: ignore[method-assign, assignment]
        try:
            for _ in range(3):
                self.step.run_body()
        finally:
            body.experts = plain  # type: ignore[method-assign]
        return sum(seen[-2 * (len(seen) // 3) :]) / max(1, 2 * (len(seen) // 3))


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exchange_us(count: int) -> float:
    """Assumed time of the exchanges that were left out."""
    return count * _EXCHANGE_US
