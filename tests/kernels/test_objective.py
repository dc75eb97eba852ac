"""The objective by kernels equals the definition, and so does its gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.config import LossSettings
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.kernels.objective import SPLITS, SUMS, slot_sums, to_gradient_
from dspark.losses import Sums, denominators, eager, objective
from dspark.losses.one_pass import objective_in_one_pass, usable
from dspark.training.objective import Objective

HIDDEN, RANK, BLOCK = 24, 6, 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"accept_length_temperature": 0.6},
    {"slot_weights": "survival", "survival_smoothing": 0.3},
    {"distance": "lk_hybrid"},
    {"distance": "lk_hybrid", "accept_length_temperature": 0.6, "slot_weights": "survival"},
    {"distance": "nla", "decay": 2.0},
    {"accept_length_form": "path"},
    {"accept_length_form": "path_exact", "accept_length_temperature": 0.6},
    {"accept_length_form": "chain", "accept_length_focal": 2.0},
]
CASES = [(1.0, False), (0.6, False), (1.0, True), (0.5, True)]


def draw(seed: int, rows: int, vocabulary: int, device: torch.device) -> tuple[Tensor, ...]:
    """Logits of draft and target, labels, liveness and coefficients of ``rows`` slots."""
    generator = torch.Generator().manual_seed(seed)
    draft = 3 * torch.randn(rows, vocabulary, generator=generator)
    target = draft / 2 + 2 * torch.randn(rows, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    live = torch.arange(rows) % 3 != 1
    weights = torch.rand(4, rows, generator=generator)
    return tuple(one.to(device) for one in (draft, target, labels, live, weights))


def by_kernels(
    inputs: tuple[Tensor, ...], temperature: float, with_kl: bool, **tiles: int
) -> tuple[Tensor, Tensor]:
    """Sums [SUMS, rows] and the gradient [rows, vocabulary]."""
    draft, target, labels, live, weights = inputs
    how: dict[str, Any] = {"accept_temperature": temperature, "with_kl": with_kl, **tiles}
    sums = torch.full((SUMS, len(draft)), torch.nan, device=draft.device)
    scratch = torch.full((2, SPLITS, 5, len(draft)), torch.nan, device=draft.device)
    slot_sums(draft, target, labels, live, scratch, sums, **how)
    gradient = draft.clone()
    to_gradient_(gradient, target, labels, live, sums, weights, **how)
    return sums, gradient


def by_definition(
    inputs: tuple[Tensor, ...], temperature: float, with_kl: bool
) -> tuple[Tensor, Tensor]:
    """Distances [5 or 6, rows] by their places in the sums, and the gradient; float64."""
    draft, target, labels, _, weights = inputs
    draft = draft.double().requires_grad_()
    found = eager.slot_distances(
        draft,
        target.double(),
        labels,
        accept_temperature=temperature,
        with_kl=with_kl,
        with_labels=True,
    )
    values = torch.stack(
        [one for one in (found.ce, found.l1, found.accept_l1, found.kl) if one is not None]
    )
    (gradient,) = torch.autograd.grad((values * weights[: len(values)]).sum(), draft)
    assert found.peak is not None
    assert found.target_ce is not None
    return torch.cat([values.detach(), found.peak[None], found.target_ce[None]]), gradient


def places(with_kl: bool) -> list[int]:
    """Where the sums hold what `by_definition` gives."""
    return [0, 1, 2, 3, 8, 11] if with_kl else [0, 1, 2, 8, 11]


@pytest.mark.parametrize(("temperature", "with_kl"), CASES)
@pytest.mark.parametrize("vocabulary", [2, 101, 1024, 5000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distances_and_gradient_of_a_slot(
    seed: int, vocabulary: int, temperature: float, with_kl: bool, device: torch.device
) -> None:
    inputs = draw(seed, 5, vocabulary, device)
    live = inputs[3]
    expected, slope = by_definition(inputs, temperature, with_kl)
    for one in inputs[:2]:
        one[~live] = torch.nan
    # tiles below, above and beside the vocabulary's size
    sums, gradient = by_kernels(inputs, temperature, with_kl, block=512)
    values = sums[places(with_kl)].double()
    torch.testing.assert_close(values[:, live], expected[:, live], rtol=1e-5, atol=1e-5)
    scale = float(slope[live].abs().max())
    torch.testing.assert_close(gradient[live].double(), slope[live], rtol=0, atol=2e-6 * scale)
    assert scale > 0.1
    assert not sums[:, ~live].any()
    assert not gradient[~live].any()


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_each_distance_alone_has_the_right_gradient(index: int, device: torch.device) -> None:
    *inputs, weights = draw(index, 4, 77, device)
    weights[torch.arange(4) != index] = 0
    _, slope = by_definition((*inputs, weights), 0.7, True)
    _, gradient = by_kernels((*inputs, weights), 0.7, True)
    live = inputs[3]
    assert slope[live].abs().max() > 1e-3
    torch.testing.assert_close(gradient[live].double(), slope[live], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bfloat16_logits_are_summed_in_float32(seed: int, device: torch.device) -> None:
    draft, target, *rest = draw(seed, 4, 1001, device)
    inputs = (draft.bfloat16(), target.bfloat16(), *rest)
    sums, gradient = by_kernels(inputs, 0.6, False)
    expected, slope = by_definition(inputs, 0.6, False)
    live = rest[1]
    assert gradient.dtype == torch.bfloat16
    found = sums[places(False)][:, live].double()
    torch.testing.assert_close(found, expected[:, live], rtol=1e-5, atol=1e-5)
    # the interpreter cuts off what a GPU rounds
    last = 2**-8 if device.type == "cuda" else 2**-7
    torch.testing.assert_close(gradient[live].double(), slope[live], rtol=last, atol=1e-6)


def test_a_real_vocabulary_keeps_float32_accuracy(device: torch.device) -> None:
    draft, target, *rest = draw(0, 2, 157184, device)
    rest[1][:] = True
    inputs = (draft.bfloat16(), target.bfloat16(), *rest)
    # the interpreter pays by the tile
    tiles = {} if device.type == "cuda" else {"block": 1 << 14}
    sums, _ = by_kernels(inputs, 0.7, True, **tiles)
    expected, slope = by_definition(inputs, 0.7, True)
    torch.testing.assert_close(sums[places(True)].double(), expected, rtol=1e-5, atol=1e-5)
    widened = (inputs[0].float(), inputs[1].float(), *rest)
    _, gradient = by_kernels(widened, 0.7, True, **tiles)
    gap = (gradient - slope).norm() / slope.norm()
    assert gap < 1e-5


def test_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    inputs = draw(0, 6, 333, device)
    inputs[3][:] = True
    sums, gradient = by_kernels(inputs, 0.7, True)
    for row in (0, 5):
        only = tuple(one[row : row + 1].contiguous() for one in inputs[:4])
        alone, slope = by_kernels((*only, inputs[4][:, row : row + 1].contiguous()), 0.7, True)
        assert torch.equal(alone[:, 0], sums[:, row])
        assert torch.equal(slope[0], gradient[row])


@pytest.mark.parametrize(("temperature", "with_kl"), CASES)
def test_disjoint_supports_are_finite(
    temperature: float, with_kl: bool, device: torch.device
) -> None:
    draft = torch.full((2, 6), -300.0, device=device)
    target = torch.full((2, 6), -300.0, device=device)
    draft[:, :3], target[:, 3:] = 300.0, 300.0
    labels = torch.tensor([4, 0], device=device)
    live = torch.ones(2, dtype=torch.bool, device=device)
    inputs = (draft, target, labels, live, torch.ones(4, 2, device=device))
    sums, gradient = by_kernels(inputs, temperature, with_kl)
    expected, slope = by_definition(inputs, temperature, with_kl)
    found = sums[places(with_kl)].double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-6)
    assert gradient.abs().max() > 0.1


def test_equal_distributions_pull_nowhere(device: torch.device) -> None:
    draft, _, labels, live, weights = draw(0, 3, 1500, device)
    weights[0], weights[3] = 0, 0
    sums, gradient = by_kernels((draft, draft.clone(), labels, live, weights), 1.0, True)
    assert not sums[1:6].any()
    assert not gradient.any()


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    draft, target, labels, live, weights = draw(0, 4, 33, device)
    sums = torch.empty(SUMS, 4, device=device)
    scratch = torch.empty(2, SPLITS, 5, 4, device=device)
    how: dict[str, Any] = {"accept_temperature": 1.0, "with_kl": False}
    with pytest.raises(ValueError, match=r"target_logits \(4, 33\), got \(3, 33\)"):
        slot_sums(draft, target[:3], labels, live, scratch, sums, **how)
    with pytest.raises(ValueError, match="contiguous draft_logits"):
        slot_sums(draft.T.contiguous().T, target, labels, live, scratch, sums, **how)
    with pytest.raises(ValueError, match=r"out \(12, 4\)"):
        slot_sums(draft, target, labels, live, scratch, sums[:4], **how)
    with pytest.raises(ValueError, match=r"coefficients \(4, 4\), got \(3, 4\)"):
        to_gradient_(draft, target, labels, live, sums, weights[:3], **how)
    with pytest.raises(ValueError, match=r"\[M, V\], got \(4, 33, 1\)"):
        slot_sums(draft[..., None], target, labels, live, scratch, sums, **how)


class Batch:
    """A draft and blocks of ``lengths`` supervised slots each."""

    def __init__(
        self,
        lengths: list[int],
        device: torch.device,
        *,
        vocabulary: int = 53,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **heads: Any,
    ) -> None:
        config = DSparkConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=16,
            vocab_size=vocabulary,
            max_position_embeddings=64,
            block_size=BLOCK,
            target_layer_ids=[1],
            num_target_layers=4,
            mask_token_id=0,
            initializer_range=0.3,
            **{"markov_rank": RANK, **heads},
        )
        torch.manual_seed(seed)
        self.draft: DSparkDraftModel = DSparkDraftModel(config).to(device, dtype)  # type: ignore[call-arg]
        generator = torch.Generator().manual_seed(seed)
        head = torch.randn(vocabulary, HIDDEN, generator=generator).to(device, dtype)
        self.draft.attach(head, head)
        shape = (len(lengths), BLOCK)
        hidden = torch.randn(2, *shape, HIDDEN, generator=generator) / 2
        self.hidden, self.target_hidden = hidden.to(device, dtype)
        self.hidden.requires_grad_()
        ids = torch.randint(vocabulary, (2, *shape), generator=generator).to(device)
        self.labels, self.prev_ids = ids
        self.mask = (torch.arange(BLOCK) < torch.tensor(lengths).reshape(-1, 1)).to(device)

    def one_pass(self, settings: LossSettings) -> tuple[Tensor, Sums]:
        return objective_in_one_pass(
            self.hidden,
            self.target_hidden,
            self.labels,
            self.mask,
            self.prev_ids,
            draft=self.draft,
            target_head=self.draft.base_logits,
            settings=settings,
            denominators=denominators(self.mask, settings),
            ramp=0.7,
        )

    def eager(self, settings: LossSettings) -> tuple[Tensor, Sums]:
        draft = self.draft
        head = draft.markov_head
        embedding = None if head is None else head.embed(self.prev_ids)
        sums = objective(
            draft.slot_logits(self.hidden, self.prev_ids),
            draft.base_logits(self.target_hidden),
            self.labels,
            self.mask,
            draft.confidence_logits(self.hidden, embedding),
            settings,
        )
        return sums.loss(denominators(self.mask, settings), settings, 0.7), sums

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield "hidden", self.hidden
        for name, parameter in self.draft.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                yield name, parameter

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        named = dict(self.named())
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_same(batch: Batch, settings: LossSettings, tolerance: float) -> None:
    """Loss, sums and every gradient equal the definition's, to ``tolerance`` of the largest."""
    loss, sums = batch.one_pass(settings)
    expected_loss, expected = batch.eager(settings)
    found = {"loss": loss, "sums": sums.to_vector(), **batch.gradients(3 * loss)}
    wanted = batch.gradients(3 * expected_loss)
    wanted |= {"loss": expected_loss, "sums": expected.to_vector()}
    assert set(found) == set(wanted)
    for name, reference in wanted.items():
        scale = float(reference.detach().abs().max())
        gap = float((found[name] - reference).detach().abs().max())
        assert gap <= tolerance * scale, (name, gap, scale)
    assert not sums.ce.requires_grad


