"""One request between the event loop and the worker's thread, ended when its client leaves."""

import asyncio
from dataclasses import dataclass
from typing import Any

from dspark.serving.engine import Draining, Engine, EngineLost, NameTaken, QueueFull
from dspark.serving.prepare import Work
from dspark.serving.protocol import ApiError
from dspark.serving.request import Delta, Event, Failed, Finished, Job

__all__ = ["Channel", "ClientGone", "Quiet", "unavailable"]


class ClientGone(Exception):
    """The connection was closed before the request ended."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing happened for a while; the request goes on."""


class Channel:
    """Submits a request and awaits its events; `close` it in any case."""

    def __init__(
        self,
        engine: Engine,
        work: Work,
        request_id: str,
        receive: Any,
        *,
        rid: str | None = None,
        quiet_s: float = 0.0,
    ) -> None:
        """``receive``: the ASGI callable, whose next message is the disconnect.

        ``rid``: as `Engine.submit` has it. ``quiet_s``: say so when nothing came for this long;
        0: never.

        Raises:
            ApiError: 400, the ``rid`` is taken; 429, the queue is full; 503, the server is
                shutting down or has lost its engine.
        """
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Quiet | None] = asyncio.Queue()
        try:
            self._job: Job = engine.submit(
                request_id, work.prompt_ids, work.params, self._emit, rid=rid
            )
        except NameTaken as error:
            raise ApiError(400, str(error), param="rid", code="invalid_value") from None
        except QueueFull as error:
            raise ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            ) from None
        except (Draining, EngineLost) as error:
            raise unavailable(str(error)) from None
        self._request_id = request_id
        self._watch = asyncio.create_task(self._until_gone(receive))
        self._heard, self._quiet_s = self._loop.time(), quiet_s
        self._timer = self._loop.call_later(quiet_s, self._listen) if quiet_s else None

    def _emit(self, event: Event) -> None:
        """Called on the worker's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close()
        self._events.put_nowait(None)

    def _listen(self) -> None:
        """One timer a request: a task for each wait would cost as much as the token it brings."""
        left = self._heard + self._quiet_s - self._loop.time()
        if left <= 0:
            self._events.put_nowait(Quiet())
            left = self._quiet_s
        self._timer = self._loop.call_later(left, self._listen)

    async def next(self) -> Delta | Finished | Quiet:
        """The next event; the last one is a `Finished`.

        Raises:
            ClientGone: the client has left.
            ApiError: 500, the request failed; 503, its time was up before its turn came, or the
                engine was lost.
        """
        event = await self._events.get()
        self._heard = self._loop.time()
        if event is None:
            raise ClientGone
        if isinstance(event, Failed):
            if event.reason in ("deadline", "lost"):
                raise unavailable(event.message)
            raise ApiError(
                500,
                f"{event.message}; request {self._request_id}",
                kind="server_error",
                code="internal_error",
            )
        return event

    def close(self) -> None:
        """Stop watching; a request that is still running is cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        self._job.cancel()
        self._watch.cancel()


def unavailable(message: str) -> ApiError:
    """A 503 that asks to come back."""
    return ApiError(
        503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"}
    )
