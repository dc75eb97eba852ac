"""`dspark train`, `export` and `convert`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dspark.cli.common import Json, finish, override, read_config

__all__ = ["Format", "register"]

# those of `export.layouts`, which is not imported before it is needed
Format = Annotated[
    Literal["hf", "sglang", "vllm", "deepspec"],
    typer.Option(help="Who will read it; hf: all of them. See docs/formats.md."),
]
Slim = Annotated[bool, typer.Option("--slim", help="No copies of the target's embedding and head.")]


def _train(context: typer.Context) -> None:
    """Distil a draft; the same as `train.py`, for `accelerate launch -m dspark train`.

    Example: dspark train --config configs/tiny.yaml train.steps=20
    """
    from dspark.training.program import process

    process(context.args)


def _export(
    run: Annotated[Path, typer.Argument(help="Run directory or checkpoint-<step>.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    target: Annotated[str, typer.Option(help="The target it was trained for.")] = "smollm2-135m",
    dtype: Annotated[
        str | None, typer.Option(help="auto, bfloat16 or float32; none: as it was trained for.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Of the target: auto, cpu, cuda, or cuda:0+cuda:1 for its layers.")
    ] = "auto",
    weights: Annotated[
        Literal["best", "raw", "ema"],
        typer.Option(
            help="Of a run with train.ema_decay: what validation chose, the weights, their average."
        ),
    ] = "best",
    format: Format = "hf",
    slim: Slim = False,
    licence: Annotated[str | None, typer.Option(help="SPDX id for the card.")] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Prompts (file, glob or hub id) to fit the confidence head's temperatures with; "
            "not those you report on. Left out, nothing is fitted."
        ),
    ] = None,
    calibrate_limit: Annotated[
        int | None, typer.Option(min=2, help="First N prompts of each file; none: 128.")
    ] = None,
    calibrate_temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=2.0, help="Of their answers; what will be served. 0 or none: greedy."
        ),
    ] = None,
    check: Annotated[bool, typer.Option(help="Reload in a clean process and re-measure.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace a foreign directory.")] = False,
    as_json: Json = False,
) -> None:
    """Write a training checkpoint as a Hugging Face draft, and check that it still drafts.

    Example: dspark export outputs/train outputs/draft --target smollm2-135m
    """
    from dspark.bench.evaluate import encode_sets
    from dspark.bench.prompt_sets import read_sets
    from dspark.errors import ConfigError
    from dspark.export.calibrate import Calibration
    from dspark.export.card import CardFacts
    from dspark.export.hf import export_draft
    from dspark.export.source import target_dtype
    from dspark.target import load, load_tokenizer

    given = {"--calibrate-limit": calibrate_limit, "--calibrate-temperature": calibrate_temperature}
    for option, value in given.items():
        if calibrate is None and value is not None:
            raise ConfigError(f"{option} {value} is for --calibrate; give that too")
    prompts = {} if calibrate is None else read_sets([calibrate])

    dtype = target_dtype(run) if dtype is None else dtype
    config = read_config(
        None,
        None,
        override("target.path", target),
        override("target.dtype", dtype),
        override("target.device", device),
    )
    tokenizer = load_tokenizer(config.target)
    loaded = load(config.target)
    calibration = None
    if calibrate is not None:
        encoded, _ = encode_sets(loaded, tokenizer, prompts, calibrate_limit or 128)
        calibration = Calibration(
            prompt_ids=[ids for one in encoded.values() for ids in one],
            name=", ".join(encoded),
            temperature=calibrate_temperature or 0.0,
        )
    record = export_draft(
        run,
        out,
        loaded,
        weights=weights,
        format=format,
        slim=slim,
        tokenizer=tokenizer,
        facts=CardFacts(licence=licence) if licence else None,
        calibration=calibration,
        check=check,
        overwrite=overwrite,
    )
    checked = record.get("check")
    figure = f", accept_length {checked['accept_length']:.3f} when decoded again" if checked else ""
    print(f"wrote {out}{figure}")
    if found := record.get("calibration"):
        before, after = (100 * found[when]["survival"]["ece"] for when in ("before", "after"))
        print(
            f"confidence temperatures fitted on {found['rounds']} rounds of "
            f"{found['num_prompts']} prompts: error of survival {before:.1f}% before, "
            f"{after:.1f}% after"
            + ("" if found["gains"] else "; not written, for the Brier score does not gain")
        )
    finish(record, as_json)


def _convert(
    draft: Annotated[Path, typer.Argument(metavar="IN", help="Exported draft, of any trainer.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    to: Format,
    target: Annotated[
        str | None, typer.Option(help="Its target: checked, and named in vLLM's config.")
    ] = None,
    slim: Slim = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a foreign directory.")] = False,
    as_json: Json = False,
) -> None:
    """Write a draft in the layout of other readers; the weights stay the same to the bit.

    Example: dspark convert checkpoints/smollm2-135m-dspark-block16 /tmp/draft --to vllm
    """
    from dspark.export.convert import convert_draft
    from dspark.target import load, outline

    settings = read_config(None, None, override("target.path", target)).target
    record = convert_draft(
        draft,
        out,
        to,
        target=outline(settings) if target else None,
        load_target=(lambda: load(settings, device="cpu")) if target else None,
        slim=slim,
        overwrite=overwrite,
    )
    print(f"wrote {out} for {to}")
    finish(record, as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(
        "train",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(_train)
    app.command("export")(_export)
    app.command("convert")(_convert)
