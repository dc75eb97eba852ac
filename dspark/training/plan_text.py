"""A plan for people: its lines, and sentences about what will not fit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark.config import Config

__all__ = ["lines", "warnings"]

_GIB = 2**30
_NO_PARTS = ("peak", "budget", "budget_assumed", "largest_batch_size")


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report of `plan_run`, a line a subject."""
    launch, batch, data = report["launch"], report["batch"], report["data"]
    counts, disk = report["parameters"], report["disk"]
    yield (
        f"launch      {launch['processes']} process(es), {launch['strategy']}, "
        f"{launch['precision'].replace('no', 'fp32')}"
    )
    if report["resume"]:
        yield f"goes on     from {report['resume']}"
    yield f"batch       {_batch(batch)}"
    yield f"data        {_data(data)}"
    yield f"steps       {_steps(report['steps'])}"
    mask = report["draft"]["draft.mask_token_id"]
    yield (
        f"draft       {report['draft']['draft.num_layers']} layers, blocks of "
        f"{report['draft']['draft.block_size']}, taps {report['draft']['draft.target_layer_ids']}, "
        f"mask id {'open until the tokenizer is there' if mask is None else mask}"
    )
    parts = ("layers", "context", "norms", "markov_head", "confidence_head")
    yield f"parameters  {counts['trainable']:,} trainable: " + ", ".join(
        f"{name.replace('_', ' ')} {counts[name]:,}" for name in parts if counts[name]
    )
    yield (
        f"            {counts['with_tables']:,} with the target's embedding and head; target "
        f"{counts['target']:,}, of which a token passes through {counts['target_active']:,}"
    )
    yield f"memory      {_memory(report['memory'])}"
    workers = report["target_workers"]
    if workers:
        yield (
            f"target      in workers on {', '.join(workers['devices'])}: at least "
            f"{workers['weights_a_device'] / _GIB:,.1f} GiB a device for its weights; "
            f"{_figure(workers['tflop_per_step'])} TFLOP a step over all of them"
        )
    yield (
        f"disk        a checkpoint {disk['checkpoint'] / 1e9:,.1f} GB, at most "
        f"{disk['checkpoints']} at a time: {disk['total'] / 1e9:,.1f} GB "
        f"({disk['free'] / 1e9:,.1f} free)"
    )
    if disk["shards"] is not None:
        yield f"            capture shards {disk['shards'] / 1e9:,.1f} GB"
    yield f"cost        {_cost(report['cost'])}"
    yield from _features(report["features"])
    other = report.get("at_num_processes")
    if other:
        yield f"on train.num_processes={other['processes']}:"
        yield f"  batch     {_batch(other['batch'])}"
        yield f"  steps     {_steps(other['steps'])}"
        yield "  memory    peak a GPU: " + ", ".join(
            f"{name} {value / _GIB:,.1f} GiB" for name, value in other["memory_peak"].items()
        )
        yield f"  cost      {_cost(other['cost'])}"
    for sentence in report["warnings"]:
        yield f"warning: {sentence}"


def warnings(report: Mapping[str, Any], config: Config) -> list[str]:
    """A sentence for everything that will not fit, with what would."""
    return [
        *_memory_warnings(report["memory"]),
        *_worker_warnings(report["target_workers"], report["memory"]["budget"]),
        *_other_warnings(report, config),
    ]


def _batch(batch: Mapping[str, Any]) -> str:
    kind = "packed rows" if batch["packed"] else "rows"
    return (
        f"{batch['rows_per_pass']} {kind} x {batch['grad_accumulation']} passes x "
        f"{batch['processes']} process(es) = {batch['global_batch']:,} a step: "
        f"{batch['tokens_per_step']:,} tokens, {batch['anchors_per_step']:,} anchors, "
        f"{batch['slots_per_step']:,} slots"
    )


