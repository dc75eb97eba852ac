"""What a draft would propose behind every token of known outputs, computed side by side.

`replay` walks one output round by round. Here the draft is asked at all anchors at once, by the
form of it that training uses, and the rounds are found afterwards: thousands of times the work of
one step in each call, which is how a GPU judges a draft over hundreds of prompts in seconds.
Rounds of any width, budget or confidence threshold can be walked without asking again.

Symbols: B outputs, S positions of the longest, F tapped layers, D hidden, K slots, n slots asked
for, N tokens of one output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.acceptance import AcceptStats
from dspark.decoding.proposer import SHORTLIST
from dspark.decoding.sampling import SamplingParams, filter_logits, gumbel
from dspark.draft import DSparkDraftModel

__all__ = ["Known", "Proposed", "propose_everywhere", "rounds"]

_SLOTS = 8192
"""Slots of one pass; each has a row of vocabulary-wide logits."""


@dataclass(frozen=True)
class Known:
    """An output that the target is known to produce."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    """N of them, the stop token included."""
    taps: Tensor  # [S, F*D] of prompt and output
    seed: int = 0
    """Of the sampling noise; for greedy outputs without effect."""


@dataclass(frozen=True)
class Proposed:
    """Behind each token of one output but the last."""

    hits: Tensor  # [N - 1, n] bool: the proposal is the output's token; False behind its end
    confidence: Tensor | None  # [N - 1, n] float32 logits, as the head has them


@torch.no_grad()
def propose_everywhere(
    draft: DSparkDraftModel,
    outputs: Sequence[Known],
    sampling: SamplingParams,
    *,
    most: int,
) -> list[Proposed]:
    """Compare the draft's first ``most`` proposals behind every token with what came.

    ``sampling`` is what the outputs were drawn with; each has a seed of its own, which counts in
    place of ``sampling.seed``. The draft's sparse attention is not used: outputs have any length.
    """
    counts = [len(one.token_ids) - 1 for one in outputs]
    found = [
        Proposed(
            torch.zeros(max(count, 0), most, dtype=torch.bool),
            torch.zeros(max(count, 0), most) if draft.confidence_head is not None else None,
        )
        for count in counts
    ]
    sparse, draft.sparse_attention = draft.sparse_attention, False
    try:
        for group, first, width in _passes(counts, draft.block_size):
            hits, confidence = _one_pass(
                draft, [outputs[i] for i in group], first, width, sampling, most
            )
            for row, index in enumerate(group):
                last = min(first + width, counts[index])
                if last <= first:
                    continue
                found[index].hits[first:last] = hits[row, : last - first].cpu()
                held = found[index].confidence
                if held is not None and confidence is not None:
                    held[first:last] = confidence[row, : last - first].cpu()
    finally:
        draft.sparse_attention = sparse
    return found


def _passes(counts: Sequence[int], block_size: int) -> Iterator[tuple[list[int], int, int]]:
    """Outputs, first anchor and number of anchors of each pass; neighbours in length together."""
    order = sorted(range(len(counts)), key=lambda i: counts[i])
    width = 64
    rows = max(1, _SLOTS // (width * block_size))
    for start in range(0, len(order), rows):
        group = order[start : start + rows]
        for first in range(0, max(counts[i] for i in group), width):
            yield [i for i in group if counts[i] > first], first, width


def _one_pass(
    draft: DSparkDraftModel,
    outputs: Sequence[Known],
    first: int,
    width: int,
    sampling: SamplingParams,
    most: int,
) -> tuple[Tensor, Tensor | None]:  # [B, width, n] bool, float32
    device = draft.fc.weight.device
    ends = [min(len(one.token_ids) - 1, first + width) for one in outputs]
    lengths = [len(one.prompt_ids) + end for one, end in zip(outputs, ends, strict=True)]
    taps = torch.zeros(len(outputs), max(lengths), outputs[0].taps.shape[-1], device=device)
    taps = taps.to(outputs[0].taps.dtype)
    anchor_ids = torch.zeros(len(outputs), width, dtype=torch.int64)
    anchors = torch.zeros_like(anchor_ids)
    known = torch.full((len(outputs), width, most), -1, dtype=torch.int64)
    for row, (one, end, length) in enumerate(zip(outputs, ends, lengths, strict=True)):
        taps[row, :length] = one.taps[:length]
        tokens = torch.tensor(one.token_ids)
        where = torch.arange(first, end)
        anchor_ids[row, : len(where)] = tokens[where]
        # the rest stand at the last anchor, which keeps them rising; nobody reads them
        anchors[row] = len(one.prompt_ids) + torch.arange(first, first + width).clamp(max=end - 1)
        padded = torch.nn.functional.pad(tokens, (0, most), value=-1)
        known[row, : len(where)] = padded[where[:, None] + 1 + torch.arange(most)]
    anchor_ids, anchors, known = (t.to(device) for t in (anchor_ids, anchors, known))
    hidden = draft(taps, anchor_ids, anchors).flatten(0, 1)  # [B*width, K, D]
    seeds = torch.tensor([one.seed for one in outputs], device=device).repeat_interleave(width)
    ids, confidence = _propose(
        draft, hidden, anchor_ids.flatten(), anchors.flatten(), seeds, sampling, most
    )
    hits = ids.view_as(known) == known
    return hits, confidence.view(known.shape) if confidence is not None else None


def _propose(
    draft: DSparkDraftModel,
    hidden: Tensor,  # [R, K, D] of R blocks
    anchor_ids: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64, of the anchors
    seeds: Tensor,  # [R] int64
    sampling: SamplingParams,
    most: int,
) -> tuple[Tensor, Tensor | None]:  # [R, most] int64 and float32
    """The proposer's loop over slots, for many blocks in each slot."""
    head = draft.markov_head
    proposals, confidences = [], []
    previous, state = anchor_ids, None
    for k in range(most):
        base = draft.base_logits(hidden[:, k]).float()
        logits, candidates = base.topk(min(SHORTLIST, base.shape[-1]), dim=-1)
        embedding = None
        if head is not None:
            embedding = head.embed(previous)
            latent, state = head.step(embedding, hidden[:, k], state)
            rows = head.markov_w2.weight[candidates]  # [R, C, r]
            logits = logits + (rows @ latent[..., None])[..., 0].float()
        confidence = draft.confidence_logits(hidden[:, k], embedding)
        if confidence is not None:
            confidences.append(confidence)
        if not sampling.greedy:
            noise = gumbel(seeds, positions + k + 1, candidates)
            logits = filter_logits(logits, sampling) + noise
        previous = candidates.gather(-1, logits.argmax(-1, keepdim=True))[:, 0]
        proposals.append(previous)
    return torch.stack(proposals, -1), torch.stack(confidences, -1) if confidences else None


