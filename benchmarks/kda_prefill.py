"""Prefill of a Ling-3.0 target: KDA in chunks beside KDA row by row, in one run.

    PYTHONPATH=. python benchmarks/kda_prefill.py [--tokens 512] [--config configs/...json]

The weights are SYNTHETIC; only times are measured. Without --config it is the tiny test config.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
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

    def measure(call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        return sorted(times)[_REPEATS // 2]

    def prefill() -> None:
        target.prefill(target.new_cache(), ids)

    def by_row(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, states = kda.recurrence(*given)
        return out, states[-1]

    heads, size = config.num_attention_heads, config.head_dim
    rows = torch.randn(1, args.tokens, heads, size)
    alone = (
        rows, rows, rows, -5 * rows.sigmoid(), rows[..., 0].sigmoid(),
        torch.zeros(1, heads, size, size),
    )  # fmt: skip
    chunked = kda.chunked
    with torch.no_grad():
        core = measure(lambda: chunked(*alone)), measure(lambda: by_row(*alone))
    in_chunks = measure(prefill)
    kda.chunked = by_row  # type: ignore[assignment]
    row_by_row = measure(prefill)
    kda.chunked = chunked
    print(
        json.dumps(
            {
                "tokens": args.tokens,
                "chunked_s": in_chunks,
                "recurrence_s": row_by_row,
                "speedup": row_by_row / in_chunks,
                "one_layer_chunked_s": core[0],
                "one_layer_recurrence_s": core[1],
                "one_layer_speedup": core[1] / core[0],
                "weights": "synthetic",
                "threads": torch.get_num_threads(),
                "machine": platform.processor() or platform.machine(),
                "commit": provenance.collect()["git_commit"],
            }
        )
    )


if __name__ == "__main__":
    main()
