"""The draft: training form equals cached form, and nothing leaks into a block."""

import pytest
import torch
from torch import Tensor

from dspark.config import DraftSettings
from dspark.draft import Blocks, DSparkDraftModel, sample_blocks
from dspark.draft.config import config_for_target
from dspark.errors import ConfigError
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target
from dspark.training.build import initial_draft

KINDS = ("vanilla", "gated", "rnn")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def make(target: Target, seed: int = 0) -> tuple[Tensor, Tensor, Blocks]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 250, (2, 40), generator=generator)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[:, :7] = False
    blocks = sample_blocks(
        ids,
        mask,
        num_anchors=5,
        block_size=4,
        generators=[torch.Generator().manual_seed(seed + i) for i in range(2)],
    )
    return ids, mask, blocks


def run(draft: DSparkDraftModel, taps: Tensor, blocks: Blocks) -> Tensor:
    with torch.no_grad():
        out: Tensor = draft(taps, blocks.anchor_ids, blocks.anchors)
    return out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_forward_equals_cached_draft_forward(target: Target, seed: int) -> None:
    draft = tiny_draft(target, seed=seed)
    ids, _, blocks = make(target, seed)
    taps = target.features(ids, draft.layer_ids).taps
    trained = run(draft, taps, blocks)
    for row in range(2):
        for block in range(blocks.anchors.shape[1]):
            anchor = int(blocks.anchors[row, block])
            context = draft.new_context()
            # in three calls, as rounds commit rows
            for part in taps[row, :anchor].tensor_split(3):
                draft.extend(context, part)
            cached = draft.block_hidden(context, ids[row, anchor])
            # two summation orders of the same float32 sums
            torch.testing.assert_close(cached, trained[row, block], atol=2e-5, rtol=1e-5)


def test_a_tap_at_or_after_the_anchor_changes_nothing(target: Target) -> None:
    draft = tiny_draft(target)
    ids, _, blocks = make(target)
    taps = target.features(ids, draft.layer_ids).taps
    before = run(draft, taps, blocks)
    anchor = int(blocks.anchors[0, 2])
    poisoned = taps.clone()
    poisoned[0, anchor:] = 1e3
    after = run(draft, poisoned, blocks)
    assert torch.equal(after[0, 2], before[0, 2])
    # and one before it does, or this test could not fail
    poisoned = taps.clone()
    poisoned[0, anchor - 1] = 1e3
    assert not torch.allclose(run(draft, poisoned, blocks)[0, 2], before[0, 2])


def test_a_token_after_the_anchor_changes_nothing_in_its_block(target: Target) -> None:
    draft = tiny_draft(target)
    ids, mask, _ = make(target)
    anchors = torch.tensor([[10, 20], [10, 20]])
    from dspark.draft.anchors import blocks_at

    def hidden(ids: Tensor) -> Tensor:
        blocks = blocks_at(ids, mask, anchors, torch.ones_like(anchors, dtype=torch.bool), 4)
        return run(draft, target.features(ids, draft.layer_ids).taps, blocks)

    changed = ids.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % 250
    before, after = hidden(ids), hidden(changed)
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


def test_another_blocks_anchor_changes_nothing(target: Target) -> None:
    draft = tiny_draft(target)
    ids, _, blocks = make(target)
    taps = target.features(ids, draft.layer_ids).taps
    before = run(draft, taps, blocks)
    other = blocks.anchor_ids.clone()
    other[0, 1] = (other[0, 1] + 1) % 250
    with torch.no_grad():
        after = draft(taps, other, blocks.anchors)
    changed = [k for k in range(other.shape[1]) if not torch.equal(before[0, k], after[0, k])]
    assert changed == [1]


