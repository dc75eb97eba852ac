"""The chunked objective equals the definition, and never holds all logits."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.config import LossSettings
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.losses import Sums, denominators, objective, objective_chunked

HIDDEN, VOCABULARY = 16, 53
OPTIONS: list[dict[str, Any]] = [
    {},
    {"accept_length_temperature": 0.6},
    {"slot_weights": "survival", "survival_smoothing": 0.3},
    {"distance": "lk_hybrid"},
    {"distance": "lk_hybrid", "accept_length_temperature": 0.6, "slot_weights": "survival"},
    {"distance": "nla", "decay": 2.0},
    {"accept_length_form": "path_exact", "accept_length_temperature": 0.6},
    {"accept_length_form": "chain", "accept_length_focal": 2.0},
]
HEADS: list[dict[str, Any]] = [
    {"markov_head_type": "vanilla"},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn"},
    {"markov_head_type": "vanilla", "enable_confidence_head": False},
    {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    {"markov_rank": 0},
    {"markov_rank": 0, "enable_confidence_head": False},
]


def make_draft(
    block_size: int, dtype: torch.dtype, *, vocabulary: int = VOCABULARY, **heads: Any
) -> DSparkDraftModel:
    config = DSparkConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        block_size=block_size,
        target_layer_ids=[1],
        num_target_layers=4,
        mask_token_id=0,
        initializer_range=0.3,
        **{"markov_rank": 6, **heads},
    )
    torch.manual_seed(0)
    draft: DSparkDraftModel = DSparkDraftModel(config).to(dtype)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    draft.attach(head, head)
    return draft


class Batch:
    """Random hidden states and labels of ``lengths`` blocks, one supervised length each."""

    def __init__(
        self, seed: int, lengths: list[int], block_size: int, dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(lengths), block_size)
        hidden = torch.randn(2, *shape, HIDDEN, generator=generator, dtype=torch.float64) / 2
        self.hidden, self.target_hidden = hidden.to(dtype)
        self.hidden.requires_grad_()
        self.labels = torch.randint(VOCABULARY, shape, generator=generator)
        self.prev_ids = torch.randint(VOCABULARY, shape, generator=generator)
        self.mask = torch.arange(block_size) < torch.tensor(lengths).reshape(-1, 1)

    def sums(self, draft: DSparkDraftModel, settings: LossSettings, *, eager: bool) -> Sums:
        target_head = draft.base_logits
        if not eager:
            return objective_chunked(
                self.hidden,
                self.target_hidden,
                self.labels,
                self.mask,
                self.prev_ids,
                draft=draft,
                target_head=target_head,
                settings=settings,
            )
        embedding = None
        if draft.markov_head is not None:
            embedding = draft.markov_head.embed(self.prev_ids)
        return objective(
            draft.slot_logits(self.hidden, self.prev_ids),
            target_head(self.target_hidden),
            self.labels,
            self.mask,
            draft.confidence_logits(self.hidden, embedding),
            settings,
        )

    def loss_and_gradients(
        self, draft: DSparkDraftModel, settings: LossSettings, *, eager: bool, ramp: float = 0.7
    ) -> tuple[Tensor, dict[str, Tensor | None], Tensor]:
        """Loss, gradients of hidden and heads by name, and the statistics."""
        named = {"hidden": self.hidden, **dict(head_parameters(draft))}
        sums = self.sums(draft, settings, eager=eager)
        loss = sums.loss(denominators(self.mask, settings), settings, ramp)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return loss.detach(), dict(zip(named, gradients, strict=True)), sums.to_vector()


def head_parameters(draft: DSparkDraftModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in draft.named_parameters():
        if name.startswith(("markov_head", "confidence_head")):
            yield name, parameter


def lengths_of(seed: int, blocks: int, block_size: int) -> list[int]:
    """Supervised slots of each block, with 0, 1 and K among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(block_size + 1, (blocks,), generator=generator).tolist()
    return [*drawn[:-3], 0, 1, block_size]


