"""Decode prompts with a `GraphStep`: the same commits as `decoding.stream`, two launches ahead."""

import time
from collections.abc import Iterator, Sequence

import torch

from dspark.decoding import Commit, DecodeParams, check_request
from dspark.decoding.loop import stop_ids
from dspark.errors import ConfigError, RunError
from dspark.kernels.accept import Done
from dspark.serving.engine import EngineLost
from dspark.serving.graph.exchange import lost_rank
from dspark.serving.graph.step import GraphStep, StepRecord
from dspark.target import GoOn, ReadingStopped

__all__ = ["GraphDecoder", "wait_for"]

_DEPTH = 2
"""Launches in the queue: while one runs the next one waits behind it."""
_NAP_S = 20e-6


class GraphDecoder:
    """Batch-1 decoding; one `stream` at a time.

    ``patience_s``: how long a result may take before the device counts as stuck. ``schedule``:
    accepted proposals of a request's steps in turn, where acceptance is simulated.
    """

    def __init__(
        self, step: GraphStep, patience_s: float = 30.0, schedule: Sequence[int] = ()
    ) -> None:
        self.step, self.patience_s, self.schedule = step, patience_s, schedule

    def stream(
        self, prompt_ids: Sequence[int], params: DecodeParams, go_on: GoOn | None = None
    ) -> Iterator[Commit]:
        """As `decoding.stream`; a caller that stops early ends the request on the device.

        Raises:
            ConfigError: the prompt does not fit, the sampling is none the kernels know, or
                logprobs are asked for.
            RunError: the device gave NaN, or no result for `patience_s`.
            EngineLost: another rank did not come to a step.
        """
        step = self.step
        if params.top_logprobs is not None:
            raise ConfigError("the graph engine computes no logprobs; leave them out")
        if params.verification != "coupled":
            raise ConfigError(
                f"the graph engine has no {params.verification} verification; leave it out"
            )
        positions = step.target.max_position_embeddings
        check_request(positions, len(prompt_ids), 1, context=step.context)
        if step.device.type == "cuda":
            # kernels are launched on the device of the calling thread
            torch.cuda.set_device(step.device)
        begun = time.perf_counter()
        try:
            first = step.begin(prompt_ids, params, go_on, self.schedule)
        except ReadingStopped:
            return
        left = min(params.max_new_tokens, step.context - len(prompt_ids)) - 1
        reason = "stop" if first in stop_ids(step.target, params) else None
        reason = reason or ("length" if left == 0 else None)
        took = time.perf_counter() - begun
        yield Commit([first], reason, None, 0, took, num_reused=step.num_reused)
        if reason is not None:
            return
        begun, clock = time.perf_counter(), 0
        reading, stuck = step.launched, False
        try:
            while True:
                stuck = True
                while step.launched - reading < _DEPTH:
                    step.launch()
                record = wait_for(step, reading, self.patience_s)
                stuck = False
                reading += 1
                if record.missing_rank is not None:
                    raise EngineLost(lost_rank(record.missing_rank))
                if record.done == Done.NOT_A_NUMBER:
                    raise RunError("the target's logits hold no number; the request was ended")
                elapsed = (record.clock_ns - clock) / 1e9 if clock else time.perf_counter() - begun
                clock = record.clock_ns
                reason = {Done.STOP: "stop", Done.LENGTH: "length"}.get(record.done)
                yield Commit(
                    record.token_ids, reason, record.num_proposed, record.num_accepted, elapsed
                )
                if reason is not None:
                    return
        finally:
            # what is queued behind the end finds the request done, and must be over before the next
            step.abort()
            while reading < step.launched and not stuck:
                wait_for(step, reading, self.patience_s)
                reading += 1


def wait_for(step: GraphStep, serial: int, patience_s: float) -> StepRecord:
    """The record of a launch, as soon as it is there.

    Raises:
        RunError: it is not there after ``patience_s``.
    """
    end = time.monotonic() + patience_s
    while (record := step.read(serial)) is None:
        if time.monotonic() > end:
            raise RunError(f"step {serial} gave no result for {patience_s:g} s")
        time.sleep(_NAP_S)
    return record
