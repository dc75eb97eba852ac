"""The end of a step: choices, accepted proposals, stops, budgets, records."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.decoding.sampling import SamplingParams, pick
from dspark.kernels.accept import RECORD, Done, Field, Real, Record, accept, pick_parts

SIZE = int(Field.STOPS) + 8


class Step:
    """State and the two kernels."""

    def __init__(self, device: torch.device, vocabulary: int = 300, parts: int = 4) -> None:
        self.device, self.vocabulary = device, vocabulary
        self.ints = torch.zeros(SIZE, dtype=torch.int32, device=device)
        self.reals = torch.zeros(len(Real), device=device)
        self.floors = torch.full((16,), -torch.inf, device=device)
        self.values = torch.full((16, parts), torch.nan, device=device)
        self.ids = torch.full((16, parts), -7, dtype=torch.int32, device=device)
        self.mailbox = torch.zeros(1, dtype=torch.int32, device=device)
        self.schedule = torch.zeros(8, dtype=torch.int32, device=device)
        self.ring = torch.full((4, RECORD), -1, dtype=torch.int32, device=device)
        self.set({Field.LEFT: 100, Field.NUM_DRAFT: 7, Field.REQUEST: 5})

    def set(self, values: dict[Field, int]) -> None:
        for field, value in values.items():
            self.ints[field] = value

    def choices(self, logits: Tensor, rows: int) -> list[int]:
        """The best of every live row."""
        self.set({Field.LIVE_ROWS: rows})
        pick_parts(logits, self.floors, self.ints, self.reals, self.values, self.ids, block=32)
        best = self.values[:rows].argmax(1, keepdim=True)
        return [int(one) for one in self.ids[:rows].gather(1, best)[:, 0]]

    def run(self, choices: Sequence[int], proposals: Sequence[int], stale: int = 0) -> np.ndarray:
        """`accept` with these choices of the target; its record. ``stale``: left behind them."""
        logits = torch.zeros(16, self.vocabulary, device=self.device)
        for row, choice in enumerate(choices):
            logits[row, choice] = 1.0
        self.set({Field.COUNT: len(proposals)})
        self.choices(logits, len(choices))
        held = torch.full((16,), stale, dtype=torch.int32, device=self.device)
        held[: len(proposals)] = torch.tensor(list(proposals), dtype=torch.int32)
        serial = int(self.ints[Field.SERIAL])
        accept(self.values, self.ids, held, self.ints, self.mailbox, self.schedule, self.ring)
        record = self.ring[serial % 4].cpu().numpy()
        assert record[Record.SERIAL] == serial
        total = int(record[: Record.CHECK].sum(dtype=np.int32))
        assert record[Record.CHECK] == total ^ 0x5EED
        return record

    def __getitem__(self, field: Field) -> int:
        return int(self.ints[field])


def emitted(record: np.ndarray) -> list[int]:
    ids: list[int] = record[Record.IDS : Record.IDS + 16].tolist()
    count = int(record[Record.EMITTED])
    assert set(ids[count:]) <= {-1}
    return ids[:count]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_choices_are_those_of_the_sampler(seed: int, device: torch.device) -> None:
    step = Step(device)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, 300, generator=generator).to(device)
    assert step.choices(logits, 16) == logits.argmax(1).tolist()
    key = (3 << 40) + seed
    step.set({Field.CURSOR: 77, Field.SEED_LOW: seed, Field.SEED_HIGH: 3 << 8})
    step.reals[Real.TEMPERATURE] = 0.8
    positions = torch.arange(78, 94, device=device)
    expected = pick(logits, SamplingParams(temperature=0.8, seed=key), positions)
    assert step.choices(logits, 16) == expected.tolist()
    # ids whose scaled logit is below the floor cannot win
    floor = (logits / 0.8).sort(1, descending=True).values[:, 4]
    step.floors.copy_(floor)
    filtered = pick(logits, SamplingParams(temperature=0.8, seed=key, top_k=5), positions)
    assert step.choices(logits, 16) == filtered.tolist()


def test_ties_go_to_the_lowest_id_and_nan_never_wins(device: torch.device) -> None:
    step = Step(device)
    logits = torch.zeros(16, 300, device=device)
    logits[0, [299, 75, 74, 151]] = 2.0
    logits[1, 5] = torch.nan
    logits[1, 250] = 1.0
    assert step.choices(logits, 3) == [74, 250, 0]
    assert step.ids[3:].eq(-7).all()  # rows that are not live are left alone


@pytest.mark.parametrize("agree", [0, 1, 3, 7])
def test_the_longest_prefix_that_agrees_is_kept(agree: int, device: torch.device) -> None:
    step = Step(device)
    step.set({Field.CURSOR: 40, Field.TURN: 3, Field.SERIAL: 6})
    choices = list(range(10, 18))
    proposals = choices[:agree] + [99] * (7 - agree)
    # what agrees behind the first mistake counts nothing
    if agree < 6:
        proposals[agree + 1] = choices[agree + 1]
    record = step.run(choices, proposals)
    assert emitted(record) == choices[: agree + 1]
    assert record[Record.ACCEPTED] == agree
    assert record[Record.PROPOSED] == 7
    assert record[Record.CURSOR] == 40
    assert record[Record.DONE] == Done.NO
    assert step[Field.CURSOR] == 41 + agree
    assert step[Field.ANCHOR] == choices[agree]
    assert step[Field.START_SLOT] == agree + 1
    assert step[Field.TURN] == 4
    assert (step[Field.INJECT_BASE], step[Field.INJECT_COUNT]) == (40, agree + 1)
    assert step[Field.LEFT] == 99 - agree
    assert (step[Field.LIMIT], step[Field.SERIAL]) == (7, 7)


def test_what_an_earlier_step_proposed_is_not_accepted(device: torch.device) -> None:
    """Though it equals the target's choice at its place."""
    step = Step(device)
    record = step.run([10, 11, 11], [10, 11], stale=11)
    assert (emitted(record), record[Record.ACCEPTED]) == ([10, 11, 11], 2)
    assert step[Field.CURSOR] == 3


