"""Judge drafts on known outputs: accept lengths of prompts, slots, confidence; a JSON line a set.

    PYTHONPATH=. python benchmarks/study/score.py --outputs outputs/corpus/outputs.json \\
        --out outputs/study/rows.jsonl outputs/study/stock-0 outputs/study/acc050-0

A draft is an exported directory or a training run (its newest checkpoint); its name in the rows is
that of the directory, NAME-SEED.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from dspark.acceptance import AcceptStats, pooled
from dspark.config import TargetSettings
from dspark.decoding import SamplingParams, draft_limit
from dspark.decoding.everywhere import Known, Proposed, propose_everywhere, rounds
from dspark.draft import DSparkDraftModel
from dspark.export.source import read_source
from dspark.target import Target, load


def score(
    target: Target,
    draft: DSparkDraftModel,
    head: dict[str, Any],
    taps: list[torch.Tensor],
    widths: list[int],
) -> list[dict[str, Any]]:
    """One row for each set, temperature and width."""
    rows = []
    every = head["rows"]
    most = max(draft_limit(draft.block_size, width) for width in widths)
    for temperature in sorted({row["temperature"] for row in every}):
        mine = [i for i, row in enumerate(every) if row["temperature"] == temperature]
        outputs = [
            Known(every[i]["prompt_ids"], every[i]["token_ids"], taps[i], every[i]["seed"])
            for i in mine
        ]
        proposed = propose_everywhere(
            draft, outputs, SamplingParams(temperature=temperature), most=most
        )
        for name in dict.fromkeys(every[i]["set"] for i in mine):
            chosen = [
                (p, every[i])
                for p, i in zip(proposed, mine, strict=True)
                if every[i]["set"] == name
            ]
            for width in widths:
                rows.append(
                    {
                        "set": name,
                        "temperature": temperature,
                        "width": width,
                        **_counts(chosen, width, head["max_new_tokens"]),
                    }
                )
    return rows


def _counts(
    chosen: list[tuple[Proposed, dict[str, Any]]], width: int, budget: int
) -> dict[str, Any]:
    stats: list[AcceptStats] = []
    rated: list[list[tuple[float, bool]]] = [[] for _ in range(width)]
    for proposed, _row in chosen:
        one, anchors = rounds(proposed, limit=width, budget=budget)
        stats.append(one)
        if proposed.confidence is not None:
            for anchor in anchors:
                # behind the output's end nobody knows what would have been kept
                known = min(width, len(proposed.hits) - anchor)
                hits = proposed.hits[anchor, :known].tolist()
                logits = proposed.confidence[anchor, :known].tolist()
                for k, (logit, hit) in enumerate(zip(logits, hits, strict=True)):
                    rated[k].append((logit, hit))
                    if not hit:
                        break
    total = pooled(stats, width)
    return {
        "prompts": [[one.rounds, one.emitted, one.accepted] for one in stats],
        "reached_at": total.reached_at,
        "kept_at": total.kept_at,
        "proposed_at": total.proposed_at,
        "histogram": total.histogram,
        "accept_length": round(total.accept_length, 4),
        **({"confidence": _confidence(rated)} if any(rated) else {}),
    }


def _confidence(rated: list[list[tuple[float, bool]]]) -> dict[str, float]:
    """Of reached slots, pooled: calibration error over 15 equal bins, Brier score, AUROC."""
    logits = torch.tensor([logit for slot in rated for logit, _ in slot], dtype=torch.float64)
    hits = torch.tensor([hit for slot in rated for _, hit in slot], dtype=torch.float64)
    chance = logits.sigmoid()
    bins = (chance * 15).long().clamp(max=14)
    gap = torch.zeros(15, dtype=torch.float64).index_add_(0, bins, chance - hits)
    order = chance.argsort()
    ranks = torch.empty_like(chance)
    ranks[order] = torch.arange(1, len(chance) + 1, dtype=torch.float64)
    positive = hits.sum()
    negative = len(hits) - positive
    auroc = (ranks[hits > 0].sum() - positive * (positive + 1) / 2) / (positive * negative)
    return {
        "count": len(hits),
        "ece": float(gap.abs().sum() / len(hits)),
        "brier": float(((chance - hits) ** 2).mean()),
        "auroc": float(auroc),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("drafts", nargs="+", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=None, help="proposals a round")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head = json.loads(args.outputs.read_text())
    target = load(TargetSettings(path=args.target), device=args.device)
    kept: dict[tuple[int, ...], list[torch.Tensor]] = {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for path in args.drafts:
        started = time.monotonic()
        draft = read_source(path, target).draft.to(target.device, target.dtype).eval()
        draft.attach(target.embed_weight, target.head_weight)
        if draft.layer_ids not in kept:
            kept.clear()
            kept[draft.layer_ids] = [
                target.features(
                    torch.tensor([[*row["prompt_ids"], *row["token_ids"]]]), draft.layer_ids
                ).taps[0]
                for row in head["rows"]
            ]
        widths = args.widths or [draft_limit(draft.block_size, None)]
        rows = score(target, draft, head, kept[draft.layer_ids], widths)
        with args.out.open("a", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps({"draft": path.name, **row}) + "\n")
        shown = " ".join(
            f"{row['set']}@{row['temperature']:g}/{row['width']} {row['accept_length']:.3f}"
            for row in rows
        )
        print(f"{path.name} {time.monotonic() - started:.0f} s: {shown}", flush=True)


if __name__ == "__main__":
    main()
