"""Our loop with a draft beside our plain loop and transformers' `generate`, in turns, one process.

    PYTHONPATH=. python benchmarks/against_generate.py --limit 12 --max-new-tokens 96 \\
        --draft checkpoints/smollm2-135m-dspark-block16 --prompts gsm8k.jsonl humaneval.jsonl

Greedy, batch 1. `generate` runs plain and with its prompt-lookup assistant, on a copy of the model
that nothing of ours has touched. Each figure is the time of whole requests, prompt included, over
the tokens they gave; who begins changes from prompt to prompt. Speed-ups are ratios of these within
a set, and their mean over the sets; outputs of `generate` may differ from ours by rounding.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ending import run
from transformers import AutoModelForCausalLM

from dspark.bench.prompt_sets import read_sets
from dspark.bench.report import environment, print_table
from dspark.config import TargetSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.decoding import DecodeParams, decode
from dspark.errors import ConfigError
from dspark.export.load import load_draft
from dspark.target import load, load_tokenizer
from dspark.target.catalog import NAMES, materialise

WAYS = ("draft", "plain", "generate", "prompt lookup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="one file, one set")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--lookup-tokens", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if min(args.limit, args.max_new_tokens, args.lookup_tokens) < 1:
        raise ConfigError("--limit, --max-new-tokens and --lookup-tokens must be at least 1")
    sets = read_sets(args.prompts)
    settings = TargetSettings(path=args.target)
    target = load(settings)
    draft = load_draft(args.draft, target=target)
    tokenizer: Any = load_tokenizer(settings)
    path = materialise(args.target) if args.target in NAMES else args.target
    library: Any = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
    library = library.to(target.device).eval()
    params = DecodeParams(args.max_new_tokens, num_draft_tokens=args.num_draft_tokens)

    def generate(ids: list[int], **how: Any) -> list[int]:
        inputs = torch.tensor([ids], device=target.device)
        out = library.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(target.eos_ids),
            pad_token_id=min(target.eos_ids),
            **how,
        )
        return [int(one) for one in out[0, len(ids) :]]

    accepted: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def drafted(ids: list[int]) -> list[int]:
        done = decode(target, draft, ids, params)
        accepted[current].append((done.stats.emitted, done.stats.rounds))
        return done.token_ids

    ways: dict[str, Callable[[list[int]], list[int]]] = {
        "draft": drafted,
        "plain": lambda ids: decode(target, None, ids, params).token_ids,
        "generate": generate,
        "prompt lookup": lambda ids: generate(ids, prompt_lookup_num_tokens=args.lookup_tokens),
    }
    spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    differing: dict[str, int] = defaultdict(int)
    current = "warm-up"
    for way in WAYS:
        ways[way]([1, 2, 3, 4, 5, 6, 7, 8])
    for current, prompts in sets.items():
        for number, messages in enumerate(prompts[: args.limit]):
            ids = generation_prompt_ids(tokenizer, messages, vocab_size=target.vocab_size)
            outputs = {}
            for turn in range(len(WAYS)):
                way = WAYS[(turn + number) % len(WAYS)]
                begun = time.perf_counter()
                outputs[way] = ways[way](ids)
                entry = spent[current, way]
                entry[0] += time.perf_counter() - begun
                entry[1] += len(outputs[way])
            assert outputs["draft"] == outputs["plain"]
            differing[current] += outputs["generate"] != outputs["plain"]
    rows, report = [], {}
    for name in differing:
        each = {way: 1e3 * spent[name, way][0] / spent[name, way][1] for way in WAYS}
        emitted, rounds = (sum(column) for column in zip(*accepted[name], strict=True))
        report[name] = {
            "accept_length": emitted / rounds,
            "ms_per_token": each,
            "speedup": {way: each[way] / each["draft"] for way in WAYS[1:]},
            "generate_differs": differing[name],
            "num_prompts": len(accepted[name]),
        }
    for name, one in report.items():
        rows.append(
            [
                name,
                f"{one['accept_length']:.3f}",
                *(f"{one['ms_per_token'][way]:.1f}" for way in WAYS),
                *(f"{one['speedup'][way]:.2f}" for way in WAYS[1:]),
                f"{one['generate_differs']} of {one['num_prompts']}",
            ]
        )
    count = len(report)
    mean = {
        "accept_length": sum(one["accept_length"] for one in report.values()) / count,
        **{way: sum(one["speedup"][way] for one in report.values()) / count for way in WAYS[1:]},
    }
    rows.append(
        ["mean", f"{mean['accept_length']:.3f}", "", "", "", ""]
        + [f"{mean[way]:.2f}" for way in WAYS[1:]]
        + [""]
    )
    print_table(
        f"{target.name}, {args.draft.name}, greedy, {args.max_new_tokens} tokens: ms a token",
        ["set", "accept length", *WAYS, *(f"over {way}" for way in WAYS[1:]), "generate differs"],
        rows,
    )
    if args.json:
        print(json.dumps({"sets": report, "mean": mean, "environment": environment()}))


if __name__ == "__main__":
    run(main)
