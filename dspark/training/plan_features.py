"""Where a run's features could come from, side by side: what each way takes of GPUs and disks.

The estimates are those of the plan, for the same rows and steps; only the source differs. Hours are
arithmetic at the plan's assumed share of the peak: a disk that cannot be read as fast as its line
says costs more.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from dspark.config import CaptureSettings, Config
from dspark.provenance import free_bytes
from dspark.training.memory import Holding
from dspark.training.plan_sizes import Sizes

__all__ = ["alternatives"]

_ROOM = 0.9
"""Of a GPU, for the target's weights; the rest is for a pass."""


def alternatives(
    config: Config,
    holding: Holding,
    processes: int,
    sizes_of: Callable[[Config], Sizes],
    *,
    there: bool,
    spreads: bool,
) -> list[dict[str, Any]]:
    """A line for online, split, and offline in every storage of `capture.dtype`; bytes and hours.

    A run with `data.on_missing: generate` has a line of its own, whose target computes the rows
    that its shards lack in every pass, as without a window.

    Args:
        config: the run's settings; its `train.target_devices` hold the target where they are set,
            and else there is a copy of it for every process.
        holding: who holds the draft.
        processes: that train.
        sizes_of: the sizes of a run with other settings.
        there: whether shards in `capture.dtype` are there: they cost no capture.
        spreads: whether one copy of the target can lie on several devices.
    """
    own = sizes_of(config)
    budget = own.budget
    groups = config.train.target_devices
    if not groups:
        count = math.ceil(own.target_bytes / (_ROOM * budget)) if spreads else 1
        groups = tuple(
            "+".join(f"{copy}.{number}" for number in range(max(1, count)))
            for copy in range(processes)
        )
    devices = max(len(group.split("+")) for group in groups)
    # of a target on several devices one computes at a time
    once = own.capture_hours * devices if own.capture_hours is not None else None
    target_fits = own.target_bytes / devices <= budget
    generates = config.train.features == "offline" and config.data.on_missing == "generate"

    def line(
        kind: Literal["online", "split", "offline"], storage: str | None, *, generate: bool = False
    ) -> dict[str, Any]:
        train: dict[str, Any] = {"features": kind, "target_devices": groups}
        if kind == "offline" and not generate:
            train["validation_prompts"] = ()  # a decode would need the target beside the draft
        missing = "generate" if generate else "refuse"
        changed: dict[str, Any] = {
            "train": config.train.model_copy(update=train),
            "data": config.data.model_copy(update={"on_missing": missing}),
        }
        if storage is not None:
            changed["capture"] = config.capture.model_copy(update={"dtype": storage})
        sizes = sizes_of(config.model_copy(update=changed))
        cost, peak = sizes.cost(processes), sizes.memory(holding, processes)["peak"]
        chosen = kind == config.train.features and storage in (None, config.capture.dtype)
        chosen = chosen and generate == generates
        captured = storage is not None and not generate and not (chosen and there)
        hours, capture = cost["gpu_hours"], once if captured else None
        token_bytes = None if storage is None else sizes.token_bytes
        rate = None
        if token_bytes is not None:
            rate = token_bytes * sizes.batch(processes)["tokens_per_step"]
            rate /= cost["seconds_per_step"]
        return {
            "features": kind,
            "storage": storage,
            "computed": sizes.computed if generate else None,
            "chosen": chosen,
            "memory_peak": peak,
            "fits": peak <= budget and (target_fits or not (kind == "split" or captured)),
            "gpus": cost["gpus"],
            "target_devices": devices if kind == "split" or captured else None,
            "seconds_per_step": cost["seconds_per_step"],
            "hours": cost["hours"],
            "capture_gpu_hours": capture,
            "gpu_hours": None if hours is None else hours + (capture or 0.0),
            "bytes_per_token": token_bytes,
            "store_bytes": None if token_bytes is None else sizes.store_bytes,
            "store_free": free_bytes(Path(config.capture.out)) if captured else None,
            "read_bytes_per_second": rate,
        }

    storages = get_args(CaptureSettings.model_fields["dtype"].annotation)
    lines = [line("online", None), line("split", None), *(line("offline", s) for s in storages)]
    if generates:
        lines.append(line("offline", config.capture.dtype, generate=True))
    return lines