def assert_same(
    one: tuple[Tensor, dict[str, Tensor | None], Tensor],
    other: tuple[Tensor, dict[str, Tensor | None], Tensor],
    tolerance: float,
) -> None:
    """Equal to ``tolerance`` of the largest entry of each tensor."""
    pairs = [(one[0], other[0]), (one[2], other[2])]
    for name, gradient in one[1].items():
        expected = other[1][name]
        assert gradient is not None, name
        assert expected is not None, name
        pairs.append((gradient, expected))
    for actual, reference in pairs:
        scale = float(reference.abs().max())
        torch.testing.assert_close(actual, reference, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("options", OPTIONS)
def test_chunked_equals_eager(heads: dict[str, Any], options: dict[str, Any]) -> None:
    draft = make_draft(5, torch.float64, **heads)
    settings = LossSettings(chunk_blocks=3, **options)
    batch = Batch(0, lengths_of(0, 11, 5), 5)
    eager = batch.loss_and_gradients(draft, settings, eager=True)
    chunked = batch.loss_and_gradients(draft, settings, eager=False)
    # the confidence head and the position weights are float32
    assert_same(chunked, eager, 1e-6)
    assert eager[0] > 0.1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("blocks", "block_size", "chunk"), [(4, 1, 1), (9, 7, 4), (17, 8, 5)])
def test_chunked_equals_eager_in_float32(
    seed: int, blocks: int, block_size: int, chunk: int
) -> None:
    draft = make_draft(block_size, torch.float32)
    settings = LossSettings(chunk_blocks=chunk)
    batch = Batch(seed, lengths_of(seed, blocks, block_size), block_size, torch.float32)
    eager = batch.loss_and_gradients(draft, settings, eager=True)
    chunked = batch.loss_and_gradients(draft, settings, eager=False)
    # autograd's own rounding in the softmax is the larger part
    assert_same(chunked, eager, 2e-5)


@pytest.mark.parametrize("heads", HEADS[:3])
def test_chunk_size_changes_nothing(heads: dict[str, Any]) -> None:
    draft = make_draft(4, torch.float64, **heads)
    batch = Batch(2, lengths_of(2, 12, 4), 4)
    whole = batch.loss_and_gradients(draft, LossSettings(chunk_blocks=100), eager=False)
    for chunk in (1, 2, 5, 11):
        settings = LossSettings(chunk_blocks=chunk)
        parts = batch.loss_and_gradients(draft, settings, eager=False)
        assert_same(parts, whole, 1e-12)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[0, 0, 0], []])
def test_no_supervised_slot_gives_zero_loss_and_zero_gradients(
    heads: dict[str, Any], lengths: list[int]
) -> None:
    draft = make_draft(3, torch.float32, **heads)
    batch = Batch(0, lengths, 3, torch.float32)
    for options in OPTIONS:
        loss, gradients, statistics = batch.loss_and_gradients(
            draft, LossSettings(**options), eager=False
        )
        assert loss.item() == 0.0
        assert torch.equal(statistics, torch.zeros_like(statistics))
        for name, gradient in gradients.items():
            assert gradient is not None, name
            assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.parametrize("options", OPTIONS)
def test_every_head_parameter_gets_a_gradient_whatever_the_weights(options: dict[str, Any]) -> None:
    draft = make_draft(3, torch.float32, markov_head_type="rnn")
    batch = Batch(0, [1], 3, torch.float32)
    weights = {
        "ce_weight": 0.0,
        "l1_weight": 0.0,
        "confidence_weight": 0.0,
        "accept_length_weight": 1.0,
    }
    # as before the ramp: no term has a weight
    _, gradients, _ = batch.loss_and_gradients(
        draft, LossSettings(**{**options, **weights}), eager=False, ramp=0.0
    )
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_a_block_without_supervised_slots_may_hold_anything() -> None:
    draft = make_draft(3, torch.float64)
    settings = LossSettings(chunk_blocks=2)
    batch = Batch(0, [3, 0, 2], 3)
    clean = batch.loss_and_gradients(draft, settings, eager=False)
    with torch.no_grad():
        batch.hidden[1] = torch.nan
        batch.target_hidden[1] = torch.inf
    spoilt = batch.loss_and_gradients(draft, settings, eager=False)
    assert_same(spoilt, clean, 0.0)


