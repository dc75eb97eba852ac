"""One picture of a demo: training curves, accept histogram, latency with and without the draft."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.bench.evaluate import EvalReport
from dspark.errors import MissingPackageError

__all__ = ["plot_demo"]


def plot_demo(path: Path, runs: Sequence[Path], evaluation: EvalReport) -> None:
    """Write a PNG to ``path``; ``runs`` are training directories with metrics.jsonl.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError(
            "report.png needs matplotlib: pip install 'dspark[demo]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

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
