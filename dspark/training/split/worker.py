"""The process that runs the target: a request in, an answer out, in order, until the trainer ends.

It ignores the signals that stop a training (`pool` blocks them before it starts this process): the
trainer takes its last features from here, and saves. It ends when the trainer closes the
connection, and within about a second when the trainer is gone.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dspark.config import TargetSettings
from dspark.draft.config import DSparkConfig
from dspark.errors import DSparkError, RunError
from dspark.progress import quiet_transformers
from dspark.target import Target, load
from dspark.target.front import Facts, tables
from dspark.training.features import batch_features
from dspark.training.split.buffer import Buffer, Layout
from dspark.training.validation import counts

__all__ = ["Compute", "Computed", "Count", "Describe", "Described", "Failed", "Start", "serve"]


@dataclass(frozen=True)
class Start:
    """What a worker is started with."""

    connection: Connection
    settings: TargetSettings
    device: str
    slots: tuple[Buffer, ...]
    parcel: Buffer
    """For what is not features: tables, a draft's weights."""
    num_threads: int


@dataclass(frozen=True)
class Describe:
    """Ask for what a trainer needs of the target; its tables go into the parcel."""


@dataclass(frozen=True)
class Described:
    """Answer to `Describe`."""

    facts: Facts
    tables: Layout


@dataclass(frozen=True)
class Compute:
    """Ask for the features of `input_ids` [B, S] int64 in a slot, in their place."""

    slot: int
    inputs: Layout
    spans: tuple[tuple[int, int, int], ...]
    """Row, first position and tokens of each document."""
    layer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Computed:
    """Answer to `Compute`: `taps` [B, S, F*D] and `last_hidden` [B, S, D] in the slot."""

    slot: int
    features: Layout


@dataclass(frozen=True)
class Count:
    """Ask for `validation.counts` with the draft whose weights are in the parcel."""

    weights: Layout
    draft_config: DSparkConfig
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int


@dataclass(frozen=True)
class Failed:
    """Last answer: the sentence of what went wrong."""

    error: DSparkError


def serve(start: Start) -> None:
    """The process: load the target, say that it is there (None), answer requests."""
    threading.Thread(target=_end_with_trainer, args=(os.getppid(),), daemon=True).start()
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    quiet_transformers()
    # the same sums in the same order as a target in the trainer's process
    torch.set_num_threads(start.num_threads)
    connection = start.connection
    first = start.device.split("+")[0]
    on_gpu = torch.device(first).type == "cuda"
    hint = "spread a Ling-3.0 target over several, as cuda:4+cuda:5 in train.target_devices"
    try:
        if on_gpu:
            torch.cuda.set_device(first)  # else something would go to a trainer's
        target = load(start.settings, device=start.device)
        hint = "lower train.batch_size (and raise train.grad_accumulation) or data.max_length"
        for slot in start.slots:
            slot.page_locked = on_gpu
        connection.send(None)
        while True:
            connection.send(_answer(connection.recv(), target, start))
    except (EOFError, ConnectionError):
        # the trainer has ended, and waits: an interpreter with torch takes seconds to wind up
        os._exit(0)
    except DSparkError as error:
        connection.send(Failed(error))
    except torch.OutOfMemoryError:
        connection.send(Failed(RunError(f"{start.device} is out of memory: {hint}")))


def _answer(request: Any, target: Target, start: Start) -> Any:
    if isinstance(request, Compute):
        slot = start.slots[request.slot]
        ids = slot.read(request.inputs)["input_ids"]
        features = batch_features(target, request.layer_ids, ids, None, None, request.spans)
        return Computed(request.slot, slot.write(vars(features)))
    if isinstance(request, Describe):
        layout = start.parcel.write(tables(target))
        start.parcel.drop()
        return Described(Facts.of(target), layout)
    assert isinstance(request, Count)
    weights = start.parcel.read(request.weights)
    stats = counts(target, request.draft_config, weights, request.prompts, request.max_new_tokens)
    del weights
    start.parcel.drop()
    return stats


def _end_with_trainer(pid: int) -> None:
    """End this process at once when the trainer has ended, whatever is being computed."""
    trainer = parent_process()
    assert trainer is not None
    while os.getppid() == pid and not wait([trainer.sentinel], timeout=1):  # type: ignore[list-item]
        pass
    os._exit(1)
