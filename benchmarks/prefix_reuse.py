"""Time to the first token of a second turn, with what the first one left and without.

    PYTHONPATH=. python benchmarks/prefix_reuse.py --draft checkpoints/smollm2-135m-dspark-block16

Prompts are random ids. Medians of the wall clock and, in brackets, of the processor's time, which
other programs disturb less.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict

import torch
from ending import run

from dspark.config import TargetSettings
from dspark.decoding import Commit, DecodeParams, PrefixCache, stream
from dspark.export.load import load_draft
from dspark.target import load

TURNS = ((600, 1000), (1000, 2000), (1900, 2000))
"""Tokens of the first prompt and of the second, which begins with it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load(TargetSettings(path=args.target, device=args.device, dtype=args.dtype))
    draft = load_draft(args.draft, target=target) if args.draft else None
    params = DecodeParams(1, ignore_eos=True)

    def first(
        prompt: list[int], prefixes: PrefixCache | None
    ) -> tuple[tuple[float, float], Commit]:
        begun, used = time.perf_counter(), time.process_time()
        commit = next(stream(target, draft, prompt, params, prefixes))
        return (time.perf_counter() - begun, time.process_time() - used), commit

    rng = random.Random(0)
    first([1] * 600, None)
    print("| first | second | read again | without, ms | with, ms | first, ms | keeping it | MB |")
    print("|---|---|---|---|---|---|---|---|")
    for before, length in TURNS:
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for number in range(args.rounds):
            prompt = [rng.randrange(target.vocab_size) for _ in range(length)]
            prefixes = PrefixCache(1 << 30)
            runs = [("first", prompt[:before], None), ("keeping", prompt[:before], prefixes)]
            runs += [("without", prompt, None), ("with", prompt, prefixes)]
            ends = {}
            # in turn, the other way round every second time; what is kept must come before its use
            order = runs if number % 2 else [runs[1], runs[0], runs[3], runs[2]]
            for name, ids, cache in order:
                took, ends[name] = first(ids, cache)
                times[name].append(took)
            assert ends["with"].token_ids == ends["without"].token_ids
        told = {name: _told(some) for name, some in times.items()}
        again = length - ends["with"].num_reused
        figures = f"{told['without']} | {told['with']} | {told['first']} | {told['keeping']}"
        print(f"| {before} | {length} | {again} | {figures} | {prefixes.held_bytes / 1e6:.0f} |")


def _told(times: list[tuple[float, float]]) -> str:
    wall, used = (1000 * statistics.median(some) for some in zip(*times, strict=True))
    return f"{wall:.0f} ({used:.0f})"


if __name__ == "__main__":
    run(main)
