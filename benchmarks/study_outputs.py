"""What the target answers to the evaluation prompts, once for all drafts: ids, no features.

    PYTHONPATH=. python benchmarks/study_outputs.py --target smollm2-135m --limit 100 \\
        --prompts gsm8k.jsonl humaneval.jsonl math500.jsonl mt-bench.jsonl \\
        --out outputs/corpus/outputs.json

Greedy and sampled with the noise that drafts are coupled by; both do not depend on a draft, so
every arm of the study is judged on the same tokens (`dspark.decoding.everywhere`).
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ending import run
from torch import Tensor

from dspark.bench.prompt_sets import read_sets
from dspark.config import TargetSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.corpus.generate import generate
from dspark.decoding.sampling import SamplingParams, gumbel
from dspark.errors import ConfigError
from dspark.provenance import check_writable, write_text
from dspark.target import load, load_tokenizer


class CoupledDraw:
    """`dspark.decoding.sampling.pick` for rows of different prompts and seeds."""

    def __init__(self, lengths: Sequence[int], seeds: Sequence[int], temperature: float) -> None:
        self._lengths = torch.tensor(lengths)
        self._seeds = torch.tensor(seeds)
        self._temperature = temperature

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._lengths.device)
        self._lengths, self._seeds = self._lengths[index], self._seeds[index]

    def __call__(self, logits: Tensor, step: int) -> Tensor:  # [T, V] -> [T] int64
        if self._temperature == 0:
            return logits.argmax(-1)
        if self._lengths.device != logits.device:
            self._lengths = self._lengths.to(logits.device)
            self._seeds = self._seeds.to(logits.device)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        noise = gumbel(self._seeds, self._lengths + step, ids)
        return (logits.float() / self._temperature + noise).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+", required=True, help="one file, one set")
    parser.add_argument("--limit", type=int, default=100, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.limit < 1 or args.max_new_tokens < 1:
        raise ConfigError("--limit and --max-new-tokens must be at least 1")
    for temperature in args.temperatures:
        SamplingParams(temperature=temperature)
    check_writable(args.out, "--out", ConfigError)
    sets = read_sets(args.prompts)
    settings = TargetSettings(path=args.target)
    target = load(settings, device=args.device)
    tokenizer: Any = load_tokenizer(settings)
    if args.ignore_eos:
        target.eos_ids = frozenset()
    rows: list[dict[str, Any]] = []
    for name, prompts in sets.items():
        for number, messages in enumerate(prompts[: args.limit]):
            ids = generation_prompt_ids(tokenizer, messages, vocab_size=target.vocab_size)
            for temperature in args.temperatures:
                rows.append(
                    {
                        "set": name,
                        "number": number,
                        "temperature": temperature,
                        "seed": args.seed + number,
                        "prompt_ids": ids,
                    }
                )
    started = time.monotonic()
    for temperature in args.temperatures:
        mine = [row for row in rows if row["temperature"] == temperature]
        prompt_ids = [row["prompt_ids"] for row in mine]
        draw: Any = CoupledDraw(
            [len(ids) for ids in prompt_ids], [row["seed"] for row in mine], temperature
        )
        limits = [
            min(args.max_new_tokens, target.max_position_embeddings - len(ids))
            for ids in prompt_ids
        ]
        for finished in generate(target, prompt_ids, limits, draw):
            for index, token_ids in finished:
                mine[index]["token_ids"] = token_ids
    seconds = time.monotonic() - started
    tokens = sum(len(row["token_ids"]) for row in rows)
    head = {
        "target": target.name,
        "max_new_tokens": args.max_new_tokens,
        "ignore_eos": args.ignore_eos,
        "dtype": str(target.dtype),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, json.dumps({**head, "rows": rows}))
    print(f"{len(rows)} outputs, {tokens:,} tokens in {seconds:.0f} s: {args.out}")


if __name__ == "__main__":
    run(main)
