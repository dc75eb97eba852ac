"""`dspark inspect` and `make-checkpoint`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.cli.common import Json, finish
from dspark.errors import CheckpointError, ConfigError

__all__ = ["register"]


def _inspect(
    path: Annotated[
        Path,
        typer.Argument(help="config.json, a directory that holds one, or ling-3.0-flash, …"),
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    verify_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, max=16, help="Rows of a verify step; may be repeated."),
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="independent (default), overlap:SHARE or experts:N.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens in the cache of a verify step (8192); of a plan (32768)."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="GPU memory that `serve --engine graph` needs.")
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(help="The plan's draft: a config.json, its directory, or nextn:N."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Feature shards: read every byte, compare checksums.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Parameters, tensors, bytes per rank and per verify step; nothing is loaded.

    Of a directory of feature shards: its rows, tokens, bytes and what they were captured from.

    Example: dspark inspect ling-3.0-flash --tp 4 --verify-tokens 9
    """
    from dspark.corpus import inspect_features

    if inspect_features.is_features(path):
        if tp != 1 or verify_tokens or routing or context is not None or plan or draft:
            raise ConfigError(
                f"{path} holds feature shards: of the options, only --verify is theirs"
            )
        _inspect_features(path, verify=verify, as_json=as_json)
        return
    if verify:
        raise ConfigError(f"--verify is for feature shards, and {path} holds none")
    from dspark.bench.inspect import inspect
    from dspark.bench.report import print_table
    from dspark.bench.targets import target_config

    path = target_config(str(path))
    report = inspect(
        path,
        ranks=tp,
        verify_tokens=verify_tokens or (),
        routing=routing,
        context=context,
        plan=plan,
        draft=draft,
    )
    plain = {k: v for k, v in report.items() if not isinstance(v, dict | list)}
    print_table(str(path), ["", ""], [[name, _shown(value)] for name, value in plain.items()])
    if "bytes_per_rank" in report:
        rows = [[name, _mb(value)] for name, value in report["bytes_per_rank"].items()]
        print_table(f"one of {tp} ranks", ["", "MB"], rows)
    if "memory_plan" in report:
        planned = report["memory_plan"]
        rows = [[n, _mb(v)] for n, v in planned.items() if n not in ("context", "ranks")]
        print_table(f"memory plan, context {planned['context']}", ["", "MB"], rows)
    for step in report.get("verify", []):
        other = ("verify_tokens", "experts_per_layer", *_floors(step))
        rows = [[name, _mb(value)] for name, value in step.items() if name not in other]
        rows += [[f"{name} (us)", f"{step[name]:,.0f}"] for name in _floors(step)]
        title = (
            f"verify {step['verify_tokens']} rows, routing {report['routing']} "
            f"({step['experts_per_layer']:.1f} experts a layer), context {report['context']}"
        )
        note = (
            "total: weights, kda_state (read and written), tails and latents; on top comes "
            "state_per_row or replay_records, by the way a step is taken back"
        )
        print_table(title, ["", "MB"], rows, note=note)
    finish(report, as_json)


def _inspect_features(path: Path, *, verify: bool, as_json: bool) -> None:
    from dspark.bench.report import print_table
    from dspark.corpus import inspect_features

    report = inspect_features.inspect(path, verify=verify)
    print_table(str(path), ["", ""], [[name, _shown(value)] for name, value in report.items()])
    if report["unverified"]:
        print(
            f"{len(report['unverified'])} of {report['shards']} shards are of format 1, which has "
            f"no checksums; these were not checked (first: {report['unverified'][0]})"
        )
    finish(report, as_json)
    if report["damaged"]:
        raise CheckpointError(
            f"{len(report['damaged'])} files of {path} are damaged: "
            f"{', '.join(report['damaged'][:5])}; run the same capture again, which writes them "
            "anew"
        )


def _floors(step: dict[str, Any]) -> list[str]:
    return [name for name in step if name.startswith("floor_us")]


def _mb(value: float) -> str:
    return f"{value / 1e6:,.3f}"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _make_checkpoint(
    config: Annotated[Path, typer.Option(help="A Ling-3.0 config.json, or its directory.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    seed: Annotated[int, typer.Option(help="Weights are a function of it.")] = 0,
    shard_mb: Annotated[int, typer.Option(min=1, help="Most megabytes of a file.")] = 5000,
    without_weights: Annotated[
        bool, typer.Option(help="No weights: whoever loads the directory draws them in place.")
    ] = False,
    expert_pool: Annotated[
        int | None, typer.Option(help="Without weights: experts that routers choose among.")
    ] = None,
    draft_block: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="A draft of this block for the config's model instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with RANDOM weights in the official Ling-3.0 layout.

    Example: dspark make-checkpoint --config configs/targets/ling-3.0-tiny.json --out /tmp/ling
    """
    from dspark.bench.draft_shape import official_shape
    from dspark.export.random_draft import write_random_draft
    from dspark.target.config import LingConfig
    from dspark.target.drawn import Drawn
    from dspark.target.synthetic import make_checkpoint

    read = LingConfig.from_file(config)
    if draft_block is not None and (without_weights or expert_pool is not None):
        raise ConfigError(
            f"--draft-block {draft_block} writes a draft; --without-weights and --expert-pool are "
            "of a target: leave them out"
        )
    if expert_pool is not None and not without_weights:
        raise ConfigError(
            f"--expert-pool {expert_pool} is for drawn weights: add --without-weights"
        )
    if draft_block is not None:
        size = write_random_draft(official_shape(read, draft_block), out, seed=seed)
    else:
        drawn = Drawn(seed, expert_pool) if without_weights else None
        size = make_checkpoint(read, out, seed=seed, shard_bytes=shard_mb * 1_000_000, drawn=drawn)
    how = "weights to be drawn" if without_weights else f"{size:,} bytes of synthetic weights"
    print(f"{out}: {how}, seed {seed}")
    finish({"out": str(out), "bytes": size, "seed": seed, "synthetic": True}, as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("inspect")(_inspect)
    app.command("make-checkpoint")(_make_checkpoint)
