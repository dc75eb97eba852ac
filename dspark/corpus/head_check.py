"""Do final hidden states and an output head belong together?

When capture starts: states as they will be stored, through the target's head, against the logits of
the model's own forward pass. A state from before the final norm, of another row of the batch or of
another layer fails. When shards are read: the arg-max ids of the first row, as the manifest keeps
them, against those of the head that is at hand now: another target's head fails.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.corpus.dataset import Row, collate
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.storage import decoded, encode
from dspark.errors import CheckpointError, TargetError
from dspark.target import Target

__all__ = ["LEAST", "check_capture", "check_head", "expected"]

LEAST = {"float32": 0.98, "bfloat16": 0.95, "float8_e4m3fn": 0.95, "float8_e4m3fn_all": 0.85}
"""Least agreement by `capture.dtype`. What rounds a state (bfloat16 keeps 8 bits of a number, 8-bit
features 4) decides anew between ids whose logits nearly tie; the target's own bfloat16 does so too.
Measured agreement is in benchmarks/feature_storage_cpu_202611.md."""

_ROWS, _TOKENS = 2, 128  # what capture's check looks at
_KEPT = 16  # arg-max ids in the manifest
_LEAST_KEPT = 0.75
_MOST_OFF = 0.3
"""Mean distance of a tap from that of its row alone, as a share of its length: rounding and another
order of sums stay far below, another row's is above 1."""


@torch.no_grad()
def check_capture(
    target: Target, rows: Sequence[Row], layer_ids: Sequence[int], dtype: str
) -> tuple[float, float]:
    """Compare the first tokens of the first rows, computed as a padded batch.

    Returns:
        Share of the positions with the same arg max, and the mean overlap of the distributions,
        1 - TV, which also sees states that are too large or too small.

    Raises:
        TargetError: either is below `LEAST`, or the taps are not those of each row alone.
    """
    chosen = [Row(row.id, row.input_ids[:_TOKENS], row.loss_mask[:_TOKENS]) for row in rows[:_ROWS]]
    features = target.features(collate(chosen).input_ids, layer_ids)
    lengths = torch.tensor([len(row.input_ids) for row in chosen], device=features.taps.device)
    usable = features.usable(lengths).tolist()
    found = encode(features, dtype)
    states = decoded(found.last_hidden, found.last_scales)
    same, overlap = [], []
    for place, row in enumerate(chosen):
        if not usable[place]:
            continue  # a row that capture will name
        _check_taps(target, row, features.taps[place, : len(row.input_ids)], layer_ids)
        ours = target.logits(states[place, : len(row.input_ids)]).float()
        theirs = target.own_logits(row.input_ids).float()
        same.append(ours.argmax(-1) == theirs.argmax(-1))
        overlap.append(torch.minimum(ours.softmax(-1), theirs.softmax(-1)).sum(-1))
    if not same:
        return 1.0, 1.0
    agreement, shared = float(torch.cat(same).float().mean()), float(torch.cat(overlap).mean())
    if min(agreement, shared) < LEAST[dtype]:
        raise TargetError(
            f"target '{target.name}': its final hidden states, as {dtype}, through its head give "
            f"the arg max of its own logits at {agreement:.1%} of {len(torch.cat(same))} positions "
            f"and {shared:.1%} of their distribution; {LEAST[dtype]:.0%} is the least: they are "
            "not the states behind the final norm, and nothing should be trained on them"
        )
    return agreement, shared


def _check_taps(
    target: Target,
    row: Row,
    taps: Tensor,  # [S, F*D], of a padded batch
    layer_ids: Sequence[int],
) -> None:
    alone = target.features(row.input_ids[None], layer_ids).taps[0]
    width = alone.shape[-1] // max(1, len(layer_ids))
    ours, theirs = (one.float().view(len(one), -1, width) for one in (taps, alone))
    # of each token: a few have states so long that they alone would decide
    off = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-6)
    for layer, share in zip(layer_ids, off.clamp(max=2).mean(0).tolist(), strict=True):
        if not share <= _MOST_OFF:
            raise TargetError(
                f"target '{target.name}': in a padded batch of rows, layer {layer} of row "
                f"'{row.id}' is off by {share:.0%} from that of the row alone ({_MOST_OFF:.0%} is "
                "the most): rows or padding are mixed up, and nothing should be trained on them"
            )


def expected(store: FeatureStore, logits: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """For the manifest: the first row, and what its first states give through the head."""
    row_id, states = _first_states(store)
    return {"row": row_id, "argmax": logits(states).argmax(-1).tolist()}


def check_head(store: FeatureStore, logits: Callable[[Tensor], Tensor], *, where: str) -> None:
    """Refuse a head that is not the one the shards were captured with.

    Args:
        logits: of the target that the run uses, or of the tables beside the shards.

    Raises:
        CheckpointError: it gives other ids for the first row.
    """
    told: Mapping[str, Any] | None = store.check_ids
    if not told or not len(store):
        return
    row_id, states = _first_states(store)
    if row_id != told["row"] and store.partial:
        return  # the first shard is one of those that are missing
    found, kept = logits(states).argmax(-1).tolist(), told["argmax"]
    same = sum(mine == theirs for mine, theirs in zip(found, kept, strict=False))
    if row_id != told["row"] or len(found) != len(kept) or same < _LEAST_KEPT * len(kept):
        raise CheckpointError(
            f"data.shards '{where}': the states of row '{row_id}' through the output head of "
            f"this run give {same} of the {len(kept)} ids that they gave at capture (row "
            f"'{told['row']}'): target.safetensors or the first shard is another target's; "
            "capture again"
        )


@torch.no_grad()
def _first_states(store: FeatureStore) -> tuple[str, Tensor]:
    row_id, tensors = store.row(0)
    scales = tensors.get("last_scales")
    states = tensors["last_hidden"][:_KEPT].clone()
    states = decoded(states, None if scales is None else scales[:_KEPT])
    return row_id, states
