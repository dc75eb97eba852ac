"""Pictures: of a demo (training curves, acceptance, latency), an evaluation and serving."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.bench.evaluate import EvalReport
from dspark.bench.serving_report import ServingReport
from dspark.errors import ConfigError, MissingPackageError

__all__ = ["check_plots", "plot_demo", "plot_evaluation", "plot_serving"]


def plot_demo(path: Path, runs: Sequence[Path], evaluation: EvalReport) -> None:
    """Write a PNG to ``path``; ``runs`` are training directories with metrics.jsonl.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, (training, histogram, latency) = pyplot.subplots(1, 3, figsize=(15, 4))
    for run in runs:
        lines = [line for line in _metrics(run) if "train/tau" in line]
        training.plot(
            [line["step"] for line in lines], [line["train/tau"] for line in lines], label=run.name
        )
    training.set(title="teacher-forced tau", xlabel="optimizer step", ylabel="tokens a round")
    training.legend()

    counts = evaluation.pooled["histogram"]
    histogram.bar(range(1, len(counts)), counts[1:])
    histogram.set(title="rounds by tokens emitted", xlabel="tokens", ylabel="rounds")

    every = [run for one in evaluation.runs.values() for run in one]
    for label, pick in (("plain", "plain_timed"), ("with draft", "drafted")):
        done = [getattr(run, pick) for run in every]
        tpot = [1000 * c.decode_s / (len(c.token_ids) - 1) for c in done if len(c.token_ids) > 1]
        latency.plot(sorted(tpot), label=label, marker="o", markersize=3)
    latency.set(title="latency", xlabel="prompts, sorted", ylabel="ms a token", ylim=(0, None))
    latency.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _metrics(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def plot_evaluation(path: Path, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a PNG to ``path``: accept lengths, kept slots, and how far confidence can be believed.

    ``reports``: `EvalReport.summary` by what it is called in the legend.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, ((lengths, conditional), (survival, trust)) = pyplot.subplots(
        2, 2, figsize=(14, 10 + 0.2 * len(reports)), layout="constrained"
    )
    palette = pyplot.get_cmap("tab10" if len(reports) <= 10 else "tab20")
    for place, (name, report) in enumerate(reports.items()):
        color = palette(place % palette.N)
        sets = {**report["sets"], "pooled": report}
        for row, one in enumerate(sets.values()):
            at = row + 0.8 * (place + 0.5) / len(reports) - 0.4
            low, high = one["interval"] or [one["accept_length"]] * 2
            lengths.plot([low, high], [at, at], color=color)
            lengths.plot([one["accept_length"]], [at], color=color, marker="o")
        lengths.set_yticks(range(len(sets)), list(sets))
        conditional.plot(report["accept_rate"], color=color, marker="o", label=name)
        survival.plot(report["survival"], color=color, marker="o", label=name)
        for when, line in (("before", "--"), ("after", "-")):
            bins = ((report.get("confidence") or {}).get("reliability") or {}).get(when)
            if bins:
                _, chances, shares = zip(*bins["survival"], strict=True)
                trust.plot(chances, shares, line, color=color, marker=".")
    lengths.invert_yaxis()
    lengths.set(title="accept length, 95% interval", xlabel="tokens a round")
    conditional.set(title="kept, given the slots before", xlabel="slot", ylim=(0, 1))
    survival.set(title="slots 0..k all kept", xlabel="slot k", ylim=(0, 1))
    trust.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    trust.set(
        title="reliability of the confidence head (dashed: as it is, solid: with temperatures)",
        xlabel="survival foretold",
        ylabel="share kept",
    )
    # below all four: among the curves it hides them as soon as there are several conditions
    figure.legend(*conditional.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def check_plots(path: Path) -> None:
    """Refuse to begin what could not be drawn in the end.

    Raises:
        ConfigError: ``path`` is not named as a PNG, and matplotlib goes by the name.
        MissingPackageError: matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png must name a file that ends in .png, got '{path}'")
    _pyplot()


def plot_serving(path: Path, report: ServingReport, base: ServingReport | None = None) -> None:
    """Write a PNG to ``path``: steps by tokens, acceptance by slot, TPOT of each request.

    ``base``: what it is compared with; its TPOT is drawn too.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, (histogram, slots, latency) = pyplot.subplots(1, 3, figsize=(15, 4))
    counts = report.accept_histogram or []
    histogram.bar(range(1, len(counts)), counts[1:])
    histogram.set(title="steps by tokens added", xlabel="tokens", ylabel="steps")
    for name, by_slot in (("given the slots before", report.accept_rate), ("all", report.survival)):
        if by_slot:
            slots.plot(by_slot, label=name, marker="o")
            slots.legend()
    slots.set(title="kept slots", xlabel="slot", ylabel="share", ylim=(0, 1))
    for side, one in (("measured", report), ("base", base)):
        if one is not None:
            each = [row["tpot_ms"] for row in one.requests if row.get("tpot_ms") is not None]
            latency.plot(sorted(each), label=side, marker="o", markersize=3)
            latency.legend()
    latency.set(title="TPOT", xlabel="requests, sorted", ylabel="ms a token", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError("a PNG needs matplotlib: pip install 'dspark[demo]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
