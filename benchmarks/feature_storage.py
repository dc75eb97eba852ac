"""What storing features in fewer bits costs a draft: its objective's figures, by `capture.dtype`.

    OMP_NUM_THREADS=2 PYTHONPATH=. python benchmarks/feature_storage.py [--limit 24] [--json]

SmolLM2-135M answers prompts (by default the held-out ones of this project, as the shipped settings
sample them); its features of these rows are computed in float32, stored in every form and read
again; the released draft is evaluated on each with the trainer's own objective. Rows, anchors and
weights are the same throughout. Then the same rows are captured, and the report's times are shown.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from dspark import target as targets
from dspark.bench.report import environment, print_table
from dspark.config import CaptureSettings, DataSettings, LossSettings, SampleSettings
from dspark.config import SamplingSetting as Setting
from dspark.corpus.capture import capture
from dspark.corpus.dataset import ResponseRows
from dspark.corpus.prompts import read_prompts
from dspark.corpus.sampler import sample_responses
from dspark.corpus.storage import STORAGE, decoded, encode
from dspark.draft import DSparkDraftModel
from dspark.export.load import load_draft
from dspark.losses import Sums, denominators
from dspark.target import Features, Target
from dspark.training.features import gather_rows
from dspark.training.objective import Objective
from dspark.training.window import draw_pass

FIGURES = ("ce_loss", "l1_loss", "confidence_loss", "accept_length_loss", "tau")


def main() -> None:
    """Sample, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", default=["data/prompts/heldout.jsonl"])
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=64, help="blocks of a row")
    parser.add_argument("--draft", default="checkpoints/smollm2-135m-dspark-block16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    target = targets.load("smollm2-135m", dtype="float32", device="cpu")
    tokenizer = targets.load_tokenizer("smollm2-135m")
    draft = load_draft(options.draft, target=target, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        prompts = read_prompts(options.prompts, options.limit)
        settings = (Setting(temperature=0.0), Setting(temperature=0.7, top_p=0.95))
        ask = SampleSettings(
            prompts=tuple(options.prompts),
            out=str(out / "responses.jsonl"),
            settings=settings,
            max_new_tokens=options.new_tokens,
            batch_size=24,
        )
        sample_responses(target, tokenizer, prompts, ask)
        data = DataSettings(responses=(ask.out,), max_length=1024)
        rows = ResponseRows(data, tokenizer)
        found = measure(target, draft, rows, options.anchors)
        layers = draft.layer_ids
        times = [times_of(target, tokenizer, data, out, layers, name) for name in STORAGE]
    show(found, times, rows)
    if options.json:
        print(json.dumps({"storage": found, "capture": times, "environment": environment()}))


@torch.no_grad()
def measure(
    target: Target, draft: DSparkDraftModel, rows: ResponseRows, anchors: int
) -> list[dict[str, Any]]:
    """Figures of the draft for every form, and of final states without their norm."""
    objective = Objective(draft, target.logits, LossSettings())
    size = 3 * draft.block_size + 10
    sums = {name: torch.zeros(size, dtype=torch.float64) for name in STORAGE}
    same, shared, count = dict.fromkeys([*STORAGE, "no norm"], 0.0), {}, 0
    shared = dict(same)
    for number in range(len(rows)):
        one = draw_pass([rows[number]], [number], num_anchors=anchors, block_size=draft.block_size)
        whole = target.features(one.input_ids, (*draft.layer_ids, target.num_layers - 1))
        hidden = target.hidden_size
        exact = Features(whole.taps[..., :-hidden], whole.last_hidden)
        length = len(rows[number].input_ids)
        logits = target.logits(exact.last_hidden[0, :length])
        count += length

        def compare(
            name: str, states: torch.Tensor, length: int = length, logits: torch.Tensor = logits
        ) -> None:
            ours = target.logits(states[0, :length].float())
            same[name] += float((ours.argmax(-1) == logits.argmax(-1)).sum())
            least = torch.minimum(ours.softmax(-1), logits.softmax(-1))
            shared[name] += float(least.sum())

        compare("no norm", whole.taps[..., -hidden:])
        for name in STORAGE:
            stored = encode(exact, name)
            taps = decoded(stored.taps, stored.tap_scales)
            last = decoded(stored.last_hidden, stored.last_scales)
            compare(name, last)
            _, vector = objective(
                taps,
                gather_rows(last, one.target_rows),
                **one.blocks(),
                denominators=denominators(one.mask, LossSettings()),
                ramp=1.0,
            )
            sums[name] += vector
    found: list[dict[str, Any]] = []
    for name in (*STORAGE, "no norm"):
        line: dict[str, Any] = {"dtype": name}
        if name in STORAGE:
            figures = Sums.from_vector(sums[name]).metrics()
            line |= {key: figures[key] for key in FIGURES}
            line["token_bytes"] = STORAGE[name].token_bytes(
                target.hidden_size, len(draft.layer_ids)
            )
        found.append({**line, "argmax": same[name] / count, "overlap": shared[name] / count})
    return found


def times_of(
    target: Target, tokenizer: Any, data: DataSettings, out: Path, layers: Any, dtype: str
) -> dict[str, Any]:
    """One capture of the rows, in shards of 8 MiB so that some are written during the run."""
    place = out / dtype
    settings = CaptureSettings(out=str(place), dtype=dtype, batch_size=8, shard_bytes=8 << 20)
    report = capture(target, tokenizer, data, settings, layers)
    shutil.rmtree(place)
    names = ("rows", "tokens", "bytes", "shards", "forward_s", "other_s", "agreement")
    return {"dtype": dtype, **{name: getattr(report, name) for name in names}}


def show(found: list[dict[str, Any]], times: list[dict[str, Any]], rows: ResponseRows) -> None:
    """Two tables."""
    print_table(
        f"the released draft on {len(rows)} rows, {rows.num_tokens:,} tokens, by stored form",
        ["dtype", "bytes/token", *FIGURES, "arg max", "overlap"],
        [
            [
                one["dtype"],
                f"{one['token_bytes']:,}" if "token_bytes" in one else "",
                *(f"{one[key]:.5f}" if key in one else "" for key in FIGURES),
                f"{one['argmax']:.2%}",
                f"{one['overlap']:.2%}",
            ]
            for one in found
        ],
    )
    print_table(
        "capture of the same rows",
        ["dtype", "shards", "MB", "target s", "all else s", "all else / target", "agreement"],
        [
            [
                one["dtype"],
                str(one["shards"]),
                f"{one['bytes'] / 1e6:.1f}",
                f"{one['forward_s']:.2f}",
                f"{one['other_s']:.3f}",
                f"{one['other_s'] / one['forward_s']:.2%}",
                f"{one['agreement']:.2%}",
            ]
            for one in times
        ],
    )


if __name__ == "__main__":
    main()