def test_the_first_stop_of_a_block_ends_it(device: torch.device) -> None:
    step = Step(device)
    step.set({Field.NUM_STOPS: 2, Field.STOPS: 13})
    step.ints[Field.STOPS + 1] = 12
    record = step.run([10, 11, 12, 13, 14], [10, 11, 12, 13])
    assert emitted(record) == [10, 11, 12]
    assert (record[Record.ACCEPTED], record[Record.DONE]) == (3, Done.STOP)
    assert (step[Field.DONE], step[Field.LIMIT]) == (Done.STOP, 0)
    # a stop behind the output is none
    step = Step(device)
    step.set({Field.NUM_STOPS: 1, Field.STOPS: 12})
    assert emitted(step.run([10, 11, 12], [10, 99])) == [10, 11]
    assert step[Field.DONE] == Done.NO


def test_the_budget_ends_it_and_bounds_the_next_proposals(device: torch.device) -> None:
    step = Step(device)
    step.set({Field.LEFT: 5})
    assert emitted(step.run([10, 11, 12], [10, 99])) == [10, 11]
    assert (step[Field.LEFT], step[Field.LIMIT]) == (3, 2)
    assert emitted(step.run([10, 11, 12, 13], [10, 11, 12])) == [10, 11, 12]
    assert (step[Field.LEFT], step[Field.DONE]) == (0, Done.LENGTH)


def test_a_done_request_stays_as_it_is(device: torch.device) -> None:
    step = Step(device)
    step.set({Field.DONE: Done.STOP, Field.CURSOR: 9, Field.START_SLOT: 2, Field.ANCHOR: 8})
    record = step.run([], [])
    assert (record[Record.EMITTED], record[Record.DONE]) == (0, Done.STOP)
    assert (step[Field.CURSOR], step[Field.START_SLOT], step[Field.ANCHOR]) == (9, 2, 8)
    assert (step[Field.INJECT_COUNT], step[Field.SERIAL], step[Field.TURN]) == (0, 1, 0)


def test_only_its_own_request_is_aborted(device: torch.device) -> None:
    step = Step(device)
    step.mailbox.fill_(4)
    assert step.run([10], [])[Record.DONE] == Done.NO
    step.mailbox.fill_(5)
    record = step.run([11], [])
    assert (record[Record.DONE], emitted(record)) == (Done.ABORT, [11])


def test_logits_without_a_number_end_the_request(device: torch.device) -> None:
    step = Step(device)
    step.choices(torch.full((16, 300), torch.nan, device=device), 2)
    held = torch.zeros(16, dtype=torch.int32, device=device)
    accept(step.values, step.ids, held, step.ints, step.mailbox, step.schedule, step.ring)
    assert (step[Field.DONE], step[Field.CURSOR]) == (Done.NOT_A_NUMBER, 0)
    assert step.ring[0, Record.EMITTED] == 0


def test_simulated_acceptance_follows_its_schedule(device: torch.device) -> None:
    step = Step(device)
    step.set({Field.SIMULATED: 3})
    step.schedule[:3] = torch.tensor([2, 0, 9])
    kept = [len(emitted(step.run(list(range(10, 18)), [99] * 7))) for _ in range(4)]
    assert kept == [3, 1, 8, 3]  # a schedule cannot keep more than was proposed


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    step = Step(device, parts=3)
    with pytest.raises(ValueError, match="power of two"):
        step.run([1], [])
    with pytest.raises(ValueError, match="pick_parts wants"):
        step.choices(torch.zeros(8, 300, device=device), 1)
