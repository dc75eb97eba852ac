"""The process of a rank behind the first: it loads its slice, then does what rank 0 does."""

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from dspark.decoding import Commit
from dspark.errors import DSparkError
from dspark.serving.child import begin
from dspark.serving.engine import EngineLost, LocalModel
from dspark.serving.ranks.board import Board, Command, Topic
from dspark.serving.ranks.lead import NO_COMMIT, digest, digest_of_error
from dspark.serving.ranks.seat import Seat

__all__ = ["BROKEN_OFF", "LoadRank", "follow", "keep_beating", "main"]

log = logging.getLogger(__name__)

LoadRank = Callable[[Seat, Board], LocalModel]
BROKEN_OFF = 3
"""Exit code of a rank that another one has left."""
_BEAT_S = 0.1
_BUSY_S, _NAP_S, _IDLE_NAP_S = 1.0, 20e-6, 1e-3
"""For so long after a command a follower looks often for the next one."""


def main(load: LoadRank, seat: Seat, server: int, levels: Mapping[str, int]) -> None:
    """Follow until the server, process ``server``, ends this process."""
    begin(server, levels)
    board = Board(seat.ranks, seat.board)
    keep_beating(board, seat.rank)
    try:
        model = load(seat, board)
        follow(board, seat.rank, model)
    except EngineLost as error:
        log.debug("rank %d: %s", seat.rank, error)
        raise SystemExit(BROKEN_OFF) from None
    except DSparkError as error:
        said = (type(error).__name__, str(error))
        board.say(seat.rank, Topic.END, pickle.dumps(said))
        raise SystemExit(2) from None


def keep_beating(board: Board, rank: int) -> None:
    """Show that this process is there, on a thread of its own."""

    def beat() -> None:
        while True:
            board.beat(rank)
            time.sleep(_BEAT_S)

    threading.Thread(target=beat, name="dspark-beat", daemon=True).start()


def follow(board: Board, rank: int, model: LocalModel) -> None:
    """Do what rank 0 orders, for ever."""
    step, commits = 0, _nothing()

    def go_on() -> bool:
        command, _ = _next(board, rank)
        board.done(rank)
        return command == Command.READ_ON

    while True:
        command, payload = _next(board, rank)
        if command == Command.BEGIN:
            prompt_ids, params = pickle.loads(payload)
            commits = model.stream(prompt_ids, params, go_on)
        elif command == Command.NEXT:
            step += 1
            try:
                commit = next(commits, None)
                found = digest(commit) if commit is not None else NO_COMMIT
            except EngineLost:
                raise
            except DSparkError as error:
                # rank 0 meets it too, or it will see that it does not
                found = digest_of_error(error)
                log.debug("rank %d: %s", rank, error)
            board.post(rank, step, found)
        elif command == Command.END:
            commits.close()  # type: ignore[attr-defined]
        elif command == Command.FORGET:
            model.forget()
        board.done(rank)


def _next(board: Board, rank: int) -> tuple[Command, bytes]:
    """The next command, as soon as it is there."""
    begun = time.monotonic()
    while (order := board.next_order(rank)) is None:
        time.sleep(_NAP_S if time.monotonic() - begun < _BUSY_S else _IDLE_NAP_S)
    return order


def _nothing() -> Iterator[Commit]:
    yield from ()
