"""A trained draft to a Hugging Face directory that SGLang, vLLM, DeepSpec's class and we can load.

    config.json         in the layout that was asked for, `layouts`; with the temperatures of the
                        confidence head where the draft was calibrated
    model.safetensors   bfloat16, DeepSpec's names; the target's two tables where readers want them
    README.md           the card
    provenance.json     run, target, versions, and the list of these files
    check.json          prompts and accept length of the export check
    tokenizer files     the target's, when a tokenizer is given

The directory is written under another name, checked there, and renamed last, so that what has its
name is complete and has passed.
"""

import copy
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark import provenance
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.errors import CheckpointError, ConfigError
from dspark.export.calibrate import Calibration, calibrate
from dspark.export.card import CardFacts, render
from dspark.export.check import Probe, check_in_clean_process, measure, save_probe
from dspark.export.config_json import family_of_target, to_json
from dspark.export.layouts import LAYOUTS, Format, Origin, unreadable, write_config
from dspark.export.load import load_draft
from dspark.export.place import PROVENANCE_NAME, check_place, filling
from dspark.export.prompts import fixed_prompts
from dspark.export.source import Source, Weights, read_source
from dspark.export.template import template_sha256
from dspark.export.tensors import FROZEN, WEIGHTS_NAME
from dspark.target import Target
from dspark.target.catalog import hub_id

__all__ = ["export_draft"]

log = logging.getLogger(__name__)

_PROBE_TOKENS = 64


