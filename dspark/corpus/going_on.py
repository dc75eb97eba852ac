"""Capture into a directory that may hold something: who may write there, and what would be lost."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dspark import provenance
from dspark.corpus.feature_store import OpenShard
from dspark.corpus.store import Shard, is_planned, shard_name
from dspark.errors import CheckpointError, ConfigError, RunError

__all__ = ["check_plan", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for one capture.

    Raises:
        ConfigError: another run is writing there.
        RunError: the disk is full; what was written so far is kept.
    """
    try:
        with provenance.claimed(directory):
            yield
    except BlockingIOError:
        raise ConfigError(
            f"another run is writing to capture.out '{directory}': wait for its end, or choose "
            "another directory"
        ) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        reason = (error.strerror or str(error)).lower()
        raise RunError(
            f"cannot write {error.filename or f'the next file of {directory}'}: {reason}; the "
            f"shards in capture.out '{directory}' are kept: make room there, and run the same "
            "capture again to go on"
        ) from error


def check_plan(
    directory: Path,
    names: Sequence[Sequence[str]],
    present: Sequence[Shard | None],
    shard_bytes: int,
) -> None:
    """Refuse to replace shards that hold rows which this capture would not write, or elsewhere.

    Args:
        names: `store.row_key` of the rows of every planned shard.
        present: of every planned shard, the one that is kept.

    Raises:
        ConfigError: names the shard and a row that would be lost, or computed again for another
            shard.
    """
    planned = {key for part in names for key in part}
    kept = {shard.file for shard in present if shard is not None}
    plan = {shard_name(number): part for number, part in enumerate(names)}
    for path in sorted(directory.glob("shard-*.safetensors")):
        part = plan.get(path.name)
        if path.name in kept or (part is not None and is_planned(path, part)):
            continue
        moved = False
        try:
            held = OpenShard.open(path).row_keys()
            lost = [key for key in held if key not in planned]
            # more rows may have come to the last shard; the others stay what they were
            moved = not set(held) <= set(part or ())
        except CheckpointError:
            # damaged: one of the plan's is written in its place
            lost = [] if part is not None else ["what cannot be read"]
        if lost:
            raise ConfigError(
                f"capture.out '{directory}' holds features of other rows, which this run would "
                f"delete ({path.name}: {lost[0].rpartition(' ')[0] or lost[0]}): choose another "
                "directory, or delete this one"
            )
        if moved:
            raise ConfigError(
                f"capture.out '{directory}' has the same rows in shards that were cut otherwise "
                f"({path.name}), which this run would compute again: give back the order of the "
                f"rows and the capture.shard_bytes it was made with (it is {shard_bytes} now), "
                "or choose another directory"
            )
