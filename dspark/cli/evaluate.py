"""`dspark eval`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dspark.cli.common import ConfigFile, Json, Overrides, finish, override, read_config

__all__ = ["register"]


class Rule(StrEnum):
    """`decoding.Verification`, as typer reads lists."""

    coupled = "coupled"
    rejection = "rejection"
    block = "block"


def _eval(
    draft: Annotated[
        list[str],
        typer.Option(
            help="Exported draft, or nextn:N, the target's own NEXTN block with N proposals a "
            "round. Several times: all on the same prompts."
        ),
    ],
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Annotated[str | None, typer.Option(help="Directory, hub id or known name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Files, globs, hub ids, or gsm8k, math500, humaneval, mt-bench; each is a set."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="First N prompts of each set.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Output limit.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy. Several times: each in turn.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling noise.")] = None,
    thinking: Annotated[
        Literal["on", "off", "both"] | None,
        typer.Option(help="Left out, the template decides."),
    ] = None,
    verification: Annotated[
        list[Rule] | None,
        typer.Option(
            help="How sampled proposals are judged: by the noise that drew them (the same output "
            "as without a draft), one by one, or together (the same distribution). Several times: "
            "each in turn. Left out: coupled."
        ),
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Proposals a round.")] = None,
    confidence_threshold: Annotated[float, typer.Option(help="0 never cuts a block.")] = 0.0,
    base: Annotated[
        str | None, typer.Option(help="The draft the others are compared with; the first.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory that keeps each finished prompt; the same command goes on."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="File for slot curves and reliability.")] = None,
    as_json: Json = False,
) -> None:
    """Accept length of drafts on prompt sets, beside plain decoding, and whether it is lossless.

    Example: dspark eval --target smollm2-135m --draft checkpoints/smollm2-135m-dspark-block16
    --prompts data/prompts/heldout.jsonl --limit 8 --temperature 0 --temperature 1
    """
    from dspark import provenance
    from dspark.bench.conditions import DEFINITIONS, check_thinking, conditions, run
    from dspark.bench.evaluate_report import print_comparison, print_evaluation
    from dspark.bench.plot import check_plots, plot_evaluation
    from dspark.bench.prompt_sets import read_sets
    from dspark.corpus.chat import check_template
    from dspark.decoding import Verification, nextn_draft, nextn_proposals
    from dspark.errors import ConfigError
    from dspark.export.load import load_draft
    from dspark.export.template import warn_of_another
    from dspark.export.tensors import weights_sha256
    from dspark.target import load, load_tokenizer

    temperatures: list[float | None] = list(temperature or []) or [None]
    each = [
        read_config(
            config,
            overrides,
            override("target.path", target),
            override("target.dtype", dtype),
            override("eval.prompts", prompts),
            override("eval.limit", limit),
            override("eval.max_new_tokens", max_new_tokens),
            override("eval.temperature", one),
            override("eval.top_p", top_p),
            override("eval.seed", seed),
        )
        for one in temperatures
    ]
    settings = each[0]
    if png is not None:
        provenance.check_writable(png, "--png", ConfigError)
        check_plots(png)
    sets = read_sets(settings.eval.prompts)
    depths = {name: nextn_proposals(name) for name in draft}
    known: dict[str | Path, str] = {}
    for name in draft:
        where = name if depths[name] else Path(name).resolve()
        if where in known:
            also = "" if known[where] == name else f", the first time as '{known[where]}'"
            raise ConfigError(f"--draft '{name}' was given twice{also}; give each draft once")
        known[where] = name
    if base is not None and base not in draft:
        raise ConfigError(f"--base '{base}' is none of the drafts: {', '.join(draft)}")
    tokenizer = load_tokenizer(settings.target)
    check_template(tokenizer)
    if thinking is not None:
        check_thinking(tokenizer)
    for name in (name for name, depth in depths.items() if depth is None):
        warn_of_another(name, tokenizer)
    loaded = load(settings.target, nextn=any(depths.values()))
    modes: list[bool | None] = [None]
    if thinking is not None:
        modes = [mode for mode in (False, True) if thinking in ("both", "on" if mode else "off")]
    rules: list[Verification] = [one.value for one in verification or [Rule.coupled]]
    evaluation = run(
        loaded,
        {
            name: load_draft(name, target=loaded) if depth is None else nextn_draft(loaded, depth)
            for name, depth in depths.items()
        },
        tokenizer,
        sets,
        settings.eval,
        conditions([one.eval.temperature for one in each], modes, rules),
        num_draft_tokens=num_draft_tokens,
        confidence_threshold=confidence_threshold,
        base=base,
        out=out,
    )
    found = evaluation.summaries()
    for one in found:
        if len(found) > 1:
            print(f"\n{one['condition']}")
        if len(draft) == 1:
            print_evaluation(one["drafts"][draft[0]])
        else:
            print_comparison(one["drafts"], one["paired"], base=one["base"])
    if png is not None:
        plot_evaluation(
            png,
            {
                ", ".join(filter(None, (name if len(draft) > 1 else "", one["condition"]))): report
                for one in found
                for name, report in one["drafts"].items()
            },
        )
    if not as_json:
        return
    digests = {
        name: {} if depths[name] else {"draft_sha256": weights_sha256(Path(name))} for name in draft
    }
    found = [
        {**one, "drafts": {name: {**digests[name], **of} for name, of in one["drafts"].items()}}
        for one in found
    ]
    shown: dict[str, Any] = {"conditions": found}
    if len(found) == 1:
        shown = found[0] if len(draft) > 1 else {"draft": draft[0], **found[0]["drafts"][draft[0]]}
    facts = {"definitions": DEFINITIONS, "environment": evaluation.environment}
    finish({"target": loaded.name, **shown, **facts}, as_json)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("eval")(_eval)