def export_draft(
    source: Path | str | DSparkDraftModel,
    out: Path | str,
    target: Target,
    *,
    weights: Weights = "best",
    format: Format = "hf",
    slim: bool = False,
    tokenizer: Any = None,
    facts: CardFacts | None = None,
    probe: Probe | None = None,
    calibration: Calibration | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Export ``source`` to the directory ``out`` and return what its provenance.json says.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, else its newest), an exported
            draft, or a model.
        weights: which of a checkpoint's: those that the trainer found to accept more (best), those
            of its step (raw), or their average over the steps (ema).
        format: who will read it; what an engine cannot serve is refused.
        slim: write no copies of the target's embedding and head. Our loader and engines share the
            target's; DeepSpec's class needs its own.
        tokenizer: the target's, to be written along; its template also renders the fixed prompts
            of the check when no other prompts are known.
        facts: for the card, beside what the checkpoint tells.
        probe: prompts and figure of the check; None takes the trainer's (check.json in the
            checkpoint), and without one decodes fixed prompts with the unrounded weights first.
        calibration: prompts to fit the confidence head's temperatures with; None, or a fit that
            does not gain, keeps those that an exported draft has.
        check: reload in a clean process and compare; False leaves it out, and the card says so.
        overwrite: replace a directory that holds files not written by an export.

    Raises:
        CheckpointError: the source cannot be exported, or ``out`` must not be replaced.
        ConfigError: ``format`` does not fit this draft or ``slim``, there are no prompts to check
            by, nothing to calibrate or too few rounds for it, or ``out`` is no place that can be
            written.
        RunError: the check failed, or the disk refused.
    """
    place = Path(out).expanduser().absolute()
    origin = None if isinstance(source, DSparkDraftModel) else Path(source).expanduser()
    check_place(place, origin, overwrite=overwrite)
    read = read_source(source, target, weights)
    if reason := unreadable(read.draft.config, format):
        raise ConfigError(f"--format {format}: {reason}")
    if slim and LAYOUTS[format].needs_tables:
        raise ConfigError(
            f"--slim: {LAYOUTS[format].reader} needs the embedding and the output head in the file"
        )
    tables = LAYOUTS[format].tables and not slim
    shape = copy.deepcopy(read.draft.config)
    with filling(place) as aside:
        record = _write(read, aside, place, target, format, tables, tokenizer)
        if calibration is not None:
            # of the files: what is rounded there is what will be served
            fitted = calibrate(load_draft(aside, target=target), target, calibration)
            record["calibration"] = fitted.report
            if fitted.report["gains"]:
                shape.sts_temperatures = list(fitted.temperatures)
                _write_config(shape, aside, target, format)
        verdict = None
        if check:
            asked = probe or read.probe or _own_probe(read, target, tokenizer)
            save_probe(aside, replace(asked, calibration=record.get("calibration")))
            verdict = check_in_clean_process(aside, target)
        if verdict and "warning" in verdict:
            log.warning("export check: %s", verdict["warning"])
        _finish(read, shape, aside, place, record, facts, tables, verdict)
    return record


def _write(
    read: Source,
    aside: Path,
    place: Path,
    target: Target,
    format: Format,
    tables: bool,
    tokenizer: Any,
) -> dict[str, Any]:
    """config.json, weights and tokenizer; returns the provenance."""
    draft = read.draft
    weights = {name: parameter.detach() for name, parameter in draft.trainable()}
    if tables:
        # clones: a tied target has one table under two names, which safetensors refuses
        both = (target.embed_weight.clone(), target.head_weight.clone())
        weights.update(zip(FROZEN, both, strict=True))
    provenance.save_tensors(_rounded(weights, place), aside / WEIGHTS_NAME)
    _write_config(draft.config, aside, target, format)
    record: dict[str, Any] = provenance.collect(
        kind="dspark-export",
        format=format,
        target={
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "architecture": target.architecture,
        },
        source=str(read.path) if read.path else None,
        step=read.step,
        weights=read.weights,
        trainer_accept_length=read.accept_length,
        num_parameters=sum(parameter.numel() for _, parameter in draft.trainable()),
        config=read.config.model_dump(mode="json") if read.config else None,
        training=read.provenance,
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
        record["template_sha256"] = template_sha256(tokenizer)
    return record


def _write_config(shape: DSparkConfig, aside: Path, target: Target, format: Format) -> None:
    origin = Origin(
        family=family_of_target([target.architecture]),
        verifier=hub_id(target.name),
        verifier_architectures=[target.architecture] if target.architecture else [],
    )
    provenance.write_json(aside / "config.json", write_config(shape, format, origin))


def _rounded(weights: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{place} was not written: {', '.join(broken)} holds NaN or infinity, so the training "
            "has diverged; export an earlier checkpoint"
        )
    return {
        name: tensor.to(device="cpu", dtype=torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }


def _own_probe(read: Source, target: Target, tokenizer: Any) -> Probe:
    if tokenizer is None:
        raise ConfigError(
            "the export check has no prompts: the checkpoint records none, and without a "
            "tokenizer none can be made; give one of the two, or leave the check out"
        )
    prompts = fixed_prompts(tokenizer)
    stats = measure(target, read.draft, prompts, _PROBE_TOKENS)
    return Probe(
        prompt_ids=prompts,
        max_new_tokens=_PROBE_TOKENS,
        expected=stats.accept_length,
        expected_from="the checkpoint's unrounded weights in the exporting process",
    )


def _finish(
    read: Source,
    shape: DSparkConfig,
    aside: Path,
    place: Path,
    record: dict[str, Any],
    facts: CardFacts | None,
    tables: bool,
    verdict: dict[str, Any] | None,
) -> None:
    """Card and provenance, which tell the result of the check."""
    told = _with_run(facts or CardFacts(), read)
    record["check"] = verdict
    record["card"] = asdict(told)
    card = render(
        told,
        config=to_json(shape, architecture=""),
        record=record,
        tables=tables,
        path=place.name,
    )
    provenance.write_text(aside / "README.md", card)
    record["files"] = sorted([*(path.name for path in aside.iterdir()), PROVENANCE_NAME])
    provenance.write_json(aside / PROVENANCE_NAME, record)


def _with_run(facts: CardFacts, read: Source) -> CardFacts:
    """``facts`` with what the checkpoint says where they say nothing."""
    if read.config is None:
        return facts
    config = read.config
    loss = config.loss
    run = {
        "optimizer steps": read.step,
        "weights": (
            f"their average over the steps (EMA, decay {config.train.ema_decay:g})"
            if read.weights == "ema"
            else "those of the last of these steps"
        ),
        "learning rate": f"{config.train.lr:g}, {config.train.schedule}",
        "anchors a row": config.train.num_anchors,
        "loss weights": {
            "CE": loss.ce_weight,
            "L1": loss.l1_weight,
            "confidence": loss.confidence_weight,
            "accept length": loss.accept_length_weight,
        },
        "seed": config.train.seed,
    }
    if isinstance(data := read.provenance.get("data"), dict) and data.get("thinking"):
        run["rows by the template's thinking switch"] = data["thinking"]
    if read.accept_length is not None:
        run["accept_length over the trainer's validation prompts"] = f"{read.accept_length:.3f}"
    sampling = [one.model_dump(mode="json") for one in config.sample.settings]
    return replace(facts, training=facts.training or run, sampling=facts.sampling or sampling)
