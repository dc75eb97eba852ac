"""The NEXTN block as a draft: it changes no token, and proposes what its whole sequence says."""

from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from dspark.config import TargetSettings
from dspark.decoding import (
    DecodeParams,
    ReferenceStep,
    SamplingParams,
    decode,
    nextn,
    nextn_draft,
    nextn_proposals,
    proposal_limit,
)
from dspark.decoding.sampling import pick
from dspark.errors import ConfigError, TargetError
from dspark.serving.loading import load_model
from dspark.serving.server import serving
from dspark.serving.settings import ServeSettings
from dspark.target import LingTarget, load
from dspark.target.ling import sequence_call
from dspark.target.mtp import nextn_hidden
from dspark.testing import save_tiny_ling, save_tiny_target, tiny_ling, tiny_target, tiny_tokenizer

PROMPT = torch.randint(4, 500, (20,), generator=torch.Generator().manual_seed(0))
GREEDY = SamplingParams()
# the noise decides, so that most proposals are kept, though not all
NOISY = SamplingParams(temperature=4.0, seed=3)


@pytest.fixture(scope="module")
def target() -> LingTarget:
    return tiny_ling(nextn=True)


@torch.no_grad()
def naive(target: LingTarget, ids: Tensor, sampling: SamplingParams, count: int) -> list[int]:
    """Proposals behind ``ids``, each from the whole sequence and without any cache."""
    model, length = target.model, len(ids)
    hidden = target.features(ids[None, :-1], ()).last_hidden
    proposals: list[int] = []
    for _ in range(count):
        following = torch.cat([ids[1:], torch.tensor(proposals, dtype=torch.int64)])[None]
        out = nextn_hidden(model, hidden, following, sequence_call(following.shape, ids.device))
        where = torch.tensor([length + len(proposals)])
        proposals.append(int(pick(model.logits(out[0, -1:]), sampling, where)[0]))
        hidden = torch.cat([hidden, out[:, -1:]], 1)
    return proposals


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_it_changes_no_token(target: LingTarget, sampling: SamplingParams) -> None:
    params = DecodeParams(25, sampling, ignore_eos=True)
    plain = decode(target, None, PROMPT.tolist(), params)
    drafted = decode(target, nextn_draft(target, 3), PROMPT.tolist(), params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.block_size == 3
    assert drafted.stats.proposed > drafted.stats.rounds
    if sampling is NOISY:
        assert drafted.stats.accept_length > 2


@pytest.mark.parametrize("piece", [7, 4096])
def test_every_round_proposes_what_the_whole_sequence_says(
    target: LingTarget, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(nextn, "_PIECE", piece)
    step = ReferenceStep(target, nextn_draft(target, 4), NOISY)
    ids = [*PROMPT.tolist(), step.prefill(PROMPT)]
    kept = []
    for _ in range(5):
        proposals = step.propose(4)
        assert proposals.tolist() == naive(target, torch.tensor(ids), NOISY, 4)
        result = step.commit(proposals, *step.verify(proposals))
        ids += result.token_ids
        kept.append(result.num_accepted)
    # rounds that keep nothing, a part and all leave another context each
    assert {0, 4} < set(kept)


def test_a_server_drafts_with_it(tmp_path: Path) -> None:
    place = TargetSettings(path=str(save_tiny_ling(tmp_path)), dtype="float32")
    # so hot that noise decides, or hardly a proposal is kept
    body = {"prompt": PROMPT.tolist(), "max_tokens": 16, "temperature": 2, "seed": 3}
    texts, drafted = [], []
    for draft in ("nextn:3", None):
        with (
            serving(
                load_model(place, draft, frozenset(), ServeSettings()), tiny_tokenizer()
            ) as address,
            httpx.Client(base_url=address, timeout=60) as http,
        ):
            texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
            info = http.get("/server_info").json()
            drafted.append((info["speculative_algorithm"], info["num_draft_tokens"]))
    assert texts[0] == texts[1] != ""
    assert drafted == [("NEXTN", 3), (None, 0)]


def test_a_name_tells_the_proposals_of_a_round(target: LingTarget) -> None:
    assert nextn_proposals("nextn:5") == 5
    assert nextn_proposals("checkpoints/nextn:5") is None
    for name in ("nextn", "nextn:0", "nextn:16", "nextn:-1", "nextn:x", "nextn:03", "nextn:\u0663"):
        with pytest.raises(ConfigError, match=rf"nextn:N with N in 1\.\.15, got '{name}'"):
            nextn_proposals(name)
    with pytest.raises(ConfigError, match=r"--draft is an empty text: give .* or nextn:N"):
        nextn_proposals("")
    # a block of 8 proposes 7 unless told otherwise; nextn:8 was told
    assert proposal_limit(nextn_draft(target, 8), None) == 8
    assert proposal_limit(nextn_draft(target, 8), 2) == 2


def test_a_target_without_the_block_says_so(tmp_path: Path) -> None:
    place = save_tiny_ling(tmp_path / "ling", num_nextn_predict_layers=0)
    other = save_tiny_target(tmp_path / "llama")
    for path, words in (
        (place, "has no NEXTN block to draft with: its num_nextn_predict_layers is 0"),
        (other, r"a NEXTN draft is for Ling-3.0 targets; .* is \['LlamaForCausalLM'\]"),
    ):
        with pytest.raises(TargetError, match=words):
            load(TargetSettings(path=str(path)), nextn=True)
    with pytest.raises(ConfigError, match="nextn:2 needs a target with a NEXTN block, and 'tiny'"):
        nextn_draft(tiny_target(), 2)
    with pytest.raises(TargetError, match="not loaded"):
        nextn_draft(tiny_ling(), 2)


def test_a_target_is_the_same_whether_its_block_was_read_or_not(tmp_path: Path) -> None:
    """A draft's record names the target by its fingerprint."""
    settings = TargetSettings(path=str(save_tiny_ling(tmp_path / "ling")), dtype="float32")
    without, with_block = load(settings), load(settings, nextn=True)
    assert isinstance(with_block, LingTarget)
    assert with_block.model.has_nextn
    assert with_block.fingerprint() == without.fingerprint()
    assert with_block.fingerprint_like("0123456789abcdef") == without.fingerprint_like(
        "0123456789abcdef"
    )
