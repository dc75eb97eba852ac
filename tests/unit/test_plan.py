"""The memory plan: the same bytes as the tensors that are made, and what fits where."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dspark.bench.targets import dense_target, read_target
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.export.config_json import from_json
from dspark.kernels import tiles
from dspark.kernels.peers import Peers
from dspark.provenance import read_object
from dspark.serving import plan, plan_dense
from dspark.serving.graph.arena import Caches
from dspark.serving.graph.dense import dense_weights
from dspark.serving.graph.exchange import SHORTLIST_EACH, SHORTLIST_PARTS, Exchange, PromptSum
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.serving.graph.weights import DraftWeights, NextNWeights, TargetWeights
from dspark.serving.plan import MemoryPlan, exchange_heap
from dspark.target import LingTarget
from dspark.target.config import LingConfig
from dspark.target.families import DenseShape
from dspark.target.model import LingModel
from dspark.testing import tiny_draft, tiny_ling, tiny_target

ROOT = Path(__file__).parents[2]
FLASH = LingConfig.from_file(ROOT / "configs/targets/ling-3.0-flash.json")
CARD = 141 * 10**9


def official_draft() -> Any:
    path = ROOT / "configs/drafts/ling-3.0-flash-dspark.json"
    return from_json(read_object(path, ConfigError), str(path), target_layers=42)


def pair(ranks: int = 1, **shape: Any) -> tuple[LingTarget, DSparkDraftModel]:
    target = tiny_ling(dtype=torch.bfloat16)
    draft = tiny_draft(target, block_size=12, **shape).to(torch.bfloat16)
    if ranks > 1:
        target = tiny_ling(dtype=torch.bfloat16, ranks=ranks, reduce=lambda part: part)
    return target, draft


def storages(*groups: Any) -> dict[int, int]:
    """Bytes of every storage once, of tensors in nested groups."""
    found: dict[int, int] = {}
    for one in groups:
        if isinstance(one, torch.Tensor):
            held = one.untyped_storage()
            found[held._cdata] = held.nbytes()
        elif isinstance(one, dict):
            found |= storages(*one.values())
        elif isinstance(one, list | tuple):
            found |= storages(*one)
        elif hasattr(one, "__dataclass_fields__"):
            found |= storages(*vars(one).values())
    return found


def leaves(one: Any) -> list[torch.Tensor]:
    """The tensors of nested dataclasses, in order."""
    if isinstance(one, torch.Tensor):
        return [one]
    if isinstance(one, tuple):
        return [leaf for part in one for leaf in leaves(part)]
    if hasattr(one, "__dataclass_fields__") and not isinstance(one, LingConfig):
        return [leaf for part in vars(one).values() for leaf in leaves(part)]
    return []


def test_the_lanes_are_those_of_the_kernels() -> None:
    assert Tuning().mla_lanes == plan._LANES
    assert Tuning().draft_lanes == plan._DRAFT_LANES
    assert Tuning().gqa_lanes == plan_dense.LANES
    for (outputs, _), tile in tiles._MEASURED.items():
        assert tile.splits <= plan._MOST_SPLITS[outputs >= plan._NARROW_PRODUCT]


def test_one_rank_of_four_with_64k_context_fits_a_card_of_141_gb() -> None:
    plan = MemoryPlan(FLASH, official_draft(), 65536, 4)
    assert plan.target_weights / 1e6 == pytest.approx(62_301.7 + 603.6, abs=0.1)
    # latents 8,064 bytes a token and the draft's 20,480; a state of 18.35 MB, seventeen times
    cached = (65536 + 32) * (8_064 + 20_480) / 1e6 + 17 * 18.350
    assert plan.caches / 1e6 == pytest.approx(cached, abs=12)
    plan.check(CARD)
    assert plan.total < 0.6 * CARD
    with pytest.raises(ConfigError, match=r"weights, scratch and reserve alone are .*, none fits"):
        MemoryPlan(FLASH, official_draft(), 65536, 1).check(CARD)


def test_what_is_kept_of_prompts_is_planned_for() -> None:
    plain = MemoryPlan(FLASH, official_draft(), 65536, 4)
    kept = replace(plain, prefix_cache=10**9)
    assert kept.parts()["earlier prompts"] == kept.total - plain.total == 10**9
    assert kept.most(plain.total) < plain.most(plain.total)


def test_what_does_not_fit_says_what_would() -> None:
    plan = MemoryPlan(FLASH, official_draft(), 65536, 4)
    free = plan.total - 10**9
    with pytest.raises(ConfigError) as said:
        plan.check(free)
    most = plan.most(free)
    assert str(said.value) == (
        f"context 65536 needs {plan.total / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free: up to "
        f"{most} positions fit (--context {most})"
    )
    MemoryPlan(FLASH, official_draft(), most, 4).check(free)
    with pytest.raises(ConfigError):
        MemoryPlan(FLASH, official_draft(), most + 1, 4).check(free)
    assert plan.most(CARD) == FLASH.max_position_embeddings
    assert plan.most(10**10) == 0
    with pytest.raises(ConfigError, match=r"context must lie in 2\.\.262144, got 262145"):
        MemoryPlan(FLASH, None, 262145, 4)


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("context", [2, 64, 511])
def test_caches_are_those_that_are_made(with_draft: bool, context: int) -> None:
    target, draft = pair()
    weights = TargetWeights.of(target.model)
    packed = DraftWeights.of(draft) if with_draft else None
    plan = MemoryPlan(target.config, draft.config if with_draft else None, context)
    made = Caches.empty(weights, packed, context).tensors()
    assert plan.caches == sum(one.nbytes for one in made)


def test_a_nextn_block_has_a_latent_cache_more() -> None:
    target = tiny_ling(dtype=torch.bfloat16, nextn=True)
    weights, nextn = TargetWeights.of(target.model), NextNWeights.of(target.model)
    made = Caches.empty(weights, None, 64, nextn)
    plain = Caches.empty(weights, None, 64)
    more = sum(one.nbytes for one in made.tensors()) - sum(one.nbytes for one in plain.tensors())
    assert more == (64 + 32) * target.config.latent_dim * 2
    assert made.latents[target.config.num_hidden_layers].nbytes == more
    plan = MemoryPlan(target.config, None, 64, nextn=True)
    assert plan.caches == sum(one.nbytes for one in made.tensors())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nextn_block_weighs_what_a_model_with_it_holds_more(ranks: int) -> None:
    def model(nextn: bool) -> LingModel:
        whole = tiny_ling(dtype=torch.bfloat16, ranks=ranks, reduce=lambda part: part, nextn=nextn)
        return whole.model

    def held(model: LingModel) -> dict[int, int]:
        return storages([*model.parameters(), *model.buffers()])

    both = model(True)
    plan = MemoryPlan(both.config, None, 64, ranks, nextn=True)
    assert plan.draft_weights == sum(held(both).values()) - sum(held(model(False)).values())
    # laid out for the step they are the same storages
    TargetWeights.of(both)
    block = storages(NextNWeights.of(both))
    block.pop(NextNWeights.of(both).layer.mixer.inverse.untyped_storage()._cdata)  # type: ignore[union-attr]
    assert plan.draft_weights == sum(block.values())
    assert block.items() <= held(both).items()
    alone = MemoryPlan(both.config, None, 64, ranks)
    assert alone.draft_weights == plan.draft_copy == 0
    assert plan.target_weights == alone.target_weights
    # what the block reads of a prompt is kept, piece by piece and then joined
    assert plan.prompt - alone.prompt == 2 * 64 * both.config.hidden_size * 2


def test_a_plan_has_one_draft_which_the_target_has() -> None:
    with pytest.raises(ConfigError, match="one draft: either a model or the NEXTN block"):
        MemoryPlan(FLASH, official_draft(), 64, nextn=True)
    without = tiny_ling("tiny").config
    with pytest.raises(ConfigError, match="no NEXTN block: num_nextn_predict_layers is 0"):
        MemoryPlan(without, None, 64, nextn=True)


@pytest.mark.parametrize("variant", ["flash", "tiny"])
def test_a_second_step_finds_the_same_views(variant: str) -> None:
    target = tiny_ling(variant, dtype=torch.bfloat16, nextn=variant == "flash")
    before = {name: values.clone() for name, values in target.model.state_dict().items()}
    packed, again = TargetWeights.of(target.model), TargetWeights.of(target.model)
    one, other = leaves(packed), leaves(again)
    if variant == "flash":
        one += leaves(NextNWeights.of(target.model))
        other += leaves(NextNWeights.of(target.model))
    assert len(one) == len(other) > 50
    for first, second in zip(one, other, strict=True):
        assert first.data_ptr() == second.data_ptr()
        assert first.shape == second.shape
        assert torch.equal(first, second)
        assert second.is_contiguous()
    for name, values in target.model.state_dict().items():
        assert torch.equal(values, before[name]), name
    # a model that was moved is laid out anew
    target.model.float()
    moved = leaves(TargetWeights.of(target.model))
    assert all(values.dtype == torch.float32 for values in moved)
    for first, second in zip(one, moved, strict=False):
        assert torch.equal(first.float(), second)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_those_that_are_held(ranks: int) -> None:
    target, draft = pair(ranks)
    plan = MemoryPlan(target.config, draft.config, 64, ranks)
    table = target.config.vocab_size * target.config.hidden_size * 2
    held = storages([*target.model.parameters(), *target.model.buffers()])
    assert plan.target_weights == sum(held.values()) - table // ranks + table
    # laying them out anew costs nothing
    weights = TargetWeights.of(target.model)
    again = storages([*target.model.parameters(), *target.model.buffers()])
    assert sum(again.values()) == sum(held.values())
    assert weights.head.untyped_storage()._cdata in again
    loaded = storages([one for _, one in draft.trainable()])
    assert plan.draft_weights == sum(loaded.values())
    packed = DraftWeights.of(draft, ranks)
    copied = {k: n for k, n in storages(packed).items() if k not in loaded}
    # the frequencies, which this test's cast to bfloat16 has reached and a loader's does not
    copied.pop(packed.inverse.untyped_storage()._cdata, None)
    assert plan.draft_copy == sum(copied.values())


def laid_out(step: GraphStep) -> int:
    """Bytes of a step's scratch."""
    step.arena.only = "no component: everything is laid out and nothing launched"
    step.run_body()
    candidates = 0
    if step.draft is not None:
        count = SHORTLIST_PARTS * SHORTLIST_EACH
        candidates = step.draft.block_size * count * (count + 3) * 4
    return sum(storages(vars(step.arena), vars(step._filters)).values()) + candidates


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_release_is_laid_out_as_planned(ranks: int) -> None:
    with torch.device("meta"):
        model = LingModel(FLASH, ranks=ranks, reduce=lambda part: part).to(torch.bfloat16)
        draft = DSparkDraftModel(official_draft()).to(torch.bfloat16)
        table = torch.empty(FLASH.vocab_size, FLASH.hidden_size, dtype=torch.bfloat16)
    target = LingTarget(model, "meta")
    step = GraphStep(target, draft, context=65536, embedding=table if ranks > 1 else None)
    plan = MemoryPlan(FLASH, draft.config, 65536, ranks)
    assert sum(one.nbytes for one in step.caches.tensors()) == plan.caches
    used = laid_out(step)
    assert used <= plan.scratch <= 2 * used


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_ranks_share_is_as_planned(ranks: int) -> None:
    size = exchange_heap(FLASH, ranks)
    peers = Peers([torch.empty(size, dtype=torch.uint8, device="meta")] * ranks)
    PromptSum(peers)
    # a draft of the most slots; others leave a little
    Exchange(peers, FLASH.hidden_size, FLASH.vocab_size // ranks, 16)
    assert peers.held_bytes == size
    plan = MemoryPlan(FLASH, official_draft(), 8192, ranks)
    assert plan.parts()["exchange"] == size + 16 * FLASH.vocab_size * 4
    assert plan.total == sum(plan.parts().values())
    alone = MemoryPlan(FLASH, official_draft(), 8192)
    assert alone.exchange == 0
    assert "exchange" not in alone.parts()


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_release_with_its_nextn_block_is_laid_out_as_planned(ranks: int) -> None:
    with torch.device("meta"):
        model = LingModel(FLASH, ranks=ranks, reduce=lambda part: part, nextn=True)
        table = torch.empty(FLASH.vocab_size, FLASH.hidden_size, dtype=torch.bfloat16)
    target = LingTarget(model.to(torch.bfloat16), "meta")
    step = GraphStep(target, None, context=65536, nextn=3, embedding=table if ranks > 1 else None)
    plan = MemoryPlan(FLASH, None, 65536, ranks, nextn=True)
    assert sum(one.nbytes for one in step.caches.tensors()) == plan.caches
    used = laid_out(step)
    assert used <= plan.scratch <= 2 * used


def test_scratch_of_a_nextn_block_is_a_bound_that_is_not_far_off() -> None:
    target = tiny_ling(dtype=torch.bfloat16, nextn=True)
    step = GraphStep(target, None, context=64, nextn=3)
    used = laid_out(step)
    plan = MemoryPlan(target.config, None, 64, nextn=True)
    assert used <= plan.scratch <= 2 * used + (1 << 20)


@pytest.mark.parametrize("with_draft", [True, False])
def test_scratch_is_a_bound_that_is_not_far_off(with_draft: bool) -> None:
    target, draft = pair()
    step = GraphStep(target, draft if with_draft else None, context=64)
    used = laid_out(step)
    plan = MemoryPlan(target.config, draft.config if with_draft else None, 64)
    assert used <= plan.scratch <= 2 * used + (1 << 20)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_draft", [True, False])
def test_a_dense_decoder_is_laid_out_as_planned(family: str, tied: bool, with_draft: bool) -> None:
    target = tiny_target(family=family, tie_word_embeddings=tied)
    target.model.to(torch.bfloat16)
    draft = tiny_draft(target, block_size=7).to(torch.bfloat16) if with_draft else None
    shape = DenseShape.of(target.config)
    plan = MemoryPlan(shape, draft.config if draft else None, 300)
    held = storages(list(target.model.parameters()))
    assert plan.target_weights == sum(held.values()) == 2 * shape.parameters
    # laying them out anew costs nothing, and a second step finds the same views
    before = {name: values.clone() for name, values in target.model.state_dict().items()}
    weights = dense_weights(target)
    assert sum(storages(list(target.model.parameters())).values()) == sum(held.values())
    again = leaves(dense_weights(target))
    assert len(again) > 40
    for one, other in zip(leaves(weights), again, strict=True):
        # the frequencies are made anew
        assert one.data_ptr() == other.data_ptr() or one.dtype == torch.float32
    for name, values in target.model.state_dict().items():
        assert torch.equal(values, before[name]), name
    step = GraphStep(target, draft, context=300)
    assert plan.caches == sum(one.nbytes for one in step.caches.tensors())
    used = laid_out(step)
    assert used <= plan.scratch <= 2 * used + (1 << 20)
    # a NEXTN block is none of theirs
    with pytest.raises(ConfigError, match="no NEXTN block"):
        MemoryPlan(shape, None, 300, nextn=True)


def test_qwen3_8b_with_its_draft_is_laid_out_as_planned() -> None:
    shape = read_target(ROOT / "configs/targets/qwen3-8b.json")
    assert isinstance(shape, DenseShape)
    path = ROOT / "configs/drafts/qwen3-8b-dspark-block7.json"
    raw = read_object(path, ConfigError)
    with torch.device("meta"):
        draft = DSparkDraftModel(from_json(raw, str(path), target_layers=36)).to(torch.bfloat16)
    step = GraphStep(dense_target(shape, "meta"), draft, context=32768)
    plan = MemoryPlan(shape, draft.config, 32768)
    assert sum(one.nbytes for one in step.caches.tensors()) == plan.caches
    # 147,456 bytes a token of the target, and 20,480 of the draft
    assert plan.caches == (32768 + 32) * (147_456 + 20_480)
    used = laid_out(step)
    assert used <= plan.scratch <= 2 * used
    plan.check(CARD)
    assert plan.total < 0.3 * CARD


def test_small_gates_are_planned_in_parts() -> None:
    shape = read_target(ROOT / "configs/targets/smollm2-135m.json")
    assert isinstance(shape, DenseShape)
    used = laid_out(GraphStep(dense_target(shape, "meta"), None, context=8192))
    assert used <= MemoryPlan(shape, None, 8192).scratch <= 2 * used


def test_the_table_shows_every_part_and_the_total() -> None:
    plan = MemoryPlan(FLASH, None, 4096, 4)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(plan.table(CARD))
    text = shown.get()
    for name, size in plan.parts().items():
        assert name in text
        assert f"{size / 1e9:.3f}" in text
    assert f"{plan.total / 1e9:.3f}" in text
    assert "141.000" in text
    assert plan.to_dict()["total"] == plan.total == sum(plan.parts().values())
