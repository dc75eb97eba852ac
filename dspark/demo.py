"""The main job end to end on a CPU: sample, distil, export, evaluate, serve; one table, one JSON.

Every stage leaves its result under the output directory and is skipped or continued when it is
there: `responses.jsonl`, `features/`, `train/` (from the released draft), `scratch/` (about as
long from nothing), `draft/`, then `report.json` and `report.png`.
"""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark import config_io, provenance
from dspark import target as targets
from dspark.acceptance import AcceptStats, pooled
from dspark.bench.evaluate import EvalReport, evaluate
from dspark.bench.plain import agreement, library_decode
from dspark.bench.plot import plot_demo
from dspark.bench.prompt_sets import read_sets
from dspark.bench.report import environment, print_table
from dspark.bench.serving import measure
from dspark.config import Config, EvalSettings
from dspark.corpus.capture import capture
from dspark.corpus.prompts import read_prompts
from dspark.corpus.sampler import sample_responses
from dspark.decoding import DecodeParams, replay
from dspark.errors import ConfigError, RunError
from dspark.export.hf import export_draft
from dspark.export.load import load_draft, read_config
from dspark.export.source import find_checkpoint, read_source
from dspark.serving.server import running
from dspark.target import Target
from dspark.training import program

__all__ = ["run"]

log = logging.getLogger(__name__)

CONFIG = Path("configs/smollm2-135m-demo.yaml")
HELD_OUT = "data/prompts/heldout.jsonl"
NUM_PROMPTS = 16
NEW_TOKENS = 64
_SERVED_PROMPTS = 2
_LIBRARY_TOKENS = 24
PLAIN_TOKENS = 6
NUM_DRAFT_TOKENS = 7
"""Of the released draft's 15: they and the anchor fill one tile of 8 verify rows on a CPU."""
_SCRATCH = (
    "draft.init_from=null",
    "draft.num_layers=1",
    "draft.block_size=4",
    "draft.markov_rank=128",
    "draft.markov_init=embedding",
    "loss.ce_weight=1.0",
    "train.steps=34",
    "train.num_anchors=48",
    "train.lr=0.006",
    "train.validation_prompts=[]",
)
"""A start from nothing that learns what a minute can teach, the most frequent pairs of tokens: few
slots, one layer, and cross entropy, since L1 hardly moves where q and p share nothing."""


@dataclass(frozen=True)
class _Drafts:
    """Accept lengths of three drafts along the same held-out outputs."""

    before: AcceptStats
    after: AcceptStats
    scratch: AcceptStats