def _features(ways: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where features could come from, a line each."""
    head = "features    "
    for way in ways:
        name = " ".join(filter(None, (way["features"], way["storage"])))
        parts = []
        if way["hours"] is None:
            parts.append(f"{_figure(way['seconds_per_step'])} s a step")
        else:
            capture = way["capture_gpu_hours"]
            first = f", {_figure(capture)} of them capture" if capture is not None else ""
            parts.append(
                f"{_figure(way['gpu_hours'])} GPU-hours{first}; trains {_figure(way['hours'])} h "
                f"on {way['gpus']} GPU(s)"
            )
        parts.append(f"peak {way['memory_peak'] / _GIB:,.1f} GiB")
        if way["target_devices"] is not None:
            parts.append(
                ("captured with " if way["storage"] else "")
                + f"the target on {way['target_devices']} device(s)"
            )
        if way["bytes_per_token"] is not None:
            stored = f"{way['bytes_per_token']:,} bytes a token"
            if way["store_bytes"] is not None:
                stored += f", {_figure(way['store_bytes'] / 1e12)} TB on disk"
                if way["store_free"] is None:
                    stored += ", captured already" * (way["computed"] is None)
                elif way["store_bytes"] > way["store_free"]:
                    stored += f" ({_figure(way['store_free'] / 1e12)} TB free)"
            parts += [stored, f"read at {way['read_bytes_per_second'] / 1e9:,.2f} GB/s"]
        if way["computed"] is not None:
            parts.append(f"{way['computed']:.1%} of the rows computed in every pass")
        if not way["fits"]:
            parts.append("DOES NOT FIT")
        yield f"{head}{'*' if way['chosen'] else ' '} {name}: {'; '.join(parts)}"
        head = " " * len(head)


def _data(data: Mapping[str, Any]) -> str:
    if data["assumed"]:
        like = "rows like those that are there" if data["known"] else "full rows"
        return (
            f"ASSUMED {data['tokens']:,} tokens in {data['rows']:,} {like} "
            f"({data['tokens_per_row']:,.0f} tokens, {data['anchors_per_row']:,.0f} anchors each)"
        )
    if not data["known"]:
        return (
            f"unknown ({data['note']}): rows are taken to be full ({data['tokens_per_row']:,.0f} "
            "tokens), so tokens, memory and cost are upper bounds"
        )
    packed = "" if data["fill"] is None else f" in {data['rows']:,} rows, {data['fill']:.1%} full"
    return (
        f"{data['documents']:,} documents{packed}, {data['tokens']:,} tokens; a row holds "
        f"{data['tokens_per_row']:,.0f} on average, {data['longest_row']:,} at most (padded), and "
        f"{data['anchors_per_row']:,.0f} anchors"
    )


def _steps(steps: Mapping[str, Any]) -> str:
    if steps["total"] is None:
        return f"unknown until the data is there: {steps['epochs']:g} passes over it"
    epochs = "" if steps["epochs"] is None else f" = {steps['epochs']:,.2f} passes over the data"
    return (
        f"{steps['total']:,}{epochs}, {steps['warmup']:,} of them warm-up; "
        f"{steps['tokens']:,} tokens in all"
    )


def _memory(memory: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {value / _GIB:,.2f}"
        for name, value in memory.items()
        if name not in _NO_PARTS
    )
    return (
        f"ESTIMATED peak a GPU {memory['peak'] / _GIB:,.1f} GiB of "
        f"{'an ASSUMED ' * memory['budget_assumed']}{memory['budget'] / _GIB:,.0f}; "
        f"parts, not all at one time: {parts}; largest batch_size {memory['largest_batch_size']:,}"
    )


def _cost(cost: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {_figure(value)}" for name, value in cost["tflop_per_step"].items())
    hours = ""
    if cost["target_seconds_per_step"] is not None:
        hours = f" (the target's workers {cost['target_seconds_per_step']:,.3g}; both at a time)"
    if cost["gpu_hours"] is not None:
        hours += f", {_figure(cost['gpu_hours'])} GPU-hours ({_figure(cost['hours'])} h)"
    return (
        f"{_figure(cost['tflop_per_step_total'])} TFLOP a step ({parts}); ASSUMED MFU "
        f"{cost['assumed_mfu']:g} of {cost['assumed_peak_tflops']:,.0f} TFLOP/s (bf16): "
        f"{cost['seconds_per_step']:,.3g} s a step{hours}, without validation and saving"
    )


def _memory_warnings(memory: Mapping[str, Any]) -> Iterator[str]:
    if memory["peak"] <= memory["budget"]:
        return
    largest = max((name for name in memory if name not in _NO_PARTS), key=memory.__getitem__)
    remedy = "not even train.batch_size=1 fits"
    if memory["largest_batch_size"]:
        remedy = (
            f"train.batch_size={memory['largest_batch_size']} fits (raise train.grad_accumulation "
            "for the same global batch)"
        )
    yield (
        f"about {memory['peak'] / _GIB:,.1f} GiB are needed of a GPU that has "
        f"{memory['budget'] / _GIB:,.0f}, most for {largest.replace('_', ' ')} "
        f"({memory[largest] / _GIB:,.1f} GiB): {remedy}"
    )


def _worker_warnings(workers: Mapping[str, Any] | None, budget: float) -> Iterator[str]:
    if workers and workers["weights_a_device"] > budget:
        yield (
            f"the target's weights are {workers['weights_a_device'] / _GIB:,.1f} GiB a device and "
            f"a GPU has {budget / _GIB:,.0f}: spread a Ling-3.0 target over more, as "
            "cuda:2+cuda:3+cuda:4 in train.target_devices"
        )


def _other_warnings(report: Mapping[str, Any], config: Config) -> Iterator[str]:
    disk, rows, batch = report["disk"], report["data"]["rows"], report["batch"]["global_batch"]
    needed, free = (f"{disk[name] / 1e9:,.1f} GB" for name in ("total", "free"))
    if disk["total"] > disk["free"]:
        yield (
            f"checkpoints take up to {needed} but {free} are free where train.output_dir "
            f"'{config.train.output_dir}' is: lower train.keep or choose another place"
        )
    if rows is not None and rows < batch:
        yield (
            f"{rows:,} rows are fewer than the global batch of {batch:,}: every step would see "
            "rows more than once"
        )


def _figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
