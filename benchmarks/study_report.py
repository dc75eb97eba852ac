"""Tables of the study from its raw rows: every arm, and how far it is from one of them.

    PYTHONPATH=. python benchmarks/study_report.py outputs/study/rows.jsonl --against stock

Intervals are percentiles of a paired bootstrap over prompts: a resample draws prompts within each
set, the same ones for both arms and all seeds. An arm's macro figure is the mean of its sets'
pooled accept lengths, averaged over the seeds that both arms have.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from ending import run
from torch import Tensor

from dspark.bench.bootstrap import interval, resampled
from dspark.errors import DataError

RESAMPLES = 5000
Key = tuple[str, float, int]  # set, temperature, width


def read(paths: list[Path]) -> dict[str, dict[int, dict[Key, dict]]]:  # type: ignore[type-arg]
    """arm -> seed -> (set, temperature, width) -> the last such row."""
    found: dict[str, dict[int, dict[Key, dict]]] = defaultdict(lambda: defaultdict(dict))  # type: ignore[type-arg]
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            arm, _, seed = str(row.get("draft")).rpartition("-")
            if not arm or not seed.isdecimal():
                raise DataError(f"{path}: '{row.get('draft')}' is not called ARM-SEED")
            found[arm][int(seed)][row["set"], row["temperature"], row["width"]] = row
    return found


def macro(
    runs: list[dict[Key, dict]],  # type: ignore[type-arg]  # N of them
    keys: list[Key],
) -> Tensor:  # [N, R + 1] float64: of the prompts as they are, then of each resample
    """Mean over sets of the pooled accept length; all runs have the same prompts drawn."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for key in keys:
        each = [torch.tensor(rows[key]["prompts"], dtype=torch.float64)[:, :2] for rows in runs]
        counts = torch.cat(each, -1)  # [P, 2N]
        sums = torch.cat([counts.sum(0, keepdim=True), resampled(counts, generator, RESAMPLES)])
        parts.append(sums[:, 1::2] / sums[:, ::2])
    return torch.stack(parts).mean(0).T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--against", default="stock")
    parser.add_argument("--slots", action="store_true", help="conditional acceptance of each slot")
    args = parser.parse_args()
    try:
        arms = read(args.rows)
    except (OSError, ValueError) as error:
        raise DataError(f"not rows of study_score.py: {error}") from None
    if args.against not in arms:
        raise DataError(
            f"no rows of '{args.against}'; there are {', '.join(sorted(arms)) or 'none'}"
        )
    base = arms[args.against]
    some = {key: row for key, row in next(iter(base.values())).items() if key[0] != "all"}
    for temperature, width in sorted({key[1:] for key in some}):
        keys = [key for key in some if key[1:] == (temperature, width)]
        print(f"\nT={temperature:g}, {width} proposals a round; against {args.against}\n")
        print(
            f"| arm | seeds | {' | '.join(key[0] for key in keys)} | macro | difference "
            "| 95% interval | ECE | calibrated |"
        )
        print("|" + "---|" * (len(keys) + 7))
        for arm, seeds in sorted(arms.items()):
            shared = sorted(
                s
                for s in seeds.keys() & base.keys()
                if all(k in seeds[s] and k in base[s] for k in keys)
            )
            if not shared:
                continue
            both = macro([of[s] for of in (seeds, base) for s in shared], keys)
            mine, theirs = (half.mean(0) for half in both.chunk(2))
            each = [sum(seeds[s][k]["accept_length"] for s in shared) / len(shared) for k in keys]
            gain = 100 * (mine / theirs - 1)
            low, high = interval(gain[1:]) or (float("nan"),) * 2
            rated = [seeds[s].get(("all", temperature, width)) for s in shared]
            ece = " | "
            if all(rated):
                ece = " | ".join(
                    f"{sum(one[when]['slot']['ece'] for one in rated) / len(rated):.3f}"
                    for when in ("before", "after")
                )
            shown = " | ".join(f"{value:.3f}" for value in each)
            print(
                f"| {arm} | {len(shared)} | {shown} | {mine[0]:.3f} | {gain[0]:+.2f}% "
                f"| {low:+.2f} to {high:+.2f} | {ece} |"
            )
        if args.slots:
            _print_slots(arms, keys, width)


def _print_slots(
    arms: dict[str, dict[int, dict[Key, dict]]],  # type: ignore[type-arg]
    keys: list[Key],
    width: int,
) -> None:
    """Of the slots that were reached the share that was kept; all sets and seeds together."""
    print(f"\n| arm | {' | '.join(map(str, range(1, width + 1)))} |")
    print("|" + "---|" * (width + 1))
    for arm, seeds in sorted(arms.items()):
        rows = [of[key] for of in seeds.values() for key in keys if key in of]
        reached, kept = (
            torch.tensor([row[name] for row in rows]).sum(0) for name in ("reached_at", "kept_at")
        )
        shares = (kept / reached.clamp_min(1)).tolist()
        print(f"| {arm} | {' | '.join(f'{share:.3f}' for share in shares)} |")


if __name__ == "__main__":
    run(main)
