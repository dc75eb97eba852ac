"""From settings to one rank's model: what `dspark serve --tp N` has each of its processes do."""

from collections.abc import Set
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, Draft, SamplingParams, nextn_draft, nextn_proposals
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.export.load import TargetShape, build_draft, check_fit, read_config, read_weights
from dspark.serving.choice import choose, foresee
from dspark.serving.engine import LocalModel
from dspark.serving.plan import exchange_heap
from dspark.serving.ranks.board import Board, Topic
from dspark.serving.ranks.cores import keep_to_cores
from dspark.serving.ranks.follow import keep_beating
from dspark.serving.ranks.group import join
from dspark.serving.ranks.lead import Leader
from dspark.serving.ranks.seat import Seat, check_count
from dspark.serving.settings import ServeSettings
from dspark.target import LingTarget, ling_directory, load_ling, peek
from dspark.target.config import LingConfig
from dspark.target.drawn import Drawn
from dspark.target.weights import read_tensor

__all__ = ["check", "lead", "load_rank"]


def check(target: TargetSettings, settings: ServeSettings) -> None:
    """What can be told before a process is started.

    Raises:
        ConfigError: these settings, this target or this machine are none for several ranks.
        TargetError: the target cannot be found or understood.
    """
    on_cpu = target.device == "cpu"
    if on_cpu and settings.exchange != "peers":
        raise ConfigError(
            f"serve.exchange is {settings.exchange}, which is for ranks on GPUs, and target.device "
            "is cpu: leave --exchange out"
        )
    if not on_cpu and settings.engine == "reference":
        raise ConfigError(
            f"serve.engine is reference, and serve.tp {settings.tp} decodes by the graph on GPUs: "
            "leave --engine out, or give --device cpu, where ranks are for tests"
        )
    # of whatever device: only the config is wanted, and there may be no GPU
    _peek(target.model_copy(update={"device": "cpu"}), settings.tp)
    if not on_cpu:
        check_count(settings.tp)


def lead(
    target: TargetSettings,
    draft: str | None,
    ends: Set[int],
    settings: ServeSettings,
    seat: Seat,
) -> Leader:
    """Rank 0's part of what `load_model` does, and command of the others.

    Raises:
        DSparkError: one of these cannot be done.
    """
    board = Board(seat.ranks, seat.board)
    keep_beating(board, seat.rank)
    return Leader(load_rank(target, draft, ends, settings, seat, board), board)


def load_rank(
    target: TargetSettings,
    draft: str | None,
    ends: Set[int],
    settings: ServeSettings,
    seat: Seat,
    board: Board,
) -> LocalModel:
    """Plan the memory, load a slice of the target and the draft, and meet the other ranks.

    On GPUs ranks decode by the graph, on a CPU, which is for tests, by the reference.

    Raises:
        ConfigError: these models, or this machine, are none for several ranks.
        DSparkError: one of them cannot be loaded.
    """
    library = settings.exchange == "nccl"
    device = seat.device(target.device, peers=not library)
    keep_to_cores(seat, device)
    target = target.model_copy(update={"device": str(device)})
    config, dtype = _peek(target, seat.ranks)
    depth = None if draft is None else nextn_proposals(draft)
    if device.type == "cuda":
        settings = replace(settings, engine="graph")
    planned = foresee(target, draft, settings, seat.ranks, quiet=seat.rank > 0)
    heap_bytes = exchange_heap(config, seat.ranks)
    group = join(seat, board, device, heap_bytes, planned.context, library=library)
    loaded = load_ling(
        target, device=device, dtype=dtype, ranks=seat.ranks, rank=seat.rank, reduce=group.reduce,
        whole_embedding=True, nextn=depth is not None,
    )  # fmt: skip
    drafted: Draft | None = None
    if depth is not None:
        drafted = nextn_draft(loaded, depth)
    elif draft is not None:
        drafted = _draft(draft, loaded, target, config)
    # from here on all do the same at the same time
    board.say(seat.rank, Topic.LOADED, b"")
    board.all_said(Topic.LOADED, seat.timeout_s)
    planned = replace(planned, context=group.context)
    decoder = choose(loaded, drafted, ends, planned, peers=group.peers)
    model = LocalModel(loaded, drafted, settings, decoder)
    # kernels are compiled and libraries begun now, not in the time of the first request's steps
    params = DecodeParams(max_new_tokens=3, sampling=SamplingParams(), ignore_eos=True)
    list(islice(model.stream([0], params, lambda: True), 3))
    return model


def _peek(target: TargetSettings, ranks: int) -> tuple[LingConfig, torch.dtype]:
    config, _, dtype = peek(target)
    if config is None:
        raise ConfigError(
            f"serve.tp is {ranks}, which is for Ling-3.0 targets; '{target.path}' is another: "
            "leave --tp out"
        )
    return config, dtype


def _draft(
    path: str, loaded: LingTarget, target: TargetSettings, config: LingConfig
) -> DSparkDraftModel:
    """The whole draft. The graph takes a rank's part of it; the reference runs all of it on every
    rank, over the whole of the target's tables."""
    shape = read_config(path, loaded)
    check_fit(shape, TargetShape.of(config, target.path), path)
    weights = read_weights(Path(path).expanduser())
    draft = build_draft(shape, weights, where=path, device=loaded.device, dtype=loaded.dtype)
    if loaded.device.type != "cuda":
        # drawn weights are the same in every rank's part
        head = (
            loaded.head_weight.repeat(loaded.model.ranks, 1)
            if Drawn.of(config) is not None
            else read_tensor(ling_directory(target), "lm_head.weight")
        )
        draft.attach(loaded.embed_weight, head.to(loaded.device, loaded.dtype))
    return draft
