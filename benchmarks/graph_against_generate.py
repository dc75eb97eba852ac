"""The captured step with a draft beside itself without one, and transformers' `generate`, on a GPU.

    PYTHONPATH=. python benchmarks/graph_against_generate.py --limit 16 --max-new-tokens 256 \\
        --draft checkpoints/smollm2-135m-dspark-block16 --prompts gsm8k.jsonl humaneval.jsonl

Real weights, real prompts, batch 1, one process; who begins changes from prompt to prompt. TPOT is
the time from a request's first token to its last over the tokens behind the first, pooled over all
prompts of a set; with `generate` the time of one token alone is taken off. Each prompt is also
sampled (temperature 1, top-p 0.95, a seed of its own) with the draft and without, and outputs that
differ are counted: there must be none.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ending import run
from transformers import AutoModelForCausalLM

from dspark.bench.prompt_sets import read_sets
from dspark.bench.report import environment, print_table
from dspark.config import TargetSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.decoding import DecodeParams, SamplingParams
from dspark.errors import ConfigError
from dspark.export.load import load_draft
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.step import GraphStep
from dspark.target import HFTarget, LingTarget, load, load_tokenizer
from dspark.target.catalog import NAMES, materialise

WAYS = ("draft", "plain", "generate")
Timed = tuple[list[int], float]
"""Tokens of an answer, and seconds from the first to the last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="one file, one set")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set")
    parser.add_argument("--generate-limit", type=int, default=4, help="of them by generate")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if min(args.limit, args.generate_limit) < 1 or args.max_new_tokens < 2:
        raise ConfigError("limits must be at least 1, and --max-new-tokens at least 2")
    sets = read_sets(args.prompts)
    if not torch.cuda.is_available():
        raise ConfigError("the captured step needs a GPU, and torch finds none here")
    settings = TargetSettings(path=args.target, dtype="bfloat16", device="cuda")
    target = load(settings)
    assert isinstance(target, HFTarget | LingTarget)
    draft = load_draft(args.draft, target=target)
    tokenizer: Any = load_tokenizer(settings)
    # a copy that nothing of ours has touched; Ling's needs packages that are not ours
    library: Any = None
    if isinstance(target, HFTarget):
        path = materialise(args.target) if args.target in NAMES else args.target
        library = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
        library = library.to(target.device).eval()
    options = {"context": min(args.context, target.max_position_embeddings)}
    limit = args.num_draft_tokens
    with_draft = GraphDecoder(GraphStep(target, draft, num_draft_tokens=limit, **options))
    without = GraphDecoder(GraphStep(target, None, **options))
    greedy = DecodeParams(args.max_new_tokens)
    accepted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    current = "warm-up"

    def ours(decoder: GraphDecoder, ids: list[int], params: DecodeParams) -> Timed:
        tokens: list[int] = []
        begun = 0.0
        for commit in decoder.stream(ids, params):
            if not tokens:
                begun = time.perf_counter()
            elif decoder is with_draft and params is greedy:
                accepted[current][0] += len(commit.token_ids)
                accepted[current][1] += 1
            tokens += commit.token_ids
        return tokens, time.perf_counter() - begun

    def generate(ids: list[int]) -> Timed:
        inputs = torch.tensor([ids], device=target.device)
        took = []
        for most in (1, args.max_new_tokens):
            begun = time.perf_counter()
            out = library.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=sorted(target.eos_ids),
                pad_token_id=min(target.eos_ids),
            )
            torch.cuda.synchronize()
            took.append(time.perf_counter() - begun)
        return [int(one) for one in out[0, len(ids) :]], took[1] - took[0]

    ways: dict[str, Callable[[list[int]], Timed]] = {
        "draft": lambda ids: ours(with_draft, ids, greedy),
        "plain": lambda ids: ours(without, ids, greedy),
        "generate": generate,
    }
    shown = WAYS if library is not None else WAYS[:2]
    for way in shown:
        ways[way]([1, 2, 3, 4, 5, 6, 7, 8])
    spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    unequal: dict[str, int] = defaultdict(int)
    for current, prompts in sets.items():
        for number, messages in enumerate(prompts[: args.limit]):
            ids = generation_prompt_ids(tokenizer, messages, vocab_size=target.vocab_size)
            outputs = {}
            for turn in range(len(shown)):
                way = shown[(turn + number) % len(shown)]
                if way == "generate" and number >= args.generate_limit:
                    continue
                outputs[way], took = ways[way](ids)
                entry = spent[current, way]
                entry[0] += took
                entry[1] += len(outputs[way]) - 1
            unequal["greedy"] += outputs["draft"] != outputs["plain"]
            sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=1000 + number)
            sampled = replace(greedy, sampling=sampling)
            one, other = (ours(way, ids, sampled)[0] for way in (with_draft, without))
            unequal["sampled"] += one != other
            if library is not None and "generate" in outputs:
                unequal["generate"] += outputs["generate"] != outputs["plain"]
    total = dict.fromkeys(shown, 0.0)
    rows, report = [], {}
    for name in sets:
        each = {way: 1e3 * spent[name, way][0] / max(spent[name, way][1], 1) for way in shown}
        total = {way: total[way] + each[way] / len(sets) for way in shown}
        emitted, rounds = accepted[name]
        report[name] = {"accept_length": emitted / max(rounds, 1), "tpot_ms": each}
    for name, one in [*report.items(), ("mean of the sets", {"tpot_ms": total})]:
        each = one["tpot_ms"]  # type: ignore[assignment]
        rows.append(
            [name, f"{one['accept_length']:.3f}" if "accept_length" in one else ""]
            + [f"{each[way]:.3f}" for way in shown]
            + [f"{each[way] / each['draft']:.2f}" for way in shown[1:]]
        )
    print_table(
        f"{target.name}, {args.draft.name}, greedy, {args.max_new_tokens} tokens: TPOT in ms",
        ["set", "accept length", *shown, *(f"over {way}" for way in shown[1:])],
        rows,
    )
    count = sum(min(args.limit, len(prompts)) for prompts in sets.values())
    print(f"outputs that differ, of {count} prompts: {json.dumps(unequal)}")
    if args.json:
        print(json.dumps({"sets": report, "mean_tpot_ms": total, "differing": unequal,
                          "num_prompts": count, "environment": environment()}))  # fmt: skip


if __name__ == "__main__":
    run(main)
