"""The target's own NEXTN block as a draft: one pass through it for every proposal.

The block's context holds, for each token that the target has consumed, its last hidden state beside
the embedding of the token behind it: what the block is trained on. Behind the last of them stands
the anchor, and the block's output there gives the first proposal. Each further one is read from a
pass over the token just proposed, with the block's own output in the place of the hidden state.

Symbols: n tokens, D hidden, L latent rank, P rotated size of a query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decoding.proposer import MAX_PROPOSALS
from dspark.decoding.sampling import SamplingParams, filter_logits, pick
from dspark.errors import ConfigError
from dspark.target import LingTarget, Target
from dspark.target.model import LingModel
from dspark.target.mtp import nextn_block, nextn_hidden, nextn_latents
from dspark.target.rows import chunk_masks
from dspark.target.state import Call

__all__ = ["NextNDraft", "NextNProposer", "nextn_draft", "nextn_proposals"]

_PIECE = 4096
"""Tokens of a prompt that the block reads at once."""


@dataclass(frozen=True)
class NextNDraft:
    """Stands where a draft model would."""

    model: LingModel
    block_size: int
    """Proposals of a round."""


def nextn_proposals(name: str) -> int | None:
    """N of a draft that is named `nextn:N`; None of any other.

    Raises:
        ConfigError: N is no number, or more than a step verifies; or there is no name.
    """
    if not name:
        raise ConfigError(
            "--draft is an empty text: give the directory of an exported draft, or nextn:N"
        )
    kind, _, count = name.partition(":")
    if kind != "nextn":
        return None
    if count not in map(str, range(1, MAX_PROPOSALS + 1)):
        raise ConfigError(
            f"a NEXTN draft is named nextn:N with N in 1..{MAX_PROPOSALS}, got '{name}'"
        )
    return int(count)


def nextn_draft(target: Target, proposals: int) -> NextNDraft:
    """The NEXTN block of ``target``, which was loaded with it.

    Raises:
        TargetError: it was not.
        ConfigError: the target is of another kind, which never has one.
    """
    if not isinstance(target, LingTarget):
        raise ConfigError(
            f"nextn:{proposals} needs a target with a NEXTN block, and '{target.name}' is "
            f"{target.architecture or 'no Ling-3.0 model'}"
        )
    nextn_block(target.model)
    return NextNDraft(target.model, proposals)


class NextNProposer:
    """Context and proposals of the block."""

    def __init__(self, draft: NextNDraft, params: SamplingParams) -> None:
        self._model, self.params = draft.model, params
        self._layer = draft.model.config.num_hidden_layers
        attention = nextn_block(draft.model).attention
        self._device = draft.model.lm_head.weight.device
        self._latents = attention.new_state(1, self._device)  # type: ignore[call-arg]
        self._length = 0
        self._hidden: Tensor | None = None  # [1, 1, D], of the last token
        self.proposal_p: list[Tensor] | None = None

    @torch.no_grad()
    def extend(self, features: Tensor, next_ids: Tensor) -> None:
        """As `Proposer.extend`, of hidden states [n, D] behind the target's final norm."""
        pieces = torch.split(features, _PIECE), torch.split(next_ids, _PIECE)
        for hidden, ids in zip(*pieces, strict=True):
            positions = self._length + torch.arange(len(ids), device=self._device)
            latents = nextn_latents(self._model, hidden[None], ids[None], positions[None])
            self._latents.write(latents, self._length)  # type: ignore[union-attr, arg-type]
            self._length += len(ids)
        self._hidden = features[None, -1:]

    @torch.no_grad()
    def propose(self, anchor: Tensor, most: int) -> Tensor:
        """As `Proposer.propose`. What it writes lies behind the context, and `extend` over it."""
        assert self._hidden is not None
        hidden, token = self._hidden, anchor
        if self.proposal_p is not None:
            self.proposal_p = []
        proposals = []
        for position in range(self._length - 1, self._length - 1 + most):
            hidden = self._pass(hidden, token, position)
            where = torch.tensor([position + 2], device=self._device)
            logits = self._model.logits(hidden[0])
            if self.proposal_p is not None:
                self.proposal_p.append(filter_logits(logits, self.params)[0].softmax(-1))
            token = pick(logits, self.params, where)[0]
            proposals.append(token)
        return torch.stack(proposals) if proposals else anchor.new_empty(0)

    def _pass(self, hidden: Tensor, token: Tensor, position: int) -> Tensor:  # [1, 1, D]
        positions = torch.tensor([position], device=self._device)
        heads = self._model.config.num_attention_heads // self._model.ranks
        masks = chunk_masks(positions, position + 1, None)
        call = Call(
            positions=positions[None],
            by_row=True,
            count=1,
            start=position,
            latents={self._layer: self._latents},  # type: ignore[dict-item]
            masks=tuple(mask.repeat(heads, 1)[None] for mask in masks),
        )
        return nextn_hidden(self._model, hidden, token[None, None], call)
