"""The NEXTN block: its way in, its own cache, and where it is missing."""

from dataclasses import replace

import pytest
import torch

from dspark.errors import TargetError
from dspark.target import base
from dspark.target.ling import sequence_call
from dspark.target.mtp import nextn_block, nextn_hidden, nextn_latents
from dspark.target.rows import chunk_masks
from dspark.target.state import Call
from dspark.testing import tiny_ling


def given(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(1, count, 64, generator=generator),
        torch.randint(4, 512, (1, count), generator=generator),
    )


@torch.no_grad()
def test_it_reads_the_next_embedding_first_and_ends_with_its_own_norm() -> None:
    model = tiny_ling(nextn=True).model
    hidden, following = given(30)
    call = sequence_call(hidden.shape[:2], hidden.device)
    block = nextn_block(model)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    table = model.model.word_embeddings.weight
    left = norm(table[following], block.enorm.weight) @ block.eh_proj.weight[:, :64].T
    right = norm(hidden, block.hnorm.weight) @ block.eh_proj.weight[:, 64:].T
    h = left + right
    h = h + block.attention(norm(h, block.input_layernorm.weight), call)
    h = h + block.mlp(norm(h, block.post_attention_layernorm.weight))
    expected = norm(h, block.final_layernorm.weight)
    got = nextn_hidden(model, hidden, following, call)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert model.logits(got).shape == (1, 30, 512)


@torch.no_grad()
def test_steps_with_its_own_cache_equal_the_sequence() -> None:
    model = tiny_ling(nextn=True).model
    hidden, following = given(30)
    whole = nextn_hidden(model, hidden, following, sequence_call(hidden.shape[:2], hidden.device))
    index = model.config.num_hidden_layers
    held = nextn_block(model).attention.new_state(1, hidden.device)  # type: ignore[call-arg]
    rows = []
    for start in range(0, 30, 6):
        positions = torch.arange(start, start + 6)
        masks = tuple(m.repeat(4, 1)[None] for m in chunk_masks(positions, start + 6, None))
        call = Call(
            positions=positions[None],
            by_row=True,
            count=6,
            start=start,
            latents={index: held},  # type: ignore[dict-item]
            masks=masks,
        )
        piece = slice(start, start + 6)
        rows.append(nextn_hidden(model, hidden[:, piece], following[:, piece], call))
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_its_latents_alone_are_those_that_it_leaves() -> None:
    model = tiny_ling(nextn=True).model
    hidden, following = given(30)
    held = nextn_block(model).attention.new_state(1, hidden.device)  # type: ignore[call-arg]
    call = sequence_call(hidden.shape[:2], hidden.device)
    index = model.config.num_hidden_layers
    nextn_hidden(model, hidden, following, replace(call, latents={index: held}))  # type: ignore[dict-item]
    alone = nextn_latents(model, hidden[:, 7:], following[:, 7:], torch.arange(7, 30)[None])
    torch.testing.assert_close(alone, held.held[:, 7:30], atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]


@torch.no_grad()
def test_a_prefill_keeps_the_hidden_states_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_ling()
    ids = given(300)[1]
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", 128)  # three pieces
    rows = target.prefill(target.new_cache(), ids[0], keep_hidden=True)
    expected = target.features(ids, ()).last_hidden[0]
    assert rows.hidden is not None
    torch.testing.assert_close(rows.hidden, expected, atol=1e-3, rtol=1e-3)
    assert target.prefill(target.new_cache(), ids[0]).hidden is None


def test_it_has_no_limits_and_takes_no_part_in_the_model() -> None:
    with_block, without = tiny_ling(nextn=True), tiny_ling()
    ids = torch.arange(4, 40)[None]
    one, other = (target.features(ids, ()).last_hidden for target in (with_block, without))
    assert torch.equal(one, other)
    block = nextn_block(with_block.model)
    assert block.mlp.experts.limit == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("variant", ["flash", "tiny"])
def test_a_model_without_it_says_so(variant: str) -> None:
    with pytest.raises(TargetError, match="NEXTN block 0 is not there"):
        nextn_block(tiny_ling(variant).model)
