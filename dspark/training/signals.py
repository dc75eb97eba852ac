"""SIGTERM, SIGUSR1 and Ctrl-C ask for a checkpoint at the next step boundary.

Schedulers send the first two before a time limit. All processes must stop after the same step, or
the rest would wait in a collective for ever; so the request travels with the sums that are
reduced in every step anyway (`trainer`).

The end of the launcher asks for the same: `accelerate launch` of one process passes no signal on,
and a training that nobody waits for would go on unseen.
"""

import logging
import os
import signal
from types import FrameType
from typing import Any, Self

__all__ = ["EXIT_INTERRUPTED", "StopRequest"]

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit code of a run that saved and stopped on a signal (EX_TEMPFAIL: start it again)."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # by accelerate, by torchrun
_BEGUN = (os.getpid(), os.getppid())  # a fork of this process has another parent


class StopRequest:
    """Context manager: ``pending`` turns true when one of the signals arrives.

    Also when the launcher of the process, if it has one, has ended.

    A second Ctrl-C stops at once, without a checkpoint.
    """

    def __init__(self) -> None:
        self._asked = False
        launched = any(name in os.environ for name in _LAUNCHED) and os.getpid() == _BEGUN[0]
        self._launcher = _BEGUN[1] if launched else None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def pending(self) -> bool:
        """Whether to save and stop."""
        if not self._asked and self._launcher not in (None, os.getppid()):
            self._asked = True
            log.warning("the launcher has ended: saving at the next step boundary")
        return self._asked

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
        log.warning("%s: saving at the next step boundary", signal.Signals(number).name)
