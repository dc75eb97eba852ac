"""`dspark serve`, `bench` and `demo`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli.bench_serving import bench_serving
from dspark.cli.common import Json, finish, override, read_config

__all__ = ["register"]


def _serve(
    target: Annotated[str, typer.Option(help="Directory, hub id or known name.")],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Exported draft, or nextn:N, the target's own NEXTN block with N proposals a "
            "round; none: plain decoding."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    model_name: Annotated[str | None, typer.Option(help="Id that clients ask for.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DSPARK_API_KEY", help="Ask clients for this key.")
    ] = None,
    engine: Annotated[str, typer.Option(help="auto, reference or graph (on a GPU).")] = "auto",
    tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks of Ling-3.0, a GPU each: 1, 2, 4 or 8.")
    ] = 1,
    exchange: Annotated[
        str, typer.Option(help="Of ranks: peers (GPUs read each other's memory) or nccl, slower.")
    ] = "peers",
    context: Annotated[
        int | None,
        typer.Option(help="Positions of prompt and output; none, graph: 32768, or what fits."),
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Proposals a round.")] = None,
    confidence_threshold: Annotated[float, typer.Option(help="0 never cuts a block.")] = 0.0,
    simulate_accept_length: Annotated[
        float | None,
        typer.Option(help="Accept so many tokens a step on average, whatever they are."),
    ] = None,
    default_max_tokens: Annotated[
        int, typer.Option(help="Output limit of a request that names none.")
    ] = 512,
    max_output_tokens: Annotated[int, typer.Option(help="Most a request may ask for.")] = 8192,
    prefix_cache_bytes: Annotated[
        int,
        typer.Option(
            help="For prompts that begin like earlier ones; 0, or nextn:N: each is read whole."
        ),
    ] = 1 << 30,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait.")] = 32,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 4 << 20,
    deadline_s: Annotated[float, typer.Option(help="From arrival to the last token.")] = 600.0,
    keepalive_s: Annotated[
        float, typer.Option(help="Comment in a silent stream; 0: never.")
    ] = 15.0,
    drain_s: Annotated[float, typer.Option(help="For open requests after SIGTERM.")] = 30.0,
    step_timeout_s: Annotated[
        float, typer.Option(help="A step, or a piece of a prompt, that takes longer hangs.")
    ] = 120.0,
    load_timeout_s: Annotated[float, typer.Option(help="Until the model is loaded.")] = 3600.0,
) -> None:
    """OpenAI-compatible server over target and draft.

    Example: dspark serve --target smollm2-135m --draft checkpoints/smollm2-135m-dspark-block16
    """
    from dspark.decoding import nextn_proposals
    from dspark.export.template import warn_of_another
    from dspark.serving.engine import end_ids
    from dspark.serving.loading import load_model
    from dspark.serving.ranks.loading import check, lead, load_rank
    from dspark.serving.server import serve
    from dspark.serving.settings import ServeSettings
    from dspark.target import load_tokenizer

    config = read_config(
        None,
        None,
        override("target.path", target),
        override("target.dtype", dtype),
        override("target.device", device),
    )
    settings = ServeSettings(
        engine=engine,
        tp=tp,
        exchange=exchange,
        context=context,
        num_draft_tokens=num_draft_tokens,
        confidence_threshold=confidence_threshold,
        simulate_accept_length=simulate_accept_length,
        default_max_tokens=default_max_tokens,
        max_output_tokens=max_output_tokens,
        prefix_cache_bytes=prefix_cache_bytes,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        deadline_s=deadline_s,
        keepalive_s=keepalive_s,
        drain_s=drain_s,
        step_timeout_s=step_timeout_s,
        load_timeout_s=load_timeout_s,
    )
    if tp > 1:
        check(config.target, settings)
    tokenizer = load_tokenizer(config.target)
    if draft is not None and nextn_proposals(draft) is None:
        warn_of_another(draft, tokenizer)
    loads = (config.target, draft, end_ids(tokenizer), settings)
    serve(
        partial(load_model, *loads) if tp == 1 else partial(lead, *loads),
        tokenizer,
        load_rank=None if tp == 1 else partial(load_rank, *loads),
        host=host,
        port=port,
        model_name=model_name,
        settings=settings,
        api_key=api_key,
    )


def _bench_step(
    target: Annotated[str, typer.Option(help="ling-3.0-flash, qwen3-8b, … or a config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; one is run.")] = 1,
    draft: Annotated[str, typer.Option(help="dspark, none or nextn:N.")] = "dspark",
    draft_config: Annotated[Path | None, typer.Option(help="config.json of a draft.")] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Of a draft without a config; none: 8, dense: 7.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step; none: block and anchor.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the output.")] = 8192,
    routing: Annotated[
        str, typer.Option(help="independent, overlap:SHARE or experts:N, distinct in a layer.")
    ] = "independent",
    simulate_accept_length: Annotated[
        float | None, typer.Option(help="Mean tokens a step; the weights mean nothing.")
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="Measured, behind 50 of warm-up.")] = 1000,
    ablate: Annotated[bool, typer.Option(help="Turn techniques off, one at a time.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="No draft, nextn:5 and dspark, one after the other.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the synthetic weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Time of a decode step on this GPU beside its byte floor; weights are SYNTHETIC.

    Example: dspark bench step --target ling-3.0-flash --tp 4 --routing experts:44
    """
    from dspark.bench.step_options import StepOptions, check, of_table
    from dspark.bench.targets import target_config
    from dspark.errors import ConfigError

    options = StepOptions(
        config=target_config(target),
        ranks=tp,
        draft=draft,
        draft_config=draft_config,
        block_size=block_size,
        num_draft_tokens=None if tokens is None else tokens - 1,
        context=context,
        routing=routing,
        accept_length=simulate_accept_length,
        steps=steps,
        seed=seed,
    )
    if table and (ablate or draft != "dspark" or simulate_accept_length is not None):
        raise ConfigError(
            "--table runs its own drafts and accept lengths: leave out --ablate, --draft and "
            "--simulate-accept-length"
        )
    check(*(of_table(options) if table else [options]))
    _needs_gpu("dspark bench step", "dspark bench roofline gives the least time without one")
    from dspark.bench.step_report import compare, measure, print_comparison, print_report

    if table:
        report = compare(options)
        print_comparison(report)
    else:
        report = measure(options, ablate=ablate)
        print_report(report)
    finish(report, as_json)