@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients_equal_the_definition(
    options: dict[str, Any], device: torch.device
) -> None:
    batch = Batch([4, 0, 1, 2, 4], device)
    with torch.no_grad():
        likely = batch.draft.slot_logits(batch.hidden, batch.prev_ids).argmax(-1)
    batch.labels[:, 0] = likely[:, 0]  # random labels are all errors
    assert_same(batch, LossSettings(chunk_blocks=3, **options), 2e-5)


@pytest.mark.parametrize(
    "heads",
    [
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        {"enable_confidence_head": False},
        {"markov_rank": 0},
    ],
)
def test_all_heads(heads: dict[str, Any], device: torch.device) -> None:
    assert_same(Batch([4, 3, 1], device, **heads), LossSettings(chunk_blocks=2), 2e-5)


@pytest.mark.parametrize("lengths", [[1], [0, 0, 1], [4]])
def test_few_slots(lengths: list[int], device: torch.device) -> None:
    assert_same(Batch(lengths, device), LossSettings(), 2e-5)


@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_nothing_supervised_gives_zeros(lengths: list[int], device: torch.device) -> None:
    batch = Batch(lengths, device)
    loss, sums = batch.one_pass(LossSettings())
    assert loss.item() == 0
    assert not sums.to_vector().any()
    for name, gradient in batch.gradients(loss).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_validation_makes_no_gradient(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch([4, 2, 3], device)
    settings = LossSettings(chunk_blocks=2)
    monkeypatch.setattr("dspark.kernels.objective.to_gradient_", None)
    with torch.no_grad():
        loss, sums = batch.one_pass(settings)
    assert not loss.requires_grad
    expected = batch.eager(settings)[1].to_vector()
    torch.testing.assert_close(sums.to_vector(), expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_supervised_may_hold_anything(device: torch.device) -> None:
    batch = Batch([3, 0, 2], device, enable_confidence_head=False)
    settings = LossSettings()
    loss, _ = batch.one_pass(settings)
    clean = batch.gradients(loss)
    with torch.no_grad():
        batch.hidden[~batch.mask] = torch.nan
        batch.target_hidden[~batch.mask] = torch.inf
    spoilt, sums = batch.one_pass(settings)
    assert torch.equal(spoilt, loss)
    assert sums.to_vector().isfinite().all()
    for name, gradient in batch.gradients(spoilt).items():
        if name == "hidden":
            torch.testing.assert_close(gradient, clean[name])
        assert gradient.isfinite().all(), name


def test_frozen_factors_get_no_gradient(device: torch.device) -> None:
    batch = Batch([3, 1], device)
    assert batch.draft.markov_head is not None
    batch.draft.markov_head.requires_grad_(False)
    loss, _ = batch.one_pass(LossSettings())
    loss.backward()  # type: ignore[no-untyped-call]
    expected, _ = batch.eager(LossSettings())
    (slope,) = torch.autograd.grad(expected, batch.hidden)
    assert batch.draft.markov_head.markov_w2.weight.grad is None
    torch.testing.assert_close(batch.hidden.grad, slope, rtol=1e-4, atol=1e-6)


def test_a_second_backward_pass_is_refused(device: torch.device) -> None:
    loss, _ = Batch([3, 1], device).one_pass(LossSettings())
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_autocast_rounds_the_logits_and_nothing_else(device: torch.device) -> None:
    batch = Batch([4, 2, 3], device, vocabulary=501)
    settings = LossSettings(chunk_blocks=2)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss, sums = batch.one_pass(settings)
        draft_logits = batch.draft.base_logits(batch.hidden)
        head = batch.draft.markov_head
        assert head is not None
        latent = head.embed(batch.prev_ids).bfloat16()
        flat = draft_logits.detach().flatten(0, 1)
        flat.addmm_(latent.flatten(0, 1), head.markov_w2.weight.detach().bfloat16().T)
        target_logits = batch.draft.base_logits(batch.target_hidden)
    exact = objective(
        flat.double().view_as(draft_logits),
        target_logits.double(),
        batch.labels,
        batch.mask,
        None,
        settings,
    )
    for name in ("ce", "l1", "accept_length", "alpha"):
        value, reference = getattr(sums, name).double(), getattr(exact, name)
        # a library's products of other shapes may round a logit the other way
        rtol = 1e-3 if device.type == "cuda" else 1e-5
        torch.testing.assert_close(value, reference, rtol=rtol, atol=0)
    expected, _ = batch.eager(settings)
    slopes = batch.gradients(expected)
    for name, gradient in batch.gradients(loss).items():
        assert gradient.dtype == torch.float32
        # logits of 8 bits and a gradient of 8 bits
        gap = (gradient - slopes[name]).norm() / slopes[name].norm()
        assert gap < 0.02, name


def test_no_float32_logits_and_none_beyond_a_chunk(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.dtype, torch.Size]] = []
    plain = slot_sums

    def watched(draft: Tensor, target: Tensor, *rest: Any, **how: Any) -> None:
        seen.extend((one.dtype, one.shape) for one in (draft, target))
        plain(draft, target, *rest, **how)

    monkeypatch.setattr("dspark.kernels.objective.slot_sums", watched)
    batch = Batch([4] * 5, device, vocabulary=1009, dtype=torch.bfloat16)
    loss, _ = batch.one_pass(LossSettings(chunk_blocks=2))
    assert loss.isfinite()
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert [shape[0] for _, shape in seen] == [8, 8, 8, 8, 4, 4]


def test_only_a_gpu_can_take_it(device: torch.device) -> None:
    batch = Batch([4], device)
    assert usable(batch.draft, batch.hidden) == (device.type == "cuda")
    assert not usable(Batch([4], device, dtype=torch.float64).draft, batch.hidden)


def test_the_trainer_gets_the_same_from_both(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch([4, 4, 2], device)
    found: list[list[Tensor]] = []
    calls: list[None] = []
    monkeypatch.setattr("dspark.losses.one_pass.usable", lambda *_: True)

    def counted(*given: Any, **how: Any) -> Any:
        calls.append(None)
        return objective_in_one_pass(*given, **how)

    monkeypatch.setattr("dspark.losses.one_pass.objective_in_one_pass", counted)
    for chosen in (True, False):
        settings = LossSettings(chunk_blocks=2, one_pass=chosen)
        model = Objective(batch.draft, batch.draft.base_logits, settings)
        loss, vector = model(
            batch.hidden.detach().view(1, -1, HIDDEN),  # any taps will do
            batch.target_hidden,
            anchor_ids=batch.prev_ids[None, :, 0],
            anchors=torch.tensor([[2, 5, 9]], device=device),
            block_rows=torch.arange(3, device=device),
            labels=batch.labels,
            prev_ids=batch.prev_ids,
            mask=batch.mask,
            denominators=denominators(batch.mask, settings),
            ramp=0.5,
        )
        slopes = torch.autograd.grad(loss, list(batch.draft.parameters()))
        found.append([loss.detach().double(), vector, *slopes])
        assert len(calls) == 1  # by the first
    for one, other in zip(*found, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=3e-5 * scale)