def run(out: Path, released: Path) -> dict[str, Any]:
    """Run what is missing under ``out`` and report; ``released`` is the draft to start from.

    Raises:
        ConfigError: not started in a checkout, or the released draft is missing.
        RunError: a stage failed, or the draft changed the output.
        KeyboardInterrupt: stopped; the same call goes on.
    """
    config = _settings(out, released)
    _clear_if_changed(out, config)
    tokenizer = targets.load_tokenizer(config.target)
    target = targets.load(config.target)
    log.info("1/6 sample: %s answers %s", target.name, ", ".join(config.sample.prompts))
    prompts = read_prompts(config.sample.prompts, config.sample.limit)
    sampled = sample_responses(target, tokenizer, prompts, config.sample)
    log.info("2/6 distil: %s steps from %s", config.train.steps, released)
    layers = read_config(released).target_layer_ids or ()
    capture(target, tokenizer, config.data, config.capture, layers)
    _train(config)
    log.info("3/6 distil: about as long from nothing, for comparison")
    scratch_run = out / "scratch"
    _train(
        _changed(
            config,
            [
                *_SCRATCH,
                f"draft.target_layer_ids={list(layers)}",
                f"train.output_dir={scratch_run}",
            ],
        )
    )
    log.info("4/6 export, and check it in a clean process")
    record = _export(out, config, target, tokenizer)
    draft = load_draft(out / "draft", target=target)
    log.info("5/6 decode %d held-out prompts with and without the draft", NUM_PROMPTS)
    settings = EvalSettings(
        prompts=(HELD_OUT,),
        limit=NUM_PROMPTS,
        max_new_tokens=NEW_TOKENS,
        plain_tokens=PLAIN_TOKENS,
    )
    evaluation = evaluate(
        target,
        draft,
        tokenizer,
        read_sets(settings.prompts),
        settings,
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )
    drafts = _compare_drafts(target, evaluation, released, scratch_run)
    library = _time_library(target, evaluation)
    log.info("6/6 serve")
    messages = read_sets(settings.prompts)["heldout"][:_SERVED_PROMPTS]
    with running(target, draft, tokenizer) as address:
        served = measure(address, list(messages), max_tokens=NEW_TOKENS // 4)
    served.check()
    report = _report(config, evaluation, drafts, library, sampled.to_dict())
    report["served"] = served.to_dict()
    report["export_check"] = record.get("check")
    report["export_differs"] = _differs(target, released, out / "draft")
    report["environment"] = environment()
    provenance.write_json(out / "report.json", report)
    plot_demo(out / "report.png", [out / "train", out / "scratch"], evaluation)
    _print(report, out)
    if not report["lossless"]:
        raise RunError(f"the output with and without the draft differs; see {out}/report.json")
    return {key: value for key, value in report.items() if not isinstance(value, dict)}


def _settings(out: Path, released: Path) -> Config:
    for path, what in ((CONFIG, "settings"), (Path(HELD_OUT), "prompts")):
        if not path.exists():
            raise ConfigError(f"{path} ({what} of the demo) is missing: run it in a checkout")
    if not (released / "config.json").exists():
        raise ConfigError(f"--draft {released} holds no exported draft (no config.json)")
    return config_io.load(
        CONFIG,
        [
            f"draft.init_from={released}",
            f"sample.out={out}/responses.jsonl",
            f"data.responses=[{out}/responses.jsonl]",
            f"capture.out={out}/features",
            "train.features=offline",
            f"data.shards={out}/features",
            f"train.output_dir={out}/train",
        ],
    )


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    base = config.model_dump(mode="json")
    return config_io.from_mapping(config_io.merge(base, config_io.parse_overrides(overrides)))


def _clear_if_changed(out: Path, config: Config) -> None:
    """Results of other settings are no start for these."""
    marker = out / "config.yaml"
    if marker.exists() and marker.read_text(encoding="utf-8") != config_io.dump(config):
        log.warning("%s was made with other settings: starting afresh", out)
        for name in ("responses.jsonl", "features", "train", "scratch", "draft"):
            place = out / name
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    config_io.save(config, marker)


def _train(config: Config) -> None:
    report = program.run(config)
    if report.status == "interrupted":
        raise KeyboardInterrupt
    log.info("%s: %s at step %d", config.train.output_dir, report.status, report.step)


def _export(out: Path, config: Config, target: Target, tokenizer: Any) -> dict[str, Any]:
    return export_draft(
        find_checkpoint(Path(config.train.output_dir)),
        out / "draft",
        target,
        slim=True,
        tokenizer=tokenizer,
    )


def _compare_drafts(
    target: Target,
    evaluation: EvalReport,
    released: Path,
    scratch_run: Path,
) -> _Drafts:
    """The other two along the outputs that were just decoded with the new one."""
    ids, runs = evaluation.prompt_ids["heldout"], evaluation.runs["heldout"]
    drafts = (
        load_draft(released, target=target),
        read_source(find_checkpoint(scratch_run), target).draft.to(target.device),
    )
    each: list[list[AcceptStats]] = [[], []]
    for prompt, run in zip(ids, runs, strict=True):
        # both read the same layers
        taps = target.features(torch.tensor([[*prompt, *run.plain]]), drafts[0].layer_ids).taps[0]
        for stats, draft in zip(each, drafts, strict=True):
            most = min(NUM_DRAFT_TOKENS, draft.block_size)
            params = DecodeParams(NEW_TOKENS, num_draft_tokens=most)
            stats.append(replay(target, draft, prompt, run.plain, params, taps=taps))
    before, scratch = (pooled(stats, stats[0].block_size) for stats in each)
    after = [run.drafted.stats for run in runs]
    return _Drafts(before, pooled(after, after[0].block_size), scratch)


def _time_library(target: Target, evaluation: EvalReport) -> dict[str, float]:
    """The library's own decoding of one of the prompts: its pace, and how far it agrees."""
    prompt, run = evaluation.prompt_ids["heldout"][0], evaluation.runs["heldout"][0]
    library_decode(target, prompt, 4)
    tokens, seconds = library_decode(target, prompt, _LIBRARY_TOKENS)
    return {
        "tpot_ms": 1000 * sum(seconds) / max(1, len(seconds)),
        "agreement": agreement(tokens, run.plain[: len(tokens)]),
    }


def _differs(target: Target, released: Path, exported: Path) -> bool:
    one, other = (load_draft(path, target=target) for path in (released, exported))
    ours, theirs = dict(one.trainable()), dict(other.trainable())
    return any(not bool((ours[name] == theirs[name]).all()) for name in ours)


def _report(
    config: Config,
    evaluation: EvalReport,
    drafts: _Drafts,
    library: dict[str, float],
    sampled: dict[str, Any],
) -> dict[str, Any]:
    summary = evaluation.summary()
    tpot, plain = summary["tpot_ms"], summary["tpot_ms_plain"]
    return {
        "target": config.target.path,
        "accept_length": summary["accept_length"],
        "accepted_drafts": summary["accepted_drafts"],
        "tpot_ms": tpot,
        "tpot_ms_plain": plain,
        "speedup": plain / tpot,
        "tokens_per_s": 1000 / tpot,
        "tokens_per_s_plain": 1000 / plain,
        "tpot_ms_library": library["tpot_ms"],
        "speedup_over_library": library["tpot_ms"] / tpot,
        "library_agreement": library["agreement"],
        "lossless": summary["lossless"],
        "num_prompts": summary["num_prompts"],
        "held_out": HELD_OUT,
        "tau_before": drafts.before.accept_length,
        "tau_after": drafts.after.accept_length,
        "tau_from_scratch": drafts.scratch.accept_length,
        "steps": config.train.steps,
        "evaluation": summary,
        "drafts": {name: AcceptStats(**one).summary() for name, one in asdict(drafts).items()},
        "sampled": sampled,
    }


def _print(report: dict[str, Any], out: Path) -> None:
    print_table(
        f"{report['target']}: {report['num_prompts']} held-out prompts, {NEW_TOKENS} tokens",
        ["", "plain", "with draft"],
        [
            ["TPOT (ms)", report["tpot_ms_plain"], report["tpot_ms"]],
            ["tokens/s", report["tokens_per_s_plain"], report["tokens_per_s"]],
            ["accept length", 1.0, report["accept_length"]],
            ["identical output", None, report["lossless"]],
        ],
        note=(
            f"transformers' own plain loop: {report['tpot_ms_library']:.1f} ms a token, equal over "
            f"{report['library_agreement']:.0%} of the output; details in {out}/report.json"
        ),
    )
    print_table(
        "accept length on these prompts",
        ["draft", "tokens a round"],
        [
            ["released, before this run", report["tau_before"]],
            [f"after {report['steps']} more steps", report["tau_after"]],
            ["from nothing, about as long", report["tau_from_scratch"]],
        ],
    )
