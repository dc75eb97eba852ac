"""Kernels between a NEXTN block's passes: what is read, chosen and written, and what is not."""

import pytest
import torch
from torch import Tensor

from dspark.decoding.sampling import SamplingParams, pick
from dspark.kernels.accept import Field, Real
from dspark.kernels.nextn import join_norms, join_norms_reference, pick_row, take_token

D, V, PARTS, EPS = 40, 300, 4, 1e-6
NOWHERE = 1 << 30
"""A token of no table: whoever looks it up leaves the memory that there is."""


class State:
    """Everything around the kernels; whatever they may not read is NaN or `NOWHERE`."""

    def __init__(
        self, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.ints = torch.zeros(int(Field.STOPS) + 8, dtype=torch.int32, device=device)
        self.reals = torch.zeros(len(Real), device=device)
        self.proposals = torch.randint(V, (16,), generator=generator, dtype=torch.int32).to(device)
        self.table, self.hidden = drawn(V, D), drawn(16, D)
        self.weights = drawn(D), drawn(D)
        self.out = torch.full((16, 2 * D), torch.nan, dtype=dtype, device=device)
        self.values = torch.full((PARTS,), torch.nan, device=device)
        self.ids = torch.full((PARTS,), NOWHERE, dtype=torch.int32, device=device)
        self.logits = torch.randn(16, V, generator=generator).to(device)

    def set(self, values: dict[Field, int]) -> None:
        for field, value in values.items():
            self.ints[field] = value

    def __getitem__(self, field: Field) -> int:
        return int(self.ints[field])

    def join(self, depth: int = 5) -> None:
        join_norms(
            self.ints, self.proposals, self.table, self.hidden, *self.weights, self.out,
            depth=depth, eps=EPS,
        )  # fmt: skip

    def pick(self, slot: int) -> None:
        pick_row(self.logits, self.ints, self.reals, self.values, self.ids, slot=slot, block=32)

    def take(self, slot: int) -> None:
        take_token(
            self.values, self.ids, self.proposals, self.ints, self.table, self.hidden,
            *self.weights, self.out, slot=slot, eps=EPS,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kept_rows_are_joined_and_no_others(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    whole: Tensor | None = None
    for rows in range(16, -1, -1):
        state = State(device, seed, dtype)
        state.set({Field.INJECT_COUNT: rows, Field.ANCHOR: 7, Field.LIMIT: 4, Field.COUNT: 9})
        tokens = [*state.proposals[: max(rows - 1, 0)].tolist(), 7][:rows]
        state.proposals[max(rows - 1, 0) :] = NOWHERE
        state.hidden[rows:] = torch.nan
        state.join()
        expected = join_norms_reference(
            torch.tensor(tokens, dtype=torch.int64, device=device), state.table,
            state.hidden[:rows], *state.weights, EPS,
        )  # fmt: skip
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(state.out[:rows], expected, rtol=tolerance, atol=tolerance)
        assert state.out[rows:].isnan().all()
        # all but the last row, which has the anchor behind it, are those of any other number
        whole = state.out if whole is None else whole
        assert torch.equal(state.out[: max(rows - 1, 0)], whole[: max(rows - 1, 0)])
        assert torch.equal(state.out[:rows, D:], whole[:rows, D:])
        assert state[Field.COUNT] == (4 if rows else 0)


def test_there_are_no_more_proposals_than_the_depth(device: torch.device) -> None:
    state = State(device)
    state.set({Field.INJECT_COUNT: 1, Field.LIMIT: 12})
    state.join(depth=3)
    assert state[Field.COUNT] == 3


@pytest.mark.parametrize("slot", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_choice_is_the_samplers(
    seed: int, temperature: float, slot: int, device: torch.device
) -> None:
    state = State(device, seed)
    # 299 tokens in parts of 75, in pieces of 32: every border is inside something
    state.logits = state.logits[:, :299].contiguous()
    state.set({Field.INJECT_COUNT: 3, Field.DRAFT_ROWS: 1, Field.CURSOR: 50, Field.COUNT: 6})
    state.set({Field.SEED_LOW: seed, Field.SEED_HIGH: 9})
    state.reals[Real.TEMPERATURE] = temperature
    row = 0 if slot else 2
    kept = state.logits[row].clone()
    state.logits[:] = torch.nan
    state.logits[row] = kept
    params = SamplingParams(temperature=temperature, seed=(9 << 32) + seed)
    where = torch.tensor([50 + slot + 1], device=device)
    expected = int(pick(kept[None], params, where)[0])
    state.pick(slot)
    before = state.proposals.clone()
    state.take(slot)
    before[slot] = expected
    assert torch.equal(state.proposals, before)
    assert (state[Field.COUNT], state[Field.DRAFT_ROWS]) == (6, 1)
    assert state[Field.DRAFT_CURSOR] == 50 + slot
    token = torch.tensor([expected], device=device)
    joined = join_norms_reference(token, state.table, state.hidden[[row]], *state.weights, EPS)
    torch.testing.assert_close(state.out[:1], joined, rtol=1e-5, atol=1e-5)
    assert state.out[1:].isnan().all()


@pytest.mark.parametrize("slot", [0, 4])
def test_shares_of_the_vocabulary_have_the_noise_of_the_whole(
    slot: int, device: torch.device
) -> None:
    state = State(device)
    state.set({Field.INJECT_COUNT: 3, Field.DRAFT_ROWS: 1, Field.CURSOR: 50, Field.SEED_LOW: 5})
    state.reals[Real.TEMPERATURE] = 0.8
    state.pick(slot)
    values, ids = torch.zeros(2, 2, device=device), torch.zeros(2, 2, device=device).int()
    for share, logits in enumerate(state.logits.chunk(2, 1)):
        pick_row(
            logits.contiguous(), state.ints, state.reals, values[share], ids[share], slot=slot,
            first=V // 2 * share, block=32,
        )  # fmt: skip
    assert torch.equal(values.flatten(), state.values)
    assert torch.equal(ids.flatten(), state.ids)


def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    state = State(device)
    state.set({Field.INJECT_COUNT: 1, Field.COUNT: 1})
    state.logits[0] = 0.0
    state.logits[0, [299, 151, 150, 75]] = 2.0
    state.logits[0, 3] = torch.nan
    state.pick(0)
    state.take(0)
    assert int(state.proposals[0]) == 75


@pytest.mark.parametrize("slot", [0, 2])
def test_the_last_proposal_has_nothing_behind_it(slot: int, device: torch.device) -> None:
    state = State(device)
    state.set({Field.INJECT_COUNT: 2, Field.DRAFT_ROWS: 1, Field.COUNT: slot + 1})
    state.pick(slot)
    state.take(slot)
    row = 0 if slot else 1
    assert int(state.proposals[slot]) == int(state.logits[row].argmax())
    assert (state[Field.COUNT], state[Field.DRAFT_ROWS]) == (slot + 1, 0)
    assert state.out.isnan().all()


@pytest.mark.parametrize("slot", [0, 2])
def test_behind_the_count_nothing_is_proposed(slot: int, device: torch.device) -> None:
    state = State(device)
    state.set({Field.INJECT_COUNT: 2 if slot == 0 else 0, Field.DRAFT_ROWS: 0, Field.COUNT: slot})
    before = state.proposals.clone()
    state.pick(slot)
    state.take(slot)
    assert torch.equal(state.proposals, before)
    assert (state[Field.COUNT], state[Field.DRAFT_ROWS]) == (slot, 0)
    assert state.out.isnan().all()


def test_without_a_row_nothing_is_chosen(device: torch.device) -> None:
    state = State(device)
    state.set({Field.INJECT_COUNT: 0, Field.COUNT: 4})
    state.pick(0)
    assert state.values.isnan().all()
    state.take(0)
    assert (state[Field.COUNT], state[Field.DRAFT_ROWS]) == (0, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("slot", [0, 2])
def test_logits_without_a_number_end_the_proposals(
    slot: int, temperature: float, device: torch.device
) -> None:
    state = State(device)
    state.reals[Real.TEMPERATURE] = temperature
    state.set({Field.INJECT_COUNT: 1, Field.DRAFT_ROWS: 1, Field.COUNT: 5})
    state.logits[:] = torch.nan
    before = state.proposals.clone()
    state.pick(slot)
    state.take(slot)
    assert torch.equal(state.proposals, before)
    assert (state[Field.COUNT], state[Field.DRAFT_ROWS]) == (slot, 0)
    assert state.out.isnan().all()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    state = State(device)
    state.logits = state.logits[:8]
    with pytest.raises(ValueError, match="pick_row wants logits"):
        state.pick(0)
    state.values, state.ids = state.values[:3], state.ids[:3]
    with pytest.raises(ValueError, match="P a power of two"):
        state.take(0)
    state.out = state.out[:, :D]
    with pytest.raises(ValueError, match=r"join_norms wants .* out \[16, 2 D\]"):
        state.join()
    state = State(device)
    state.table = torch.randn(D, V, device=device).T
    with pytest.raises(ValueError, match="join_norms wants contiguous"):
        state.join()
