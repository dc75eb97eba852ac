"""`dspark prepare`, `sample`, `doctor` and `capture`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dspark.cli.common import ConfigFile, Json, Overrides, finish, override, read_config

__all__ = ["register"]

Target = Annotated[str | None, typer.Option(help="Directory, hub id or known name.")]


class _Prepare(typer.core.TyperCommand):
    """`--exclude A B` excludes both; with one word an option, B would be trained on."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        excluding = False
        for word in args:
            if excluding and not word.startswith("-") and spread[-1] != "--exclude":
                spread.append("--exclude")
            elif word.startswith("-"):
                excluding = word == "--exclude" or word.startswith("--exclude=")
            spread.append(word)
        return super().parse_args(ctx, spread)


def _prepare(
    sources: Annotated[
        list[str], typer.Argument(help="Files, globs, folders, hub ids, names of public sets.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Text to keep out: one or more words like the sources."),
    ] = None,
    heldout: Annotated[str, typer.Option(help="Held-out prompts: 500, or a share: 0.02.")] = "0.02",
    limit: Annotated[
        str | None,
        typer.Option(metavar="N", help="Stop when N prompts are kept, held-out ones too."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which prompts are held out.")] = 0,
    near: Annotated[
        str, typer.Option(help="Similarity of near duplicates, 0.5 to 1, or off.")
    ] = "0.8",
    as_json: Json = False,
) -> None:
    """Public sets and your own files to prompts without duplicates or evaluation text.

    Writes train.jsonl, heldout.jsonl and prepare.json, which tells where every row has gone.
    Public sets by name: open-perfectblend, ling-open-perfectblend, sharegpt, ultrachat, magpie,
    nemotron-post-training-v2 (speculator-benchmarks for --exclude).

    Example: dspark prepare open-perfectblend 'my/*.jsonl' --out outputs/prompts --heldout 500
    --exclude speculator-benchmarks 'eval/*.jsonl'
    """
    from dspark.corpus.prepare import PrepareSettings, limit_of
    from dspark.corpus.prepared import prepare

    settings = PrepareSettings(
        sources=tuple(sources),
        exclude=tuple(exclude or ()),
        heldout=heldout,
        limit=None if limit is None else limit_of(limit),
        seed=seed,
        near=near,
    )
    report, made = prepare(settings, out)
    counts = report["counts"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in report["reasons"].items())
    print(
        f"{out}{'' if made else ' is there already'}: {counts['read']} rows read = "
        f"{counts['train']} train + {counts['heldout']} held out + {counts['rejected']} rejected"
        + (f" ({reasons})" if reasons else "")
    )
    finish({"out": str(out), "made": made, **report}, as_json)


def _sample(
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Target = None,
    prompts: Annotated[list[str] | None, typer.Option(help="Files, globs or hub ids.")] = None,
    out: Annotated[str | None, typer.Option(help="responses.jsonl to write or go on with.")] = None,
    limit: Annotated[int | None, typer.Option(help="First N prompts.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL, up to /v1, of a vLLM, SGLang, dspark or OpenAI-like server."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer prompts with the target; go on where an interrupted run stopped.

    With --endpoint a server answers, and the target's weights are not loaded here. Rows that it
    fails to answer are listed in OUT.errors.jsonl, the exit code is then 1, and the same command
    asks them again.

    Example: dspark sample --target smollm2-135m --prompts data/prompts/demo.jsonl --limit 8
    """
    from dspark.corpus.chat import check_template
    from dspark.corpus.endpoint import errors_file, sample_endpoint
    from dspark.corpus.files import expand
    from dspark.corpus.presets import refuse_evaluation
    from dspark.corpus.prompts import iterate_prompts, read_prompts
    from dspark.corpus.rejects import Rejects
    from dspark.corpus.sampler import sample_responses
    from dspark.errors import ConfigError, RunError
    from dspark.target import load, load_tokenizer
    from dspark.target.remote import describe

    settings = read_config(
        config,
        overrides,
        override("target.path", target),
        override("sample.prompts", prompts),
        override("sample.out", out),
        override("sample.limit", limit),
        override("sample.endpoint", endpoint),
    )
    if not settings.sample.prompts:
        raise ConfigError("sample.prompts is empty; give --prompts with files, globs or hub ids")
    rejects = Rejects()
    ask = settings.sample
    refuse_evaluation(ask.prompts, "sample.prompts")
    # a source that is not there is told before anything is loaded or asked
    if ask.endpoint is None:
        rows = read_prompts(ask.prompts, ask.limit, rejects, with_tools=True)
    else:
        expand(ask.prompts)
    tokenizer = load_tokenizer(settings.target)
    check_template(tokenizer)
    if ask.endpoint is None:
        report = sample_responses(load(settings.target), tokenizer, rows, ask)
    else:
        lazy = iterate_prompts(ask.prompts, ask.limit, rejects, with_tools=True)
        report = sample_endpoint(describe(settings.target), tokenizer, lazy, ask)
    failed = report.errors.total()
    print(
        f"{ask.out}: {report.rejects.read} rows asked for = {report.written} written + "
        f"{report.resumed} there already + {report.rejects.rejected} rejected + {failed} failed; "
        f"{report.new_tokens:,} new tokens at {report.tokens_per_s:,.0f}/s"
    )
    finish({"out": ask.out, "prompts": rejects.to_dict(), **report.to_dict()}, as_json)
    if failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in report.errors.most_common())
        # what is refused is refused again, so that is what must be mended first
        kind = "refused" if "refused" in report.errors else report.errors.most_common(1)[0][0]
        first = f"; the first {kind}: {said}" if (said := report.first_errors.get(kind)) else ""
        raise RunError(
            f"{failed} rows were not answered ({kinds}), see {errors_file(Path(ask.out))}; "
            f"the same command asks them again{first}"
        )


def _doctor(
    data: Annotated[list[str], typer.Argument(help="Prompt or response files, globs.")],
    target: Annotated[str, typer.Option(help="Whose tokenizer and template.")] = "smollm2-135m",
    max_length: Annotated[int, typer.Option(help="Tokens of a training row.")] = 4096,
    show: Annotated[int, typer.Option(min=0, help="Rows whose mask is shown in colour.")] = 1,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page, too.")] = None,
    as_json: Json = False,
) -> None:
    """What is wrong with this data, before a GPU hour is spent on it.

    Single rows that cannot be used are counted and their lines named, and the exit code is 0:
    sampling and training pass over them. It is 2 when nothing can be trained on, every answer is
    empty or a file holds no usable row.

    Example: dspark doctor outputs/responses.jsonl --target smollm2-135m
    """
    from rich.console import Console

    from dspark.config import DataSettings
    from dspark.corpus.doctor import examine
    from dspark.corpus.doctor_html import check_place, page
    from dspark.errors import ConfigError
    from dspark.provenance import check_writable, write_text
    from dspark.target import load_tokenizer

    settings = read_config(
        None, None, override("target.path", target), override("data.max_length", max_length)
    )
    assert isinstance(settings.data, DataSettings)
    if html is not None:
        check_writable(html, "--html", ConfigError)
        check_place(html)
    report = examine(data, load_tokenizer(settings.target), settings.data, show=show)
    report.render(Console())
    finish(report.to_dict(), as_json)
    if html is not None:
        write_text(html, page(report, data))
    report.check()


def _capture(
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Target = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the shards.")] = None,
    as_json: Json = False,
) -> None:
    """Responses to feature shards on disk; says the size first and refuses a disk too small.

    Example: dspark capture -c configs/smollm2-135m-dspark.yaml
    """
    from dspark.corpus.capture import capture
    from dspark.corpus.chat import check_template
    from dspark.corpus.store import QUARANTINE
    from dspark.draft.config import default_layer_ids
    from dspark.export.load import read_config as draft_shape
    from dspark.target import load, load_tokenizer, outline

    settings = read_config(
        config,
        overrides,
        override("target.path", target),
        override("capture.out", None if out is None else str(out)),
    )
    start = settings.draft.init_from
    given: Sequence[int] | None = settings.draft.target_layer_ids
    if start:
        shape = draft_shape(start, target_layers=lambda: outline(settings.target).num_layers)
        given = shape.target_layer_ids
    tokenizer = load_tokenizer(settings.target)
    check_template(tokenizer)
    loaded = load(settings.target)
    layers = given or default_layer_ids(loaded.num_layers, settings.draft.num_taps)
    report = capture(loaded, tokenizer, settings.data, settings.capture, layers)
    print(
        f"{settings.capture.out}: {report.rows} rows, {report.tokens:,} tokens, "
        f"{report.bytes:,} bytes; {report.forward_s:.1f} s in the target, {report.other_s:.1f} s "
        "in all else"
    )
    if report.skipped:
        print(f"{len(report.skipped)} rows were left out: see {settings.capture.out}/{QUARANTINE}")
    finish(report.to_dict(), as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("prepare", cls=_Prepare)(_prepare)
    app.command("sample")(_sample)
    app.command("doctor")(_doctor)
    app.command("capture")(_capture)
