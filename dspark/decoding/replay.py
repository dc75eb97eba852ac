"""Accept length of another draft along an output that the target is known to produce.

Decoding is lossless, so with the same prompt and seed every draft walks the same tokens; only the
rounds differ. Which proposals a round would keep can therefore be told without asking the target
again: one forward pass gives the taps, the rest is the draft's own work. On a CPU this is several
times faster than decoding, and the counts are those of `decode`.

Where sampled proposals are judged by rejection or as a block, the tokens are the draft's own: only
the draft and settings that gave an output can be walked along it. A proposal that was not kept is
not what stands in its place, so equality tells there too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.acceptance import AcceptStats
from dspark.decoding.block_verification import params_of_round
from dspark.decoding.calibration import Outcomes
from dspark.decoding.loop import DecodeParams
from dspark.decoding.proposer import BlockProposer, draft_limit
from dspark.draft import DSparkDraftModel
from dspark.target import Target

__all__ = ["replay"]


def replay(
    target: Target,
    draft: DSparkDraftModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: DecodeParams,
    *,
    taps: Tensor | None = None,  # [S, F*D] of prompt and output
    outcomes: list[Outcomes] | None = None,
) -> AcceptStats:
    """The rounds that `decode` would take to produce ``output_ids`` with ``draft``.

    ``output_ids`` is what `decode` gave with the same prompt and parameters, its stop token
    included. ``taps`` saves the forward pass when several drafts read the same layers.
    ``outcomes`` gets what each round shows of the confidence head, if the draft has one.

    Raises:
        ConfigError: the draft settings are out of range.
    """
    limit = draft_limit(draft.block_size, params.num_draft_tokens, params.confidence_threshold)
    stats = AcceptStats(limit)
    output = torch.tensor(output_ids, device=target.device)
    ids = torch.cat([torch.tensor(prompt_ids, device=target.device), output])
    if taps is None:
        taps = target.features(ids[None], draft.layer_ids).taps[0]
    proposer = BlockProposer(draft, params.sampling, threshold=params.confidence_threshold)
    room = target.max_position_embeddings - len(prompt_ids)
    budget = min(params.max_new_tokens, room)
    proposer.extend(taps[: len(prompt_ids)])
    anchor = 0
    by_round = params.verification == "block" and not params.sampling.greedy
    while anchor < len(output) - 1:
        if by_round:
            proposer.params = params_of_round(params.sampling, len(prompt_ids) + anchor)
        proposals = proposer.propose(output[anchor], min(limit, budget - anchor - 2))
        known = output[anchor + 1 : anchor + 1 + len(proposals)]
        kept = int((proposals[: len(known)] == known).cumprod(0).sum())
        if outcomes is not None and len(proposals):
            logits = proposer.confidence_logits(output[anchor], proposals)
            if logits is not None:
                outcomes.append(Outcomes.of_round(logits, kept, len(known), limit))
        # the stop token ends the output inside the block
        emitted = min(kept + 1, len(output) - 1 - anchor)
        stats.add(num_proposed=len(proposals), num_accepted=kept, num_emitted=emitted)
        consumed = len(prompt_ids) + anchor
        proposer.extend(taps[consumed : consumed + emitted])
        anchor += emitted
    return stats