def rounds(
    proposed: Proposed,
    *,
    limit: int,
    budget: int,
    threshold: float = 0.0,
    temperatures: Sequence[float] | None = None,
) -> tuple[AcceptStats, list[int]]:
    """The rounds that a decode of this output takes, as `replay` counts them, and their anchors.

    Args:
        limit: proposals a round makes at most, <= n.
        budget: new tokens that the request was allowed.
        threshold: a block ends before its first slot whose confidence is below it.
        temperatures: of the slots' confidence, at least n; None: as the head has it.
    """
    stats = AcceptStats(limit)
    anchors = []
    count = len(proposed.hits)
    kept_at = proposed.hits.cumprod(-1).sum(-1).tolist()
    offered = [limit] * count
    if threshold > 0 and proposed.confidence is not None:
        logits = proposed.confidence
        if temperatures is not None:
            logits = logits / torch.tensor(list(temperatures)[: logits.shape[1]])
        offered = (logits.sigmoid() >= threshold).cumprod(-1).sum(-1).tolist()
    anchor = 0
    while anchor < count:
        num = max(0, min(limit, offered[anchor], budget - anchor - 2))
        kept = min(num, kept_at[anchor])
        emitted = min(kept + 1, count - anchor)
        stats.add(num_proposed=num, num_accepted=kept, num_emitted=emitted)
        anchors.append(anchor)
        anchor += emitted
    return stats, anchors