def test_target_and_frozen_weights_get_no_gradient() -> None:
    draft = make_draft(3, torch.float64)
    batch = Batch(0, [3, 1], 3)
    batch.target_hidden.requires_grad_()
    settings = LossSettings(chunk_blocks=1)
    loss = batch.sums(draft, settings, eager=False).loss(torch.ones(2), settings, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert batch.target_hidden.grad is None
    reached = {name for name, each in draft.named_parameters() if each.grad is not None}
    assert reached == {name for name, _ in head_parameters(draft)}


def test_nothing_needs_a_graph_in_validation() -> None:
    draft = make_draft(3, torch.float64)
    batch = Batch(0, [3, 1, 2], 3)
    settings = LossSettings(chunk_blocks=1)
    with torch.no_grad():
        sums = batch.sums(draft, settings, eager=False)
    assert not sums.ce.requires_grad
    reference = batch.sums(draft, settings, eager=True)
    torch.testing.assert_close(sums.to_vector(), reference.to_vector(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16])
def test_softmaxes_stay_float32_under_bfloat16(draft_dtype: torch.dtype) -> None:
    """Only the logits are rounded: the sums equal the definition's on the same rounded logits."""
    draft = make_draft(4, draft_dtype)
    batch = Batch(0, [4, 2, 3], 4, draft_dtype)
    settings = LossSettings(chunk_blocks=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = batch.sums(draft, settings, eager=False)
        logits = draft.slot_logits(batch.hidden, batch.prev_ids)
        target_logits = draft.base_logits(batch.target_hidden)
    assert logits.dtype == target_logits.dtype == torch.bfloat16
    exact = objective(
        logits.double(), target_logits.double(), batch.labels, batch.mask, None, settings
    )
    for name in ("ce", "l1", "accept_length"):
        value = getattr(sums, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(exact, name), rtol=1e-5, atol=0)
    sums.loss(denominators(batch.mask, settings), settings, 1.0).backward()  # type: ignore[no-untyped-call]
    assert batch.hidden.grad is not None
    assert batch.hidden.grad.isfinite().all()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Largest tensor made, and the most elements of large tensors alive at one time."""

    def __init__(self, large: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.large = large
        self.largest = self.alive = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
                self.count(each)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        if elements < self.large or id(storage) in self.seen:
            return
        self.seen.add(id(storage))
        self.alive += elements
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.forget, id(storage), elements)

    def forget(self, key: int, elements: int) -> None:
        self.seen.discard(key)
        self.alive -= elements


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS[:3])
@pytest.mark.parametrize("options", OPTIONS)
def test_logits_of_more_than_one_chunk_never_exist(
    heads: dict[str, Any], options: dict[str, Any]
) -> None:
    block_size, chunk, vocabulary = 4, 8, 1009
    draft = make_draft(block_size, torch.float32, vocabulary=vocabulary, **heads)
    settings = LossSettings(chunk_blocks=chunk, **options)
    of_a_chunk = chunk * block_size * vocabulary
    peaks = []
    for blocks in (chunk, 16 * chunk):
        batch = Batch(0, [block_size] * blocks, block_size, torch.float32)
        with Watch(of_a_chunk) as watch:
            batch.loss_and_gradients(draft, settings, eager=False)
        assert watch.largest == of_a_chunk
        assert watch.alive == 0
        peaks.append(watch.peak)
    one, many = peaks
    assert many == one  # neither the forward nor the backward pass holds two chunks


def test_the_watch_sees_the_logits_of_the_definition() -> None:
    draft = make_draft(4, torch.float32)
    batch = Batch(0, [4] * 8, 4, torch.float32)
    with Watch(1000) as watch:
        batch.loss_and_gradients(draft, LossSettings(), eager=True)
    assert watch.largest == 8 * 4 * VOCABULARY
    assert watch.peak >= 4 * watch.largest