def test_slots_of_a_block_see_each_other_in_both_directions(target: Target) -> None:
    draft = tiny_draft(target)
    ids, _, blocks = make(target)
    taps = target.features(ids, draft.layer_ids).taps
    before = run(draft, taps, blocks)
    embed = draft._block_input

    def last_slot_changed(anchor_ids: Tensor) -> Tensor:
        out = embed(anchor_ids)
        out[..., -1, :] += 1.0
        return out

    draft._block_input = last_slot_changed  # type: ignore[method-assign]
    assert not torch.allclose(run(draft, taps, blocks)[0, 0, 0], before[0, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced_markov_logits_equal_the_step_by_step_loop(
    target: Target, kind: str
) -> None:
    draft = tiny_draft(target, markov_head_type=kind)
    head = draft.markov_head
    assert head is not None
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 4, target.hidden_size, generator=generator)
    prev = torch.randint(0, 250, (3, 4), generator=generator)
    together = draft.slot_logits(hidden, prev)
    for block in range(3):
        state = None
        for k in range(4):
            latent, state = head.step(head.embed(prev[block, k]), hidden[block, k], state)
            alone = draft.base_logits(hidden[block, k]) + head.markov_w2(latent)
            torch.testing.assert_close(together[block, k], alone, atol=1e-5, rtol=1e-5)


def test_the_markov_bias_depends_on_the_previous_token(target: Target) -> None:
    draft = tiny_draft(target)
    hidden = torch.zeros(1, 4, target.hidden_size)
    one = draft.slot_logits(hidden, torch.tensor([[5, 5, 5, 5]]))
    other = draft.slot_logits(hidden, torch.tensor([[5, 5, 6, 5]]))
    same = (one == other).all(-1)[0].tolist()
    assert same == [True, True, False, True]


def test_the_targets_tables_are_no_parameters_of_the_draft(target: Target) -> None:
    draft = tiny_draft(target)
    names = [name for name, _ in draft.trainable()]
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert set(names) == set(draft.state_dict())


def test_no_gradient_reaches_the_targets_tables(target: Target) -> None:
    draft = tiny_draft(target)
    ids, _, blocks = make(target)
    tables = [torch.nn.Parameter(target.embed_weight.clone()) for _ in range(2)]
    draft.attach(*tables)
    taps = target.features(ids, draft.layer_ids).taps
    hidden = draft(taps, blocks.anchor_ids, blocks.anchors)
    draft.slot_logits(hidden, blocks.prev_ids).sum().backward()  # type: ignore[no-untyped-call]
    assert draft.fc.weight.grad is not None
    assert [table.grad for table in tables] == [None, None]


def test_a_draft_in_training_decodes_with_the_weights_it_has_now(target: Target) -> None:
    """Weights that are laid out for decoding are a copy, which the optimizer does not move."""
    draft = tiny_draft(target).train()
    taps = torch.randn(6, 3 * target.hidden_size, generator=torch.Generator().manual_seed(0))

    def decoded() -> Tensor:
        context = draft.new_context()
        draft.extend(context, taps)
        out: Tensor = draft.block_hidden(context, torch.tensor(7))
        return out

    decoded()
    with torch.no_grad():
        for _, parameter in draft.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    padded = torch.cat([taps, taps[:1]])[None]
    # with gradients, which never take the laid-out weights
    trained = draft(padded, torch.tensor([[7]]), torch.tensor([[6]]))[0, 0].detach()
    torch.testing.assert_close(decoded(), trained, atol=1e-4, rtol=1e-4)


def test_confidence_is_float32_under_autocast(target: Target) -> None:
    draft = tiny_draft(target)
    hidden = torch.randn(2, 4, target.hidden_size)
    assert draft.markov_head is not None
    embedding = draft.markov_head.embed(torch.zeros(2, 4, dtype=torch.int64))
    plain = draft.confidence_logits(hidden, embedding)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = draft.confidence_logits(hidden, embedding)
    assert plain is not None
    assert mixed is not None
    assert mixed.dtype == torch.float32
    assert torch.equal(plain, mixed)


def test_the_sequential_head_can_start_from_the_embedding() -> None:
    """Its rows are the embedding's projection on the directions that hold most of its variance."""
    target = tiny_target()
    head = tiny_draft(target, markov_rank=8).markov_head
    assert head is not None
    head.start_from(target.embed_weight)
    w1 = head.markov_w1.weight.detach().double()
    rows = target.embed_weight.detach().double()
    rows = rows - rows.mean(0)
    gram = w1.T @ w1 / len(w1)
    torch.testing.assert_close(gram, 9 * torch.eye(8).double(), atol=1e-3, rtol=0)
    left = rows - w1 @ torch.linalg.lstsq(w1, rows).solution
    singular = torch.linalg.svdvals(rows)
    assert float(left.square().sum()) == pytest.approx(float(singular[8:].square().sum()), rel=1e-4)


def test_a_head_wider_than_the_embedding_cannot_start_from_it() -> None:
    target = tiny_target()
    settings = DraftSettings(
        num_layers=1, num_taps=2, markov_rank=target.hidden_size + 1, markov_init="embedding"
    )
    shape = config_for_target(target.config, settings, mask_token_id=target.vocab_size - 1)
    with pytest.raises(ConfigError, match=r"markov_rank .* 64 .* got 65"):
        initial_draft(shape, settings, target, seed=0)


def test_a_seed_gives_the_same_backbone_with_and_without_heads(target: Target) -> None:
    full = dict(tiny_draft(target, seed=3).named_parameters())
    for shape in ({"markov_rank": 0}, {"enable_confidence_head": False}):
        bare = dict(tiny_draft(target, seed=3, **shape).named_parameters())
        shared = [name for name in bare if "head" not in name]
        assert len(shared) > 10
        assert all(torch.equal(bare[name], full[name]) for name in shared)
