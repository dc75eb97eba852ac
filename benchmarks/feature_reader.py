"""How fast rows come out of feature shards: `ShardRows` and `collate`, from the page cache.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/feature_reader.py [--gib 1] [--json]

Rows are SYNTHETIC (random lengths and numbers) and drawn in random order. Bytes are those of the
shards. 8-bit features stay so in the batch and are decoded where the draft trains; what that takes
on this CPU is a column of its own. Every directory is read once before.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dspark.bench.report import environment, print_table
from dspark.corpus import store
from dspark.corpus.dataset import ShardRows, collate
from dspark.corpus.storage import decoded, encode
from dspark.target import Features

DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fn_all")


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of each directory")
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--longest", type=int, default=2048, help="tokens; rows have 1/8 and more")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--dir", help="where the shards are written for the time being")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory(dir=options.dir) as place:
            write(Path(place) / "s", dtype, options)
            found += [measure(Path(place) / "s", dtype, size, options) for size in (1, 8)]
    print_table(
        f"random rows of {options.longest // 8} to {options.longest} tokens, "
        f"{options.taps} taps of {options.hidden}; {torch.get_num_threads()} thread(s)",
        ["dtype", "batch", "GB/s (median)", "GB/s (best)", "with decoding", "tokens/s (median)"],
        [
            [
                one["dtype"],
                str(one["batch"]),
                f"{one['gb_per_s']:.2f}",
                f"{one['gb_per_s_best']:.2f}",
                f"{one['decoded_gb_per_s']:.2f}",
                f"{one['tokens_per_s']:,.0f}",
            ]
            for one in found
        ],
    )
    if options.json:
        print(json.dumps({"results": found, "environment": environment()}))


def write(out: Path, dtype: str, options: argparse.Namespace) -> None:
    """Shards of about 128 MiB until the size is reached."""
    header = store.Header(
        target="synthetic",
        target_revision=None,
        target_fingerprint="0" * 16,
        layer_ids=list(range(options.taps)),
        hidden_size=options.hidden,
        dtype=dtype,
        template_hash="",
        max_length=options.longest,
    )
    rng = random.Random(0)
    store.start(out, header)
    shards, left, number = [], options.gib * 2**30, 0
    base = torch.randn(options.longest, (options.taps + 1) * options.hidden)
    while left > 0:
        rows: list[store.ShardRow] = []
        size = 0
        while size < 1 << 27:
            tokens = rng.randint(options.longest // 8, options.longest)
            states = base[:tokens]
            stored = encode(
                Features(states[:, : -options.hidden], states[:, -options.hidden :]), dtype
            )
            ids = torch.randint(0, 1000, (tokens,))
            rows.append(store.ShardRow(f"r{number}", ids, ids > 100, **stored.tensors()))
            number, size = number + 1, size + tokens * header.token_bytes
        shards.append(store.write_shard(out, len(shards), rows, [], []))
        left -= size
    store.finish(out, header, shards)


def measure(out: Path, dtype: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rates over passes of all rows, each in another order."""
    rows = ShardRows(out)
    size = sum(path.stat().st_size for path in out.glob("shard-*"))
    for path in out.glob("shard-*"):
        path.read_bytes()
    times: list[float] = []
    decoding: list[float] = []
    for number in range(options.passes):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(number)).tolist()
        reading = waiting = 0.0
        for first in range(0, len(order), batch):
            begun = time.perf_counter()
            one = collate([rows[index] for index in order[first : first + batch]])
            reading += (read := time.perf_counter()) - begun
            assert one.taps is not None
            assert one.last_hidden is not None
            decoded(one.taps, one.tap_scales)
            decoded(one.last_hidden, one.last_scales)
            waiting += time.perf_counter() - read
        times.append(reading)
        decoding.append(reading + waiting)
    return {
        "dtype": dtype,
        "batch": batch,
        "bytes": size,
        "gb_per_s": size / median(times) / 1e9,
        "gb_per_s_best": size / min(times) / 1e9,
        "decoded_gb_per_s": size / median(decoding) / 1e9,
        "tokens_per_s": rows.num_tokens / median(times),
    }


if __name__ == "__main__":
    main()
