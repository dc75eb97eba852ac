"""What a directory of feature shards holds, and whether its bytes are those that were written."""

from collections import Counter
from pathlib import Path
from typing import Any

from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.manifest import MANIFEST, Header, Shard, read_manifest
from dspark.corpus.shard_file import checksum
from dspark.corpus.store import QUARANTINE, TABLES, bad_rows, describe
from dspark.errors import CheckpointError, ConfigError
from dspark.progress import Bar

__all__ = ["inspect", "is_features"]


def is_features(path: Path) -> bool:
    """Does ``path`` look like a directory of shards, of whatever version?"""
    return (path / MANIFEST).is_file() and not (path / "config.json").exists()


def inspect(directory: Path, *, verify: bool) -> dict[str, Any]:
    """Counts of the manifest (of an unfinished directory: of its files).

    Args:
        verify: read every byte of every shard and compare the checksums; `damaged` names those
            that are missing or differ, the target's tables among them, `unverified` those that
            have none.

    Raises:
        CheckpointError: the manifest is missing or damaged, or does not fit the shards.
        ConfigError: ``verify`` where all shards are of format 1, which has no checksums.
    """
    manifest = read_manifest(directory)
    header = Header(**manifest["header"])
    shards = [Shard(**shard) for shard in manifest["shards"]]
    damaged: list[str] = []
    if not manifest["complete"]:
        shards = _found(directory, damaged)
    without = [shard.file for shard in shards if shard.crc32 is None]
    if verify and without and len(without) == len(shards):
        raise ConfigError(
            f"--verify: {len(without)} of {len(shards)} shards of {directory} are of format 1, "
            f"which has no checksums (first: {without[0]})"
        )
    reasons: Counter[str] = Counter()
    with Bar("verifying", len(shards), shown=verify) as bar:
        for shard in shards:
            try:
                told = shard.crc32 if verify else None
                if told is not None and checksum(directory / shard.file) != told:
                    damaged.append(shard.file)
                else:
                    reasons.update(row.reason for row in bad_rows(directory, shard))
            except CheckpointError:
                damaged.append(shard.file)
            bar.advance(1)
    if verify and manifest.get("tables"):
        try:
            FeatureStore(directory, partial=True).tables()
        except CheckpointError:
            damaged.append(TABLES)
    if verify and not damaged:
        FeatureStore(directory, partial=True).lengths()  # do the tensors fit the header?
    return {
        "format": manifest["format"],
        "complete": manifest["complete"],
        **{name: value for name, value in vars(header).items() if name != "layer_ids"},
        "taps": header.layer_ids,
        "token_bytes": header.token_bytes,
        "shards": len(shards),
        "rows": sum(shard.rows for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "versions": manifest.get("versions", {}),
        QUARANTINE: dict(reasons),
        "verified": verify,
        "unverified": without if verify else [],
        "damaged": damaged,
    }


def _found(directory: Path, damaged: list[str]) -> list[Shard]:
    shards = []
    for path in sorted(directory.glob("shard-*.safetensors")):
        try:
            shards.append(describe(path))
        except CheckpointError:
            damaged.append(path.name)
    return shards
