"""The graph engine's loop over a step that plays a script: two launches ahead, and quiet behind."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.decoding import Commit, DecodeParams, SamplingParams
from dspark.errors import ConfigError, RunError
from dspark.kernels.accept import RING, Done, Field
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.step import GraphStep, StepRecord
from dspark.target import GoOn, ReadingStopped
from dspark.testing import tiny_ling

EOS = 3


class ScriptedStep:
    """Gives the tokens of ``script``, a block a launch; ``log`` has what was asked of it."""

    device = torch.device("cpu")
    context = 64
    num_reused = 3

    def __init__(self, *script: Sequence[int], ends: Done = Done.LENGTH) -> None:
        self.target: Any = SimpleNamespace(max_position_embeddings=512, eos_ids=frozenset({EOS}))
        self.script, self.ends = script, ends
        self.log: list[str] = []
        self.launched = 0
        self.polls = 2
        """Reads before a record is there."""
        self.lost: frozenset[int] = frozenset()
        """Launches that never give a record."""
        self._pending: dict[int, int] = {}
        self._records: dict[int, StepRecord] = {}
        self._at, self._done = 0, Done.NO

    def begin(
        self,
        prompt_ids: Sequence[int],
        params: DecodeParams,
        go_on: GoOn | None,
        schedule: Sequence[int],
    ) -> int:
        self.log.append("begin")
        self.schedule = list(schedule)
        if go_on is not None and not go_on():
            raise ReadingStopped
        assert not self._pending, "a step of the request before is still under way"
        self._at, self._done = 0, Done.NO
        return self.script[0][0]

    def launch(self) -> int:
        serial = self.launched
        self.launched += 1
        self.log.append(f"launch {serial}")
        self._pending[serial] = self.polls
        return serial

    def read(self, serial: int) -> StepRecord | None:
        if serial in self.lost:
            return None
        if serial in self._pending:
            assert serial == min(self._pending), "steps end in order"
            self._pending[serial] -= 1
            if self._pending[serial] > 0:
                return None
            del self._pending[serial]
            self._records[serial] = self._run(serial)
            self.log.append(f"read {serial}")
        return self._records[serial]

    def abort(self) -> None:
        self.log.append("abort")
        self._done = self._done or Done.ABORT

    def _run(self, serial: int) -> StepRecord:
        tokens: list[int] = []
        if not self._done:
            self._at += 1
            tokens = list(self.script[self._at])
            if self._at == len(self.script) - 1:
                self._done = self.ends
        kept = max(0, len(tokens) - 1)
        return StepRecord(serial, tokens, kept, 4, self._done, 1_000_000 * (serial + 1), 9)


def play(
    step: ScriptedStep, *, patience_s: float = 5.0, ids: Sequence[int] = (5, 6), **params: Any
) -> list[Commit]:
    wanted = DecodeParams(**{"max_new_tokens": 32, **params})
    return list(GraphDecoder(step, patience_s).stream(ids, wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize(("ends", "reason"), [(Done.STOP, "stop"), (Done.LENGTH, "length")])
def test_commits_are_the_steps_records(ends: Done, reason: str) -> None:
    step = ScriptedStep([10], [11, 12], [13], [14, 15, 16], ends=ends)
    commits = play(step)
    assert [one.token_ids for one in commits] == [[10], [11, 12], [13], [14, 15, 16]]
    assert [one.num_accepted for one in commits] == [0, 1, 0, 2]
    assert [one.num_proposed for one in commits] == [None, 4, 4, 4]
    assert [one.num_reused for one in commits] == [3, 0, 0, 0]
    assert [one.finish_reason for one in commits] == [None, None, None, reason]
    # from one record to the next by the device's clock
    assert [one.step_s for one in commits[2:]] == pytest.approx([1e-3, 1e-3])


def test_what_it_cannot_do_is_refused_before_anything_begins() -> None:
    step = ScriptedStep([10], [11])
    with pytest.raises(ConfigError, match="no logprobs"):
        play(step, top_logprobs=0)
    with pytest.raises(ConfigError, match="no rejection verification"):
        play(step, verification="rejection")
    assert step.log == []


def test_two_launches_are_under_way_and_none_is_left_behind() -> None:
    step = ScriptedStep([10], [11], [12], [13])
    play(step)
    assert step.log == [
        *("begin", "launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2"),
        *("abort", "read 3"),
    ]
    # the next one starts on a quiet device, and its records are its own
    step.log.clear()
    assert [one.token_ids for one in play(step)] == [[10], [11], [12], [13]]
    assert step.log[:3] == ["begin", "launch 4", "launch 5"]


def test_a_prompt_that_was_given_up_makes_no_step() -> None:
    step = ScriptedStep([10], [11])
    decoder, params = GraphDecoder(step), DecodeParams(max_new_tokens=2)  # type: ignore[arg-type]
    assert list(decoder.stream([5], params, lambda: False)) == []
    assert step.log == ["begin"]
    assert len(play(step, max_new_tokens=2)) == 2


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_closing_early_ends_the_request_and_drains_what_was_launched(taken: int) -> None:
    step = ScriptedStep([10], *([n] for n in range(20, 60)))
    stream = GraphDecoder(step).stream([5], DecodeParams(max_new_tokens=40))  # type: ignore[arg-type]
    for _ in range(taken):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    reads = [one for one in step.log if one.startswith("read")]
    assert len(reads) == step.launched
    assert ("abort" in step.log) is (taken > 1), "nothing to end before the first launch"
    assert play(step, max_new_tokens=1)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("first", "params", "reason"),
    [
        (EOS, {}, "stop"),
        (10, {"stop_ids": frozenset({10})}, "stop"),
        (10, {"max_new_tokens": 1}, "length"),
        (10, {"ids": [5] * 63}, "length"),
    ],
)
def test_the_first_token_may_be_the_last(first: int, params: dict[str, Any], reason: str) -> None:
    step = ScriptedStep([first], [11])
    (only,) = play(step, **params)
    assert (only.token_ids, only.finish_reason) == ([first], reason)
    assert step.launched == 0
    assert len(play(ScriptedStep([EOS], [11]), ignore_eos=True)) == 2


def test_a_result_that_is_no_number_fails_the_request_only() -> None:
    step = ScriptedStep([10], [11], [], ends=Done.NOT_A_NUMBER)
    with pytest.raises(RunError, match="hold no number"):
        play(step)
    assert step.log[-1] == "read 2", "drained"
    step.ends = Done.LENGTH
    assert len(play(step)) == 3


def test_no_result_is_said_once_the_patience_is_over() -> None:
    step = ScriptedStep([10], [11], [12], [13])
    step.lost = frozenset({1})
    with pytest.raises(RunError, match=r"step 1 gave no result for 0\.05 s") as said:
        play(step, patience_s=0.05)
    assert said.value.__context__ is None, "what is stuck is waited for once"


def test_a_prompt_that_exceeds_the_room_is_refused() -> None:
    step = ScriptedStep([10], [11])
    message = "64 prompt tokens and max_new_tokens 1 make 65, more than the engine's 64 positions"
    with pytest.raises(ConfigError, match=message):
        play(step, ids=[5] * 64)
    with pytest.raises(ConfigError, match="no tokens"):
        play(step, ids=[])
    assert step.log == []


def test_what_a_request_asks_fits_the_state() -> None:
    step = GraphStep(tiny_ling(), None, context=64)
    sampling = SamplingParams(temperature=1.0, top_k=1 << 40, seed=(1 << 63) - 1)
    step.launched = launched = (1 << 31) + 5
    step.set_state(
        cursor=4, anchor=1, left=5, params=DecodeParams(max_new_tokens=5, sampling=sampling)
    )
    assert int(step.arena.of(Field.TOP_K)) == (1 << 31) - 1
    assert int(step.arena.of(Field.SERIAL)) == step.launched < 1 << 31
    assert step.launched % RING == launched % RING
