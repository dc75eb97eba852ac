"""`dspark bench serving`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli.common import Json, finish

if TYPE_CHECKING:
    from dspark.bench.serving_compare import Comparison
    from dspark.bench.serving_report import ServingReport
    from dspark.bench.workloads import Workload

__all__ = ["bench_serving"]


def _print_definitions(wanted: bool) -> None:
    if wanted:
        from dspark.bench.definitions import definitions

        print(definitions())
        raise typer.Exit


def bench_serving(
    prompts: Annotated[list[str] | None, typer.Option(help="Files, globs or hub ids.")] = None,
    workload: Annotated[
        str, typer.Option(help="chat (template), prompts (text as it is) or random (SGLang's).")
    ] = "chat",
    address: Annotated[
        str,
        typer.Option("--address", "--base-url", help="Of an OpenAI-compatible server."),
    ] = "http://127.0.0.1:8000",
    limit: Annotated[
        int | None,
        typer.Option("--limit", "--num-prompts", min=1, help="First N prompts; random: requests."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output limit; none: 256. Not with random.")
    ] = None,
    random_input_len: Annotated[
        int | None, typer.Option(help="Ids of a random prompt, at most; none: 1024.")
    ] = None,
    random_output_len: Annotated[
        int | None, typer.Option(help="Tokens of its output, at most; none: 1024.")
    ] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option(help="Least share of both lengths; none: 0; 1: always all.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For random; none: what the server names.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests under way at a time.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the sampling noise; of random's lengths (none: 1).")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Always generate max-tokens.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="DSPARK_API_KEY")] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="BASE",
            help="Address of a second server, or no-draft: each request goes to both.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for report.json, report.html and report.png.")
    ] = None,
    definitions: Annotated[
        bool,
        typer.Option(
            "--definitions",
            callback=_print_definitions,
            is_eager=True,
            help="Say what each figure means, and end.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """TTFT, TPOT, throughput and accept length as `sglang.bench_serving` defines them.

    With --compare also a base, request by request in turn, and how sure the difference is.

    Example: dspark bench serving --prompts data/prompts/heldout.jsonl --limit 8 --max-tokens 64
    --compare no-draft
    """
    from rich.console import Console

    from dspark.bench import serving, serving_compare
    from dspark.bench.report import environment
    from dspark.errors import ConfigError
    from dspark.provenance import check_writable

    if out is not None:
        # a run of hours must not end at a place that cannot be written
        check_writable(out / "report.json", "--out", ConfigError)
    lengths = {
        "input_len": random_input_len,
        "output_len": random_output_len,
        "range_ratio": random_range_ratio,
    }
    load = _workload(
        workload, prompts, limit, max_tokens, lengths, seed, ignore_eos,
        tokenizer=tokenizer, address=address, api_key=api_key,
    )  # fmt: skip
    options: dict[str, Any] = {
        "max_tokens": load.max_tokens,
        "concurrency": concurrency,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": load.ignore_eos,
        "api_key": api_key,
    }
    comparison = None
    if compare is None:
        report = serving.measure(address, load.prompts, **options)
    else:
        comparison = serving_compare.compare(address, compare, load.prompts, **options)
        report = comparison.measured
    # a pipe or a log has no width: columns there would be broken into pieces
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(report.table())
    if comparison is not None:
        console.print(comparison.table())
    facts = {
        "workload": load.name,
        "settings": {
            "concurrency": concurrency,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": load.ignore_eos,
            "max_tokens": max(load.max_tokens),
            **{f"random_{name}": value for name, value in lengths.items() if value is not None},
        },
        "environment": environment(),
    }
    if out is not None:
        _write(out, report, facts, comparison)
    done = report if comparison is None else comparison
    finish({**_short(done.to_dict()), **facts}, as_json)
    done.check()


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    """Without the single requests, which only the file has."""
    return {
        name: _short(value) if isinstance(value, dict) else value
        for name, value in figures.items()
        if name != "requests"
    }


def _workload(
    name: str,
    prompts: list[str] | None,
    limit: int | None,
    max_tokens: int | None,
    lengths: dict[str, Any],
    seed: int | None,
    ignore_eos: bool,
    *,
    tokenizer: str | None,
    address: str,
    api_key: str | None,
) -> "Workload":
    from dspark.bench.prompt_sets import read_sets
    from dspark.bench.workloads import WORKLOADS, RandomLengths, chat, random_prompts, texts
    from dspark.errors import ConfigError

    if name not in WORKLOADS:
        raise ConfigError(f"--workload must be {', '.join(WORKLOADS)}, got '{name}'")
    given = {f"random-{key.replace('_', '-')}": value for key, value in lengths.items()}
    idle = {"max-tokens": max_tokens} if name == "random" else {**given, "tokenizer": tokenizer}
    for option, value in idle.items():
        if value is not None:
            raise ConfigError(f"--{option} has no effect with --workload {name}; leave it out")
    chosen = RandomLengths(**{key: value for key, value in lengths.items() if value is not None})
    if not prompts:
        raise ConfigError("bench serving needs --prompts: files, globs or hub ids")
    every = [one for rows in read_sets(prompts).values() for one in rows]
    if name == "random":
        from dspark.target import load_tokenizer

        known = load_tokenizer(tokenizer or _tokenizer_of(address, api_key))
        return random_prompts(every, known, chosen, count=limit, seed=1 if seed is None else seed)
    build = chat if name == "chat" else texts
    return build(every[:limit], 256 if max_tokens is None else max_tokens, ends=not ignore_eos)


def _tokenizer_of(address: str, api_key: str | None) -> str:
    """What the server calls its tokenizer."""
    import asyncio

    from dspark.bench.serving_client import connect
    from dspark.errors import ConfigError

    async def ask() -> str | None:
        async with connect(address, api_key=api_key) as client:
            info = await client.info() or {}
            return info.get("tokenizer_path") or info.get("model_path")

    path = asyncio.run(ask())
    if path is None:
        raise ConfigError(f"{address} names no tokenizer: give --tokenizer")
    return path


def _write(
    out: Path,
    report: "ServingReport",
    facts: dict[str, Any],
    comparison: "Comparison | None",
) -> None:
    import logging

    from dspark import provenance
    from dspark.bench.plot import plot_serving
    from dspark.bench.serving_html import page
    from dspark.errors import MissingPackageError

    figures = (report if comparison is None else comparison).to_dict()
    provenance.write_json(out / "report.json", {**figures, **facts})
    flat = {**facts, **facts["settings"], **facts["environment"], "server": report.server}
    for name in ("settings", "environment"):
        del flat[name]
    provenance.write_text(out / "report.html", page(report, flat, comparison))
    try:
        plot_serving(out / "report.png", report, comparison.base if comparison else None)
    except MissingPackageError as error:
        logging.getLogger(__name__).info("%s", error)
