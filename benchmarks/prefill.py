"""Time until the captured step can start behind a long prompt, one rank of a Ling-3.0 target.

    PYTHONPATH=. python benchmarks/prefill.py [--tokens 8192] [--ranks 4] [--json]

All that `GraphStep.begin` does: the target over the whole prompt with its taps, its first token,
the hand-over of its state, and the draft's keys and values. Weights and prompt are SYNTHETIC, the
exchanges between ranks are left out. Needs a GPU.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from ending import needs_gpu, run

from dspark.bench.report import environment
from dspark.bench.step import StepBench
from dspark.bench.step_options import StepOptions, settle
from dspark.decoding import DecodeParams
from dspark.errors import ConfigError

_WARM_UP = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/targets/ling-3.0-flash.json"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.count < 1:
        raise ConfigError(f"--count must be >= 1, got {options.count}")
    asked = StepOptions(config=options.config, ranks=options.ranks, context=options.tokens)
    settle(asked)
    needs_gpu(Path(__file__).name)
    bench = StepBench(asked)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(bench.config.vocab_size, (options.tokens,), generator=generator).tolist()
    taken: list[float] = []
    for _ in range(_WARM_UP + options.count):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        bench.step.begin(ids, DecodeParams(max_new_tokens=64, ignore_eos=True))
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) * 1e3)
    middle = median(taken[_WARM_UP:])
    print(
        f"{options.tokens:,} tokens, rank 1 of {options.ranks}, SYNTHETIC weights: median "
        f"{middle:,.1f} ms of {options.count}, the first call {taken[0]:,.0f} ms"
    )
    if options.json:
        print(json.dumps({
            "weights": "synthetic", "tokens": options.tokens, "ranks": options.ranks,
            "prefill_ms": middle, "all_ms": taken, "environment": environment(),
        }))  # fmt: skip


if __name__ == "__main__":
    run(main)
