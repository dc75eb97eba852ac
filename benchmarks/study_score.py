"""Judge drafts on known outputs: accept lengths of prompts, slots, confidence; a JSON line a set.

    PYTHONPATH=. python benchmarks/study_score.py --outputs outputs/corpus/outputs.json \\
        --out outputs/study/rows.jsonl outputs/study/stock-0 outputs/study/acc050-0

A draft is an exported directory or a training run (its newest checkpoint); its name in the rows is
that of the directory; the report takes those that are called ARM-SEED.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from ending import run

from dspark.acceptance import pooled
from dspark.config import TargetSettings
from dspark.decoding import SamplingParams, draft_limit
from dspark.decoding.calibration import Outcomes, fit_temperatures, measures
from dspark.decoding.everywhere import Known, Proposed, propose_everywhere, rounds
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError, DataError
from dspark.export.source import read_source
from dspark.provenance import check_writable, read_object
from dspark.target import load
from dspark.target.documents import document_features


def score(
    draft: DSparkDraftModel,
    head: dict[str, Any],
    taps: list[torch.Tensor],
    widths: list[int],
) -> list[dict[str, Any]]:
    """One row for each set, temperature and width, and one of the confidence of all sets."""
    rows = []
    every, budget = head["rows"], head["max_new_tokens"]
    most = max(draft_limit(draft.block_size, width) for width in widths)
    for temperature in sorted({row["temperature"] for row in every}):
        mine = [i for i, row in enumerate(every) if row["temperature"] == temperature]
        outputs = [
            Known(every[i]["prompt_ids"], every[i]["token_ids"], taps[i], every[i]["seed"])
            for i in mine
        ]
        sampling = SamplingParams(temperature=temperature)
        proposed = propose_everywhere(draft, outputs, sampling, most=most)
        names = [every[i]["set"] for i in mine]
        for width in widths:
            walked = [rounds(one, limit=width, budget=budget) for one in proposed]
            for name in dict.fromkeys(names):
                stats = [
                    one for (one, _), other in zip(walked, names, strict=True) if other == name
                ]
                total = pooled(stats, width)
                rows.append(
                    {
                        "set": name,
                        "temperature": temperature,
                        "width": width,
                        "prompts": [[one.rounds, one.emitted, one.accepted] for one in stats],
                        "reached_at": total.reached_at,
                        "kept_at": total.kept_at,
                        "proposed_at": total.proposed_at,
                        "histogram": total.histogram,
                        "accept_length": round(total.accept_length, 4),
                    }
                )
            if draft.confidence_head is not None:
                anchors = [found for _, found in walked]
                figures = _confidence(proposed, anchors, width)
                rows.append({"set": "all", "temperature": temperature, "width": width, **figures})
    return rows


def _confidence(
    proposed: list[Proposed], anchors: list[list[int]], width: int
) -> dict[str, dict[str, Any]]:
    """Of every second prompt, as the head has it and with temperatures of the other prompts."""
    halves: list[list[Outcomes]] = [[], []]
    for number, (one, found) in enumerate(zip(proposed, anchors, strict=True)):
        assert one.confidence is not None
        kept_at = one.hits[:, :width].cumprod(-1).sum(-1).tolist()
        for anchor in found:
            told = min(width, len(one.hits) - anchor)
            logits = one.confidence[anchor, :width]
            halves[number % 2].append(Outcomes.of_round(logits, kept_at[anchor], told, width))
    fit, judge = (Outcomes.together(half) for half in halves)
    temperatures = fit_temperatures(fit)
    return {
        "temperatures": temperatures,
        "before": measures(judge),
        "after": measures(judge, temperatures),
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
    head = read_object(args.outputs, DataError)
    if "rows" not in head:
        raise DataError(f"{args.outputs} holds no outputs; study_outputs.py writes them")
    check_writable(args.out, "--out", ConfigError)
    target = load(TargetSettings(path=args.target), device=args.device)
    kept: dict[tuple[int, ...], list[torch.Tensor]] = {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for path in args.drafts:
        started = time.monotonic()
        draft = read_source(path, target).draft.to(target.device, target.dtype).eval()
        draft.attach(target.embed_weight, target.head_weight)
        if draft.layer_ids not in kept:
            kept.clear()
            texts = [torch.tensor([*row["prompt_ids"], *row["token_ids"]]) for row in head["rows"]]
            found = document_features(target, draft.layer_ids, texts, most=32)
            taps = {number: one.taps.clone() for number, one in found}
            kept[draft.layer_ids] = [taps[number] for number in range(len(texts))]
        widths = args.widths or [draft_limit(draft.block_size, None)]
        rows = score(draft, head, kept[draft.layer_ids], widths)
        with args.out.open("a", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps({"draft": path.name, **row}) + "\n")
        shown = " ".join(
            f"{row['set']}@{row['temperature']:g}/{row['width']} {row['accept_length']:.3f}"
            for row in rows
            if "accept_length" in row
        )
        print(f"{path.name} {time.monotonic() - started:.0f} s: {shown}", flush=True)


if __name__ == "__main__":
    run(main)
