"""The target of a training run: whole, in other processes, or as the shards keep it."""

import logging
from pathlib import Path

import torch

from dspark.config import Config
from dspark.corpus.feature_store import FeatureStore
from dspark.errors import DataError
from dspark.target import Target, load, outline
from dspark.target.front import Facts, Front
from dspark.training.own_tables import check_own
from dspark.training.split.pool import TargetPool

__all__ = ["open_target", "reads_tables"]

log = logging.getLogger(__name__)


def reads_tables(config: Config) -> bool:
    """Does this run need no layer of the target, but for its tables beside the shards?"""
    offline = config.train.features == "offline" and config.data.on_missing == "refuse"
    return offline and not config.train.validation_prompts


def open_target(config: Config, device: torch.device, pool: TargetPool | None) -> Target:
    """What of the target this run needs in this process.

    Its layers are loaded where they compute features, and where validation decodes. With features
    from shards and without validation prompts, the output head and embedding beside the shards do.

    Raises:
        TargetError: it cannot be found or loaded.
        CheckpointError: what the shards keep of it is damaged.
        DataError: that does not fit its config, or the model at `target.path` is another.
    """
    if pool is not None:
        return pool.start()
    if reads_tables(config):
        assert config.data.shards is not None
        store = FeatureStore(Path(config.data.shards))
        tables = store.tables()
        if tables is not None:
            whole = outline(config.target)
            shape = tuple(whole.head_weight.shape)
            if tuple(tables["head"].shape) != shape:
                raise DataError(
                    f"data.shards '{config.data.shards}' keep an output head of "
                    f"{list(tables['head'].shape)}, but target '{config.target.path}' has "
                    f"{list(shape)}: they were captured from another target"
                )
            fingerprint = store.header.target_fingerprint
            check_own(config.target, whole, tables, fingerprint, config.data.shards)
            dtype = None if config.target.dtype == "auto" else whole.dtype
            facts = Facts.of(whole, fingerprint)
            log.info("no layer of the target is needed: head and embedding come with the shards")
            return Front(facts, {name: one.to(device, dtype) for name, one in tables.items()})
    return load(config.target, device="cpu" if device.type == "cpu" else str(device))
