"""Prefill of a Ling-3.0 target: KDA in chunks beside KDA row by row, in one run.

    PYTHONPATH=. python benchmarks/kda_prefill.py [--tokens 512] [--config configs/...json]

The weights are SYNTHETIC; only times are measured. Without --config it is the tiny test config.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from torch import Tensor

from dspark import provenance
from dspark.target import kda
from dspark.target.config import LingConfig
from dspark.target.ling import LingTarget
from dspark.target.model import LingModel
from dspark.target.synthetic import synthetic
from dspark.target.weights import fill
from dspark.testing import TINY_LING

_REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--config", type=Path, help="config.json of a Ling-3.0 model")
    args = parser.parse_args()
    config = (
        LingConfig.from_file(args.config)
        if args.config
        else LingConfig.from_dict({**TINY_LING["tiny"], "max_position_embeddings": 1 << 20})
    )
    model = LingModel(config)
    fill(model, lambda spec: synthetic(spec, config, 0))
    target = LingTarget(model, "synthetic")
    ids = torch.randint(0, config.vocab_size, (args.tokens,))

    def measure() -> float:
        times = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            target.prefill(target.new_cache(), ids)
            times.append(time.perf_counter() - begun)
        return sorted(times)[_REPEATS // 2]

    def by_row(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, states = kda.recurrence(*given)
        return out, states[-1]

    chunked = kda.chunked
    measure()
    in_chunks = measure()
    kda.chunked = by_row  # type: ignore[assignment]
    row_by_row = measure()
    kda.chunked = chunked
    print(
        json.dumps(
            {
                "tokens": args.tokens,
                "chunked_s": in_chunks,
                "recurrence_s": row_by_row,
                "speedup": row_by_row / in_chunks,
                "weights": "synthetic",
                "threads": torch.get_num_threads(),
                "machine": platform.processor() or platform.machine(),
                "commit": provenance.collect()["git_commit"],
            }
        )
    )


if __name__ == "__main__":
    main()
