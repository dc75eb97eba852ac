"""How an evaluation is shown to people."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from dspark.bench.report import print_table

__all__ = ["print_comparison", "print_evaluation"]


def print_evaluation(report: Mapping[str, Any], *, file: TextIO | None = None) -> None:
    """Show what `EvalReport.summary` holds, on stdout unless told otherwise."""
    stream = sys.stdout if file is None else file
    rows = list(_parts(report).items())
    settings, rejects = report["settings"], report["rejects"]["rejected"]
    note = (
        f"temperature {settings['temperature']:g}, max_new_tokens {settings['max_new_tokens']}, "
        f"at most {settings['num_draft_tokens']} of {settings['block_size']} proposals a round; "
        f"{rejects} prompts left out. accept length counts the target's own token, accepted "
        "drafts do not; plain is the same loop without the draft."
    )
    print_table("Real decoding", _COLUMNS, [_row(*row) for row in rows], note=note, file=stream)
    _print_intervals({"": report}, stream)
    _print_slots({"": report}, stream)
    _print_over_sets({"": report}, stream)
    if found := report.get("confidence"):
        lines = [
            (f"{key}, {of}", *((found[when] or {}).get(of, {}).get(key) for when in _WHEN))
            for of in ("survival", "slot")
            for key in ("ece", "auroc", "brier")
        ]
        columns = ("confidence", "as the head has it", "with sts_temperatures")
        print_table("Confidence, pooled", columns, lines, file=stream)
    elif settings["confidence_threshold"] > 0 and settings["verification"] != "coupled":
        print(
            "confidence: not told. Its threshold cut blocks, and whole ones would have given other "
            f"tokens under {settings['verification']} verification; leave the threshold out",
            file=stream,
        )
    counts = ", ".join(f"{n}: {rounds}" for n, rounds in enumerate(report["histogram"]) if rounds)
    print(f"rounds by tokens they added: {counts or 'none'}", file=stream)
    for line in _verdicts(report):
        print(line, file=stream)


def print_comparison(
    reports: Mapping[str, Mapping[str, Any]],
    compared: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    base: str = "",
    file: TextIO | None = None,
) -> None:
    """Show `EvalReport.summary` of several drafts of one run by their names, and plain decoding.

    ``compared``: `bench.bootstrap.paired` of each against the draft ``base``.
    """
    stream = sys.stdout if file is None else file
    report = next(iter(reports.values()))
    rows: list[list[Any]] = []
    for part in _parts(report):
        for draft, one in reports.items():
            figures = _parts(one)[part]
            counts = [figures[key] for key in ("num_prompts", "num_tokens")]
            lengths = [figures["accept_length"], _interval(figures["interval"])]
            times = [figures[key] for key in ("tpot_ms", "speedup")]
            same = _same(figures)
            rows.append([part, draft, *counts, *lengths, figures["accepted_drafts"], *times, same])
        plain = [1.0, None, 0.0, figures["tpot_ms_plain"], 1.0, None]
        rows.append([part, "plain", *counts, *plain])
    settings = report["settings"]
    note = (
        f"temperature {settings['temperature']:g}, max_new_tokens {settings['max_new_tokens']}, "
        + ", ".join(
            f"at most {one['settings']['num_draft_tokens']} proposals a round of {draft}"
            for draft, one in reports.items()
        )
        + f"; {report['rejects']['rejected']} prompts left out. accept length counts the target's "
        "own token, accepted drafts do not; plain is the same loop without a draft."
    )
    print_table("Real decoding of the same prompts", _COMPARED, rows, note=note, file=stream)
    _print_intervals(reports, stream)
    _print_slots(reports, stream)
    _print_over_sets(reports, stream)
    if compared:
        _print_paired(compared, base, stream)
    for draft, one in reports.items():
        for line in _verdicts(one):
            print(f"{draft}, {line}", file=stream)


def _parts(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Figures by set, and pooled where there are several."""
    sets = dict(report["sets"])
    if len(sets) == 1:
        return sets
    # the report's own word covers the check at the other kind of sampling too
    pooled = {**report, "lossless": None} if _in_distribution(report) else report
    return {**sets, "all, pooled": pooled}


def _in_distribution(report: Mapping[str, Any]) -> bool:
    return any(figures["lossless"] is None for figures in report["sets"].values())


def _print_intervals(reports: Mapping[str, Mapping[str, Any]], stream: TextIO) -> None:
    rows = [
        [_of(part, draft), *(_interval(figures["intervals"][name]) for name in _HEADLINES)]
        for draft, report in reports.items()
        for part, figures in _parts(report).items()
    ]
    columns = ("95% intervals", *(text for text in _HEADLINES.values()))
    print_table("Prompts resampled whole, 1,000 times", columns, rows, file=stream)


