"""A Ling-3.0 checkpoint on this machine: memory of loading a rank, equality of rows, eager times.

    dspark make-checkpoint --config configs/targets/ling-3.0-tiny.json --out DIR --shard-mb 2000
    PYTHONPATH=. python benchmarks/ling3_target.py DIR --ranks 4

Meant for SYNTHETIC weights. Times are those of the eager reference step. Linux only (/proc).
"""

import argparse
import filecmp
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dspark import provenance
from dspark.decoding import DecodeParams, SamplingParams, decode
from dspark.target.config import LingConfig
from dspark.target.ling import LingTarget
from dspark.target.weights import load_model, save_model
from dspark.testing import tiny_draft

WIDTHS = (1, 2, 5, 8, 9, 13, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="also write it again and compare")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LingConfig.from_file(args.checkpoint / "config.json")
    report: dict[str, object] = {
        "weights": "synthetic",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "commit": provenance.collect()["git_commit"],
        "ranks": [loading(args.checkpoint, config, args.ranks, r) for r in (1, args.ranks - 1)],
    }
    begun = time.perf_counter()
    model = load_model(args.checkpoint, config, device=device)
    report["load_s"] = time.perf_counter() - begun
    target = LingTarget(model, "synthetic")
    ids = torch.randint(4, config.vocab_size, (4096,), generator=torch.Generator().manual_seed(0))
    prefill = {
        n: median(lambda n=n: target.prefill(target.new_cache(), ids[:n])) for n in (512, 4096)
    }  # type: ignore[misc]
    cache = target.new_cache()
    target.prefill(cache, ids[:512])
    verify = {n: median(lambda n=n: target.verify(cache, ids[:n])) for n in (1, 9, 16)}  # type: ignore[misc]
    report |= {"prefill_s": prefill, "verify_s": verify}
    report |= {"rows_equal": rows_equal(target, ids), "outputs_equal": outputs_equal(target, ids)}
    if args.save:
        with tempfile.TemporaryDirectory(dir=args.checkpoint.parent) as again:
            largest = max(file.stat().st_size for file in args.checkpoint.glob("*.safetensors"))
            save_model(model, Path(again), shard_bytes=largest)
            report["round_trip_identical"] = all(
                filecmp.cmp(file, Path(again) / file.name, shallow=False)
                for file in args.checkpoint.glob("*.safetensors*")
            )
    print(json.dumps(report))


def loading(directory: Path, config: LingConfig, ranks: int, rank: int) -> dict[str, float]:
    """Bytes that one rank keeps, growth of the resident set at its peak, seconds."""

    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, begun = resident("VmRSS"), time.perf_counter()
    model = load_model(directory, config, ranks=ranks, rank=rank)
    seconds = time.perf_counter() - begun
    held = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
    peak = resident("VmHWM") - before
    return {"rank": rank, "of": ranks, "held": held, "peak_growth": peak, "s": seconds}


def median(call: Callable[[], object], repeats: int = 3) -> float:
    """Seconds, behind a first call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times[1:])[repeats // 2]


def rows_equal(target: LingTarget, ids: torch.Tensor) -> dict[int, bool]:
    """Are logits and taps of a token the same to the bit at every width of a step?"""
    outputs = {}
    for width in WIDTHS:
        cache = target.new_cache((1, 4))
        target.prefill(cache, ids[:64])
        rows = []
        while cache.length < 128:
            piece = ids[cache.length : min(128, cache.length + width)]
            got = target.verify(cache, piece)
            rows.append(torch.cat([got.logits, got.taps], -1))
            target.commit(cache, len(piece))
        outputs[width] = torch.cat(rows)
    return {width: torch.equal(rows, outputs[1]) for width, rows in outputs.items()}


def outputs_equal(target: LingTarget, ids: torch.Tensor) -> str:
    """Outputs with a random draft of block 12 that equal plain decoding, greedy and seeded."""
    same = total = 0
    for number in range(3):
        draft = tiny_draft(
            target, seed=number, block_size=12, intermediate_size=512, mask_token_id=4
        )
        draft.to(target.device, target.dtype).attach(target.embed_weight, target.head_weight)
        prompt = ids[50 * number : 50 * number + 40].tolist()
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=number)):
            params = DecodeParams(32, sampling, ignore_eos=True)
            plain = decode(target, None, prompt, params).token_ids
            same += decode(target, draft, prompt, params).token_ids == plain
            total += 1
    return f"{same} of {total}"


if __name__ == "__main__":
    main()
