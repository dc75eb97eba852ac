"""Time, rate and memory of a training step of a draft of true shape, on this GPU.

    PYTHONPATH=. python benchmarks/training_step.py [--length 4096] [--anchors 512] [--json]
    PYTHONPATH=. accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 1 \
        benchmarks/training_step.py

Weights, features and tokens are SYNTHETIC and the target does not run: what is timed is the draft's
forward pass, objective, backward pass, clipping and AdamW, through the trainer's own engine. MFU
is `dspark.training.flops` over the device's peak.
"""

import argparse
import json
import os
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from ending import needs_gpu, run

from dspark.bench.report import environment, print_table
from dspark.config import LossSettings, TrainSettings
from dspark.corpus.dataset import Row
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.export.config_json import from_json
from dspark.losses import denominators
from dspark.training import build, launch
from dspark.training.engine import autocast_dtype, build_engine, can_compile
from dspark.training.flops import needed_flops
from dspark.training.objective import Objective
from dspark.training.window import Pass, draw_pass

_WARM_UP = 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--draft", type=Path, default=Path("configs/drafts/ling-3.0-flash-dspark.json")
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--documents", type=int, default=1, help="of a row, packed")
    parser.add_argument("--rows", type=int, default=1, help="of a forward pass")
    parser.add_argument("--anchors", type=int, default=512, help="of a row")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes of a step")
    parser.add_argument("--attention", choices=("auto", "dense"), default="auto")
    parser.add_argument("--objective", choices=("kernels", "chunked"), default="kernels")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute", action="store_true", help="train.gradient_checkpointing")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="bf16, dense")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    needs_gpu(Path(__file__).name)
    settings = TrainSettings(mixed_precision="bf16", batch_size=options.rows)
    accelerator = launch.start(settings, device="auto")
    report = measure(options, settings, accelerator)
    if options.json:
        print(json.dumps(report))


def measure(
    options: argparse.Namespace, settings: TrainSettings, accelerator: Accelerator
) -> dict[str, Any]:
    """Median over steps behind a warm-up."""
    config = from_json(json.loads(options.draft.read_text()), str(options.draft))
    draft = synthetic_draft(config, accelerator.device)
    draft.sparse_attention = options.attention == "auto"
    strategy = launch.strategy_of(os.environ)
    options.compile = options.compile and can_compile(strategy, accelerator)
    if options.compile:
        draft.compile_training()
    if options.recompute:
        build.checkpoint_layers(draft)
    loss = LossSettings(one_pass=options.objective == "kernels")
    named = dict(draft.trainable())
    count = sum(parameter.numel() for parameter in named.values())
    objective = Objective(
        draft,
        draft.base_logits,
        loss,
        autocast=autocast_dtype(strategy, accelerator.mixed_precision),
    )
    engine = build_engine(strategy, accelerator, objective, named, settings, None)
    passes = [synthetic_pass(options, config, seed) for seed in range(options.accumulate)]
    flops = sum(needed_flops(config, one) for one in passes)
    device = [
        (one.to(accelerator.device), *features(one, config, accelerator.device)) for one in passes
    ]
    divisors = sum(denominators(one.mask, loss) for one in passes)
    assert isinstance(divisors, torch.Tensor)
    divisors = divisors.to(accelerator.device)

    def step() -> torch.Tensor:
        for number, (one, taps, hidden) in enumerate(device, 1):
            with engine.part(last=number == len(device)):
                found, _ = engine(
                    taps,
                    hidden,
                    **one.blocks(),
                    denominators=divisors,
                    ramp=1.0,
                )
                engine.backward(found)
        return engine.step(1e-4)

    for _ in range(_WARM_UP):
        norm = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # one behind the other without waiting, as the trainer enqueues them
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        norm = step()
        mark.record()
    torch.cuda.synchronize()
    milliseconds = median(begin.elapsed_time(end) for begin, end in pairwise(marks))
    tokens = sum(one.num_tokens for one in passes)
    report = {
        "weights": "synthetic",
        "engine": strategy,
        "trainable": count,
        **{key: getattr(options, key) for key in ("length", "documents", "rows", "anchors")},
        **{
            key: getattr(options, key)
            for key in ("accumulate", "attention", "objective", "recompute", "compile")
        },
        "step_ms": milliseconds,
        "tokens_per_s": tokens / milliseconds * 1e3,
        "slots_per_s": sum(int(one.mask.sum()) for one in passes) / milliseconds * 1e3,
        "tflop": flops / 1e12,
        "mfu": flops / milliseconds / 1e9 / options.peak_tflops,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "grad_norm": float(norm),
        "environment": environment(),
    }
    print_table(
        f"training step, {strategy}, {torch.cuda.get_device_name()}",
        ["", ""],
        [
            [
                "tokens of a row x rows x passes",
                f"{options.length:,} x {options.rows} x {options.accumulate}",
            ],
            ["documents, anchors of a row", f"{options.documents}, {options.anchors}"],
            ["attention, objective", f"{options.attention}, {options.objective}"],
            ["step (ms)", f"{milliseconds:,.1f}"],
            ["tokens/s", f"{report['tokens_per_s']:,.0f}"],
            ["needed TFLOP, MFU", f"{flops / 1e12:.1f}, {report['mfu']:.1%}"],
            ["peak memory (GiB)", f"{report['peak_gib']:.1f}"],
        ],
        note=f"SYNTHETIC weights and features, {count / 1e6:.0f}M trainable parameters",
    )
    return report


def synthetic_draft(config: DSparkConfig, device: torch.device) -> DSparkDraftModel:
    """Random fp32 masters over a random frozen bf16 embedding and head."""
    torch.manual_seed(0)
    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    rotary = type(draft.rotary_emb)(config).to(device)
    draft.to_empty(device=device)
    draft.rotary_emb = rotary
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.02)
    shape = (config.vocab_size, config.hidden_size)
    tables = [
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for _ in "ab"
    ]
    draft.attach(*tables)
    draft.train()
    return draft


def synthetic_pass(options: argparse.Namespace, config: DSparkConfig, seed: int) -> Pass:
    """Rows whose every token is supervised."""
    generator = torch.Generator().manual_seed(seed)
    each = options.length // options.documents
    rows = []
    for number in range(options.rows):
        tokens = each * options.documents
        ids = torch.randint(config.vocab_size, (tokens,), generator=generator)
        parts = tuple((f"{number}/{i}", each) for i in range(options.documents))
        rows.append(
            Row(
                str(number),
                ids,
                torch.ones(tokens, dtype=torch.bool),
                documents=parts if options.documents > 1 else (),
            )
        )
    return draw_pass(
        rows,
        [seed * options.rows + number for number in range(options.rows)],
        num_anchors=options.anchors,
        block_size=int(config.block_size or 0),
        pad_to=128,
    )


def features(
    one: Pass, config: DSparkConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps [B, S, F*D] and the hidden states [N, K, D] behind the labels, drawn on the device."""
    width = len(config.target_layer_ids or ()) * config.hidden_size
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    return (
        torch.randn(*one.input_ids.shape, width, **half),
        torch.randn(*one.mask.shape, config.hidden_size, **half),
    )


if __name__ == "__main__":
    run(main)
