"""The real server over an engine that only waits: its pace is known, and costs no core.

    python benchmarks/stub_server.py [--port 8000] [--step-ms 2] [--tokens 4] [--overlap]

Every step yields ``--tokens`` tokens (SYNTHETIC ones: ids of a fixed random text) after
``--step-ms``; the prompt takes ten steps. ``--overlap``: the next step runs while the last one's
tokens are sent, as the graph engine has it; without, it begins afterwards, as the reference does.
The tokenizer is SmolLM2's, the target a tiny random one that is never run.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dspark.decoding import Commit, DecodeParams
from dspark.serving.engine import Decoder, LocalModel
from dspark.serving.server import serve
from dspark.serving.settings import ServeSettings
from dspark.target import load_tokenizer
from dspark.testing import tiny_draft, tiny_target

BLOCK = 8
PREFILL_STEPS = 10


def stub(
    step_s: float, tokens: int, vocabulary: int, *, overlap: bool
) -> Callable[..., Iterator[Commit]]:
    """A decode that takes ``step_s`` a step."""
    ids = [random.Random(0).randrange(300, vocabulary) for _ in range(4096)]

    def play(_prompt: Any, params: DecodeParams, _go_on: Any = None) -> Iterator[Commit]:
        limit = params.max_new_tokens
        due = time.perf_counter() + PREFILL_STEPS * step_s
        _until(due)
        at, reason = 1, "length" if limit == 1 else None
        yield Commit(ids[:1], reason, None, 0, PREFILL_STEPS * step_s)
        while at < limit:
            due = (due if overlap else time.perf_counter()) + step_s
            _until(due)
            block = [ids[(at + n) % len(ids)] for n in range(min(tokens, limit - at))]
            at += len(block)
            reason = "length" if at >= limit else None
            yield Commit(block, reason, BLOCK, len(block) - 1, step_s)

    return play


def model(step_s: float, tokens: int, vocabulary: int, *, overlap: bool) -> LocalModel:
    """What the server's engine process loads."""
    target = tiny_target(vocab_size=vocabulary, max_position_embeddings=8192)
    draft = tiny_draft(target, block_size=BLOCK)
    play = stub(step_s, tokens, vocabulary, overlap=overlap)
    return LocalModel(
        target, draft, ServeSettings(num_draft_tokens=BLOCK), Decoder("reference", play)
    )


def _until(when: float) -> None:
    if (left := when - time.perf_counter()) > 0:
        time.sleep(left)


def main() -> None:
    parser = argparse.ArgumentParser(description="The server over an engine that only waits.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--core", type=int, help="the one core that the server may use")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    tokenizer = load_tokenizer("smollm2-135m")
    load = partial(model, args.step_ms / 1000, args.tokens, len(tokenizer), overlap=args.overlap)
    serve(load, tokenizer, port=args.port, model_name="stub")


if __name__ == "__main__":
    main()
