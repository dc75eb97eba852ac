"""A value on the device that the host reads without stopping it."""

import torch
from torch import Tensor

__all__ = ["Later"]


class Later:
    """A device value that is read after the step's work has been queued.

    On a GPU the copy starts at once and is waited for at the end of the step, by when the device
    is long past it: the host stays ahead.
    """

    def __init__(self, value: Tensor) -> None:
        self._event = None
        if value.device.type == "cuda":
            self._host = torch.empty_like(value, device="cpu", pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.current_stream().record_event()
        else:
            self._host = value

    def read(self) -> bool:
        """Whether it is above 0; waits for the copy alone."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host > 0)
