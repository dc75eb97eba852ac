"""Accept length on the published workload in kind: tiled text, EOS ignored, greedy.

    PYTHONPATH=. python benchmarks/random_workload.py --limit 12 \\
        --draft checkpoints/smollm2-135m-dspark-block16 --prompts gsm8k.jsonl mt-bench.jsonl

Prompts as `dspark bench serving --workload random` makes them, every length drawn whole. Tiled text
makes a target repeat its prompt, which rewards copying: so each output is also walked by prompt
lookup (the tokens behind the last earlier place of the longest n-gram, n from 3 down to 1), with
as many proposals a round, and its accept length stands beside the draft's.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ending import run

from dspark.acceptance import AcceptStats, pooled
from dspark.bench.prompt_sets import read_sets
from dspark.bench.report import environment, print_table
from dspark.bench.workloads import RandomLengths, random_prompts
from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, decode
from dspark.errors import ConfigError
from dspark.export.load import load_draft
from dspark.target import load, load_tokenizer

_LONGEST = 3


def looked_up(prompt: Sequence[int], output: Sequence[int], limit: int) -> AcceptStats:
    """Rounds of prompt lookup along a known greedy output, whose first token is the prefill's."""
    ids, end = [*prompt, *output], len(prompt) + 1
    last: list[dict[tuple[int, ...], int]] = [{} for _ in range(_LONGEST)]
    seen = 0
    stats = AcceptStats(limit)
    while end < len(ids):
        # n-grams that end before the last token have something behind them
        for place in range(seen, end - 1):
            for n in range(min(_LONGEST, place + 1)):
                last[n][tuple(ids[place - n : place + 1])] = place + 1
        seen = end - 1
        found = (
            last[n].get(tuple(ids[end - 1 - n : end])) for n in reversed(range(min(_LONGEST, end)))
        )
        begin = next((place for place in found if place is not None), None)
        proposed = [] if begin is None else ids[begin : min(begin + limit, end)]
        left = ids[end:]
        kept = 0
        while kept < min(len(proposed), len(left)) and proposed[kept] == left[kept]:
            kept += 1
        emitted = min(kept + 1, len(left))
        stats.add(num_proposed=len(proposed), num_accepted=kept, num_emitted=emitted)
        end += emitted
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="what is tiled")
    parser.add_argument("--limit", type=int, default=12, help="requests")
    parser.add_argument("--random-input-len", type=int, default=1792)
    parser.add_argument("--random-output-len", type=int, default=224)
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    lengths = RandomLengths(
        input_len=args.random_input_len, output_len=args.random_output_len, range_ratio=1.0
    )
    every = [one for rows in read_sets(args.prompts).values() for one in rows]
    settings = TargetSettings(path=args.target)
    target, tokenizer = load(settings), load_tokenizer(settings)
    draft = load_draft(args.draft, target=target)
    work = random_prompts(every, tokenizer, lengths, count=args.limit)
    drafted, copied = [], []
    for prompt, tokens in zip(work.prompts, work.max_tokens, strict=True):
        params = DecodeParams(tokens, ignore_eos=True, num_draft_tokens=args.num_draft_tokens)
        ids = [int(one) for one in prompt]  # type: ignore[arg-type]
        done = decode(target, draft, ids, params)
        drafted.append(done.stats)
        copied.append(looked_up(ids, done.token_ids, done.stats.block_size))
    limit = drafted[0].block_size
    found: dict[str, Any] = {}
    for name, parts in (("draft", drafted), ("prompt lookup", copied)):
        total = pooled(parts, limit)
        found[name] = {
            "accept_length": total.accept_length,
            "rounds": total.rounds,
            "full_block_rate": total.full_block_rate,
            "histogram": total.histogram,
        }
    print_table(
        f"{args.draft.name}, {args.limit} requests of {lengths.input_len} tokens of tiled text, "
        f"{lengths.output_len} new ones, EOS ignored, greedy; at most {limit + 1} a round",
        ["", "accept length", "full rounds", "rounds"],
        [
            [name, one["accept_length"], one["full_block_rate"], one["rounds"]]
            for name, one in found.items()
        ],
    )
    print("rounds by tokens they added, 1 and up:", found["draft"]["histogram"][1:])
    if args.json:
        print(json.dumps({**found, "ceiling": limit + 1, "environment": environment()}))


if __name__ == "__main__":
    run(main)
