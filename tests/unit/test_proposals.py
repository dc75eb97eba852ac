"""What a round proposes, against the trained form of the draft: noise, cuts, and a long context.

Decoding is lossless whatever is proposed, so a fault here shows in no output: it only costs
accepted tokens.
"""

import pytest
import torch
from torch import Tensor

from dspark.decoding import DecodeParams, ReferenceStep, SamplingParams, decode, proposer
from dspark.decoding.proposer import BlockProposer
from dspark.decoding.sampling import pick
from dspark.draft import DSparkDraftModel
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target

PROMPT = torch.tensor([5, 6, 7, 8, 9])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def trained_block(target: Target, draft: DSparkDraftModel, first: int) -> Tensor:
    """Hidden states [K, D] of the block behind `PROMPT`, from the masked forward."""
    taps = target.features(PROMPT[None], draft.layer_ids).taps
    # padding for the anchor's own row, which nothing may read
    taps = torch.cat([taps, torch.full_like(taps[:, :1], 1e3)], 1)
    with torch.no_grad():
        out: Tensor = draft(taps, torch.tensor([[first]]), torch.tensor([[len(PROMPT)]]))[0, 0]
    return out


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), *(SamplingParams(temperature=30.0, seed=s) for s in range(3))]
)
def test_proposals_are_the_trained_forms_with_the_noise_of_the_positions_they_fill(
    target: Target, sampling: SamplingParams, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So hot that the noise decides, or without noise; the bias outweighs the base logits."""
    monkeypatch.setattr(proposer, "SHORTLIST", 64)  # of the 256 that this target knows
    draft = tiny_draft(target, markov_head_type=kind)
    assert draft.markov_head is not None
    generator = torch.Generator().manual_seed(sampling.seed)
    for parameter in draft.markov_head.parameters():
        parameter.data = 2 * torch.randn(parameter.shape, generator=generator)
    draft.markov_head.markov_w2.weight.data *= 10
    step = ReferenceStep(target, draft, sampling)
    first = step.prefill(PROMPT)
    proposals = step.propose(4)
    hidden = trained_block(target, draft, first)
    previous = torch.cat([torch.tensor([first]), proposals[:-1]])
    with torch.no_grad():
        logits = draft.slot_logits(hidden[None], previous[None])[0]
    # outside the shortlist the draft proposes nothing, however large noise and bias
    listed = draft.base_logits(hidden).topk(64).indices
    logits = torch.full_like(logits, float("-inf")).scatter(1, listed, logits.gather(1, listed))
    # the prompt fills 0..4 and the anchor 5
    assert proposals.tolist() == pick(logits, sampling, torch.tensor([6, 7, 8, 9])).tolist()


@pytest.mark.parametrize(
    ("chances", "lengths"),
    [((0.9, 0.7, 0.4, 0.2), (4, 3, 2, 2, 0)), ((0.6, 0.2, 0.9, 0.9), (4, 1, 1, 0, 0))],
)
def test_proposals_end_before_the_first_slot_of_too_little_confidence(
    target: Target, chances: tuple[float, ...], lengths: tuple[int, ...]
) -> None:
    draft = tiny_draft(target)
    assert draft.markov_head is not None
    assert draft.confidence_head is not None
    step = ReferenceStep(target, draft, SamplingParams())
    first = step.prefill(PROMPT)
    every = step.propose(4)
    assert len(every) == 4
    with torch.no_grad():
        previous = torch.cat([torch.tensor([first]), every[:-1]])
        hidden = trained_block(target, draft, first)
        read = torch.cat([hidden, draft.markov_head.embed(previous)], -1)
        # the head whose chances for these slots are the given ones
        wanted = torch.tensor(chances).logit()
        draft.confidence_head.proj.weight[0] = torch.linalg.pinv(read.double()).float() @ wanted
        draft.confidence_head.proj.bias.zero_()
    for threshold, length in zip((0.1, 0.3, 0.5, 0.65, 0.95), lengths, strict=True):
        cut = ReferenceStep(target, draft, SamplingParams(), confidence_threshold=threshold)
        cut.prefill(PROMPT)
        assert cut.propose(4).tolist() == every[:length].tolist(), threshold


def test_a_context_that_outgrows_its_store_keeps_what_it_held(target: Target) -> None:
    draft = tiny_draft(target)
    taps = torch.randn(700, 3 * target.hidden_size, generator=torch.Generator().manual_seed(0))
    whole, parts = draft.new_context(), draft.new_context()
    draft.extend(whole, taps)
    for part in torch.split(taps, 90):
        draft.extend(parts, part)
    for layer in range(len(draft.layers)):
        for one, other in zip(whole.read(layer), parts.read(layer), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "right", [2, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 1, 3, 4))]
)
def test_after_any_round_the_draft_reads_the_context_of_a_fresh_start(
    target: Target, right: int
) -> None:
    draft = tiny_draft(target)
    known = decode(target, None, PROMPT.tolist(), DecodeParams(40, ignore_eos=True)).token_ids
    step = ReferenceStep(target, draft, SamplingParams())
    out = [step.prefill(PROMPT)]
    for _ in range(3):
        proposals = torch.tensor(known[len(out) : len(out) + 4])
        proposals[right:] = (proposals[right:] + 1) % 250
        choices, taps = step.verify(proposals)
        out += step.commit(proposals, choices, taps).token_ids
    assert out == known[: 1 + 3 * (right + 1)]
    fresh = ReferenceStep(target, draft, SamplingParams())
    assert fresh.prefill(torch.cat([PROMPT, torch.tensor(out[:-1])])) == out[-1]
    assert isinstance(step._proposer, BlockProposer)
    assert isinstance(fresh._proposer, BlockProposer)
    mine, theirs = step._proposer._context, fresh._proposer._context
    assert mine.length == theirs.length == step.position
    for layer in range(len(draft.layers)):
        for one, other in zip(mine.read(layer), theirs.read(layer), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert step.propose(4).tolist() == fresh.propose(4).tolist()
