"""SIGTERM, SIGUSR1 and Ctrl-C ask for a checkpoint at the next step boundary.

Schedulers send the first two before a time limit. All processes must stop after the same step, or
the rest would wait in a collective for ever; so the request travels with the sums that are
reduced in every step anyway (`trainer`).
"""

import logging
import signal
from types import FrameType
from typing import Any, Self

__all__ = ["EXIT_INTERRUPTED", "StopRequest"]

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit code of a run that saved and stopped on a signal (EX_TEMPFAIL: start it again)."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Context manager: ``pending`` turns true when one of the signals arrives.

    A second Ctrl-C stops at once, without a checkpoint.
    """

    def __init__(self) -> None:
        self.pending = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.pending = True
        log.warning("%s: saving at the next step boundary", signal.Signals(number).name)