def _bench_roofline(
    target: Annotated[str, typer.Option(help="ling-3.0-flash, qwen3-8b, … or a config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    tokens: Annotated[int, typer.Option(help="Rows of a step.")] = 9,
    block_size: Annotated[int, typer.Option(min=0, max=16, help="Of the draft; 0: none.")] = 8,
    context: Annotated[
        int | None, typer.Option(min=0, help="Tokens in the caches (8192, or all there can be).")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="independent, overlap:SHARE or experts:N, distinct in a layer.")
    ] = "independent",
    bandwidth: Annotated[
        float | None, typer.Option(help="TB/s; none: measured on this GPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The least time of a decode step: bytes by component over the memory's bandwidth.

    Example: dspark bench roofline --target ling-3.0-flash --tp 4 --routing experts:44
    --bandwidth 4.3
    """
    import torch

    from dspark.bench.report import print_table
    from dspark.bench.roofline import roofline
    from dspark.bench.targets import read_target, target_config

    config = read_target(target_config(target))
    if bandwidth is None:
        _needs_gpu("measuring the bandwidth", "give --bandwidth, in TB/s")
        from dspark.kernels.read_stream import read_bandwidth

        bandwidth = read_bandwidth(torch.device("cuda"))
    report = roofline(
        config,
        ranks=tp,
        tokens=tokens,
        routing=routing,
        context=min(8192, config.max_position_embeddings) if context is None else context,
        block_size=block_size,
        terabytes_per_s=bandwidth,
    )
    rows = [
        [name, f"{one['mb']:,.1f}", f"{one['us']:,.1f}"]
        for name, one in report["components"].items()
    ]
    rows.append(["sum", f"{report['total_mb']:,.1f}", f"{report['floor_us']:,.1f}"])
    title = f"one rank of {tp}, {tokens} rows"
    if report["distinct_experts"]:
        title += f", {report['distinct_experts']:.1f} experts a layer"
    print_table(title, ["", "MB", "us"], rows, note=f"at {bandwidth:.2f} TB/s")
    finish(report, as_json)


def _bench_objective(
    anchors: Annotated[int, typer.Option(min=1, help="Blocks of a forward pass.")] = 512,
    block_size: Annotated[int, typer.Option(min=1, help="Slots of a block.")] = 8,
    vocabulary: Annotated[int, typer.Option(min=2, help="Rows of the head.")] = 157184,
    hidden: Annotated[int, typer.Option(min=1, help="Columns of the head.")] = 2560,
    rank: Annotated[int, typer.Option(min=1, help="Of the Markov head.")] = 256,
    chunk_blocks: Annotated[int, typer.Option(min=1, help="As loss.chunk_blocks.")] = 64,
    distance: Annotated[str, typer.Option(help="l1, lk_hybrid or nla.")] = "l1",
    accept_temperature: Annotated[
        float, typer.Option(help="As loss.accept_length_temperature.")
    ] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measured, behind one of warm-up.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the synthetic inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Time and memory of the training objective in all its forms; inputs are SYNTHETIC.

    Example: dspark bench objective --anchors 512 --json
    """
    from dspark.bench.objective import ObjectiveOptions, measure, print_report

    options = ObjectiveOptions(
        anchors=anchors,
        block_size=block_size,
        vocabulary=vocabulary,
        hidden=hidden,
        rank=rank,
        chunk_blocks=chunk_blocks,
        distance=distance,
        accept_temperature=accept_temperature,
        repeats=repeats,
        seed=seed,
    )
    _needs_gpu(
        "dspark bench objective",
        "there the trainer takes kernels, elsewhere the chunked form",
    )
    report = measure(options)
    print_report(report)
    finish(report, as_json)


def _bench_collectives(
    tp: Annotated[int, typer.Option(help="Ranks: 2, 4 or 8.")] = 4,
    hidden: Annotated[int, typer.Option(help="Columns of the 16 rows.")] = 2560,
    skew: Annotated[
        list[int] | None,
        typer.Option(help="Looks (about a microsecond) that ranks are late; may be repeated."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Graphs of a hundred exchanges.")] = 50,
    rounds: Annotated[
        int, typer.Option(help="Exchanges, for each skew, whose every sum is checked to the bit.")
    ] = 0,
    vocabulary: Annotated[int, typer.Option(help="Rows of the embedding.")] = 157184,
    as_json: Json = False,
) -> None:
    """Time of the exchange between ranks beside NCCL; on fewer GPUs the ranks are SIMULATED.

    Example: dspark bench collectives --tp 4 --skew 40 --rounds 1000000
    """
    from dspark.bench.collective_options import SKEWS, CollectiveOptions

    options = CollectiveOptions(
        ranks=tp,
        hidden=hidden,
        skew=SKEWS if skew is None else tuple(skew),
        repeats=repeats,
        rounds=rounds,
        vocabulary=vocabulary,
    )
    _needs_gpu("dspark bench collectives", "the exchange is tested without one, not timed")
    # only here: the kernels need a package that a CPU does without
    from dspark.bench.collectives import measure, print_report

    report = measure(options)
    print_report(report)
    finish(report, as_json)


def _needs_gpu(what: str, instead: str) -> None:
    import torch

    from dspark import kernels
    from dspark.errors import ConfigError, MissingPackageError

    if not torch.cuda.is_available():
        raise ConfigError(f"{what} needs a GPU; {instead}")
    if not kernels.installed():
        raise MissingPackageError(f"{what} needs triton: pip install 'dspark[gpu]'")


def _demo(
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("outputs/demo"),
    draft: Annotated[Path, typer.Option(help="Released draft to start from.")] = Path(
        "checkpoints/smollm2-135m-dspark-block16"
    ),
) -> None:
    """The main job end to end on a CPU: sample, distil, export, serve, measure.

    Example: dspark demo
    """
    from dspark.demo import run
    from dspark.progress import quiet_transformers

    quiet_transformers()
    finish(run(out, draft), as_json=True)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("serve")(_serve)
    bench = typer.Typer(help="Measure.", no_args_is_help=True)
    bench.command("serving")(bench_serving)
    bench.command("step")(_bench_step)
    bench.command("collectives")(_bench_collectives)
    bench.command("objective")(_bench_objective)
    bench.command("roofline")(_bench_roofline)
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")
    app.command("demo")(_demo)
