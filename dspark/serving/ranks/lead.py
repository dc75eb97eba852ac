"""Rank 0's model: every commit that it is asked for, the other ranks make as well.

The others are told before this one begins, and decide everything by themselves, from the same
numbers. What they came to is compared behind every step.
"""

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence

from dspark.decoding import Commit, DecodeParams
from dspark.errors import DSparkError
from dspark.serving.card import ModelCard
from dspark.serving.engine import EngineLost, LocalModel
from dspark.serving.ranks.board import Board, Command
from dspark.serving.ranks.seat import Seat
from dspark.target import GoOn

__all__ = ["NO_COMMIT", "Leader", "LoadLeader", "digest", "digest_of_error"]


class Leader:
    """A `Model` of all ranks together."""

    def __init__(self, model: LocalModel, board: Board) -> None:
        self._model, self._board = model, board
        self._step = self._compared = 0

    @property
    def card(self) -> ModelCard:
        return self._model.card

    def stream(
        self, prompt_ids: Sequence[int], params: DecodeParams, go_on: GoOn, /
    ) -> Iterator[Commit]:
        """As `decoding.stream`.

        Raises:
            EngineLost: the ranks do not agree, or something that only one of them has met broke
                this one.
        """
        board = self._board
        board.order(Command.BEGIN, pickle.dumps((list(prompt_ids), params)))

        def all_go_on() -> bool:
            answer = go_on()
            board.order(Command.READ_ON if answer else Command.GIVE_UP)
            return answer

        commits, lost = self._model.stream(prompt_ids, params, all_go_on), False
        try:
            while True:
                board.order(Command.NEXT)
                try:
                    commit = next(commits, None)
                except DSparkError as error:
                    # of the request, and the others have met it too: this is compared at the end
                    self._post(digest_of_error(error))
                    raise
                self._compare()
                self._post(digest(commit) if commit is not None else NO_COMMIT)
                if commit is None:
                    return
                yield commit
                if commit.finish_reason is not None:
                    return
        except (DSparkError, GeneratorExit) as error:
            lost = isinstance(error, EngineLost)
            raise
        except Exception as error:
            lost = True
            raise EngineLost(f"rank 0 failed: {type(error).__name__}: {error}") from error
        finally:
            # one that is lost may never come to the end
            if not lost:
                last = board.order(Command.END)
                # steps may be queued on the device, of every rank the same number
                commits.close()  # type: ignore[attr-defined]
                board.wait_for(last)
                self._compare()

    def forget(self) -> None:
        """Drop what all ranks keep of earlier prompts."""
        self._board.order(Command.FORGET)
        self._model.forget()

    def check(self) -> None:
        """The server watches the processes."""

    def _post(self, found: int) -> None:
        self._step += 1
        self._board.post(0, self._step, found)

    def _compare(self) -> None:
        """The steps that all ranks have come to, which at the end of a request are all.

        Before every step, or the board would hold too few of them.
        """
        while self._compared < self._step:
            step = self._compared + 1
            mine = self._board.posted(0, step)
            others = [self._board.posted(rank, step) for rank in range(1, self._board.ranks)]
            if None in others:
                return
            for rank, found in enumerate(others, 1):
                if found != mine:
                    raise EngineLost(f"rank {rank} and rank 0 came to different results in a step")
            self._compared = step


NO_COMMIT = 0
"""Digest where a prompt was given up."""
LoadLeader = Callable[[Seat], Leader]


def digest(commit: Commit) -> int:
    """Of what all ranks must agree on."""
    told = (commit.token_ids, commit.finish_reason, commit.num_proposed, commit.num_accepted)
    return zlib.crc32(repr(told).encode())


def digest_of_error(error: DSparkError) -> int:
    return zlib.crc32(f"{type(error).__name__}: {error}".encode())