def _print_slots(reports: Mapping[str, Mapping[str, Any]], stream: TextIO) -> None:
    slots = max(len(report["survival"]) for report in reports.values())
    rows = [
        [f"{_of(part, draft)}, {text}", *figures[key], *[None] * (slots - len(figures[key]))]
        for draft, report in reports.items()
        for part, figures in _parts(report).items()
        for key, text in (("accept_rate", "given the slots before"), ("survival", "survival"))
    ]
    print_table("Kept, by slot", ("", *map(str, range(slots))), rows, file=stream)


def _print_over_sets(reports: Mapping[str, Mapping[str, Any]], stream: TextIO) -> None:
    for draft, report in reports.items():
        if len(report["sets"]) > 1:
            found = report["over_sets"]
            print(
                f"{_of('accept length', draft)}, mean of the sets: {found['accept_length']:.3f}, "
                f"95% interval {_interval(found['interval']) or '-'}",
                file=stream,
            )


def _print_paired(compared: Mapping[str, Mapping[str, Any]], base: str, stream: TextIO) -> None:
    rows = []
    for draft, one in compared.items():
        parts = dict(one["sets"])
        if len(parts) > 1:
            parts |= {"all, pooled": one["pooled"], "mean of the sets": one["over_sets"] or {}}
        for part, found in parts.items():
            row: list[Any] = [_of(part, draft)]
            for name in ("accept_length", "speedup"):
                gap = found.get(name, {})
                row += [gap.get("difference"), _interval(gap.get("interval"))]
            rows.append(row)
    columns = ("draft", "accept length", "95% interval", "speed-up", "95% interval")
    title = f"Difference from {base}, prompt by prompt"
    print_table(title, columns, rows, file=stream)


def _of(part: str, draft: str) -> str:
    return f"{part}, {draft}" if draft else part


_WHEN = ("before", "after")
_HEADLINES = {
    "accept_length": "accept length",
    "accepted_drafts": "accepted drafts",
    "accept_length_macro": "macro",
    "full_block_rate": "full blocks",
    "tpot_ms": "TPOT ms",
    "speedup": "speed-up",
}
_COMPARED = (
    "set",
    "draft",
    "prompts",
    "tokens",
    "accept length",
    "95% interval",
    "accepted drafts",
    "TPOT ms",
    "speed-up",
    "same output",
)
_COLUMNS = (
    "set",
    "prompts",
    "tokens",
    "rounds",
    "accept length",
    "95% interval",
    "macro",
    "accepted drafts",
    "full blocks",
    "TPOT ms",
    "plain ms",
    "speed-up",
    "same output",
)


def _row(name: str, figures: Mapping[str, Any]) -> list[Any]:
    first = [name, *(figures[key] for key in ("num_prompts", "num_tokens", "rounds"))]
    lengths = [figures["accept_length"], _interval(figures["interval"])]
    more = ("accept_length_macro", "accepted_drafts", "full_block_rate")
    times = ("tpot_ms", "tpot_ms_plain", "speedup")
    return [*first, *lengths, *(figures[key] for key in (*more, *times)), _same(figures)]


def _interval(low_high: Sequence[float] | None) -> str | None:
    return f"{low_high[0]:.3f}..{low_high[1]:.3f}" if low_high else None


def _same(figures: Mapping[str, Any]) -> bool | str:
    return "in distribution" if figures["lossless"] is None else figures["lossless"]


def _verdicts(report: Mapping[str, Any]) -> list[str]:
    said = [f"{mode}: {_verdict(one)}" for mode, one in report["lossless_checks"].items()]
    if _in_distribution(report):
        rule = report["settings"]["verification"]
        said.append(
            f"sampled, {rule} verification: lossless in distribution, not seed by seed: there are "
            "no outputs to compare"
        )
    return said


def _verdict(comparison: Mapping[str, Any]) -> str:
    size = f"{comparison['num_prompts']} prompts, {comparison['num_tokens']} tokens"
    if comparison["equal"]:
        return f"identical output with and without the draft over {size}"
    if not comparison["differences"]:
        return "nothing was compared"
    first = comparison["differences"][0]
    return (
        f"OUTPUT DIFFERS in {len(comparison['differences'])} of {size}; first: prompt "
        f"{first['prompt']}, new token {first['position']}: {first['with_draft']} with the draft, "
        f"{first['without']} without"
    )
