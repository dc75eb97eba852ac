"""Replay one captured step over and over from the same state: every result must be the first one.

    PYTHONPATH=. python benchmarks/step_replays.py --config configs/targets/ling-3.0-flash.json \\
        --ranks 4 --count 10000
    PYTHONPATH=. python benchmarks/step_replays.py --count 100000      # the tests' small model

A race between kernels that overlap would show as a replay that differs. SYNTHETIC weights. Needs a
GPU.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from ending import needs_gpu, run

from dspark import provenance
from dspark.bench.step import StepBench
from dspark.bench.step_options import StepOptions, settle
from dspark.decoding import DecodeParams
from dspark.errors import ConfigError
from dspark.serving.graph.step import GraphStep
from dspark.testing import tiny_draft, tiny_ling


def small() -> GraphStep:
    """The tests' model behind a prompt, ready to step."""
    target = tiny_ling("flash", dtype=torch.bfloat16)
    target.model.to("cuda")
    draft = tiny_draft(target, block_size=8).to("cuda", torch.bfloat16)
    draft.attach(target.embed_weight, target.head_weight)
    step = GraphStep(target, draft, context=512)
    step.capture()
    step.begin(list(range(4, 104)), DecodeParams(max_new_tokens=64, ignore_eos=True))
    return step


def large(options: StepOptions) -> GraphStep:
    """One rank of true shape behind random caches."""
    bench = StepBench(options)
    bench.step.capture()
    bench.start()
    return bench.step


@torch.no_grad()
def replay(step: GraphStep, count: int) -> tuple[int, float]:
    """Replays that differ from the first in logits, taps, proposals or record, and seconds."""
    arena = step.arena
    state = arena.ints.clone()
    watched = [arena.parts("logits", 1, len(step.weights.head)), arena.taps, arena.proposals]
    first: list[torch.Tensor] = []
    wrong = torch.zeros((), dtype=torch.int64, device=step.device)
    begun = time.perf_counter()
    for _ in range(count):
        arena.ints.copy_(state)
        step.launch()
        # nothing is read before the end: the host stays ahead, as it does when it serves
        now = [*watched, arena.ints]
        if not first:
            first = [one.clone() for one in now]
            continue
        same = torch.stack([(one == old).all() for one, old in zip(now, first, strict=True)]).all()
        wrong += ~same
    torch.cuda.synchronize()
    return int(wrong), time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="config.json of a target; none: the tests'")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    args = parser.parse_args()
    if args.count < 2:
        raise ConfigError(f"--count must be >= 2, got {args.count}: the first is what others are")
    options = StepOptions(config=args.config, ranks=args.ranks) if args.config else None
    if options is not None:
        settle(options)
    needs_gpu(Path(__file__).name)
    step = small() if options is None else large(options)
    wrong, seconds = replay(step, args.count)
    print(f"{args.count} replays, {wrong} differ from the first, {seconds:.1f} s")
    commit = provenance.collect()["git_commit"]
    print(json.dumps({"count": args.count, "differ": wrong, "seconds": seconds, "commit": commit}))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    run(main)
