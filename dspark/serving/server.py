"""The server as a whole: the application, and running it until it is told to stop."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import dspark
from dspark.decoding import Draft
from dspark.errors import ConfigError
from dspark.serving.api import Api, new_request_id, request_id_of
from dspark.serving.child import Load
from dspark.serving.choice import choose
from dspark.serving.engine import Engine, EngineLost, LocalModel, Model, end_ids
from dspark.serving.openapi import document
from dspark.serving.page import page_router
from dspark.serving.prepare import Preparer
from dspark.serving.process import EngineProcess
from dspark.serving.protocol import ApiError
from dspark.serving.ranks.follow import LoadRank
from dspark.serving.ranks.lead import LoadLeader
from dspark.serving.routes import router
from dspark.serving.settings import ServeSettings
from dspark.target import Target

__all__ = ["create_app", "running", "serve", "serving"]

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""How long a server that has lost its engine still says so before it ends."""
_CLIENTS_S, _LOST_CLIENTS_S = 5, 1
"""How long clients that have not taken their answer, or said what they want, are waited for; and
where the engine is lost, and a supervisor waits to start another one."""


def create_app(
    engine: Engine,
    tokenizer: Any,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
) -> FastAPI:
    """The ASGI application over an engine. ``model_name`` defaults to the target's name."""
    name = engine.card.name
    api = Api(
        engine=engine,
        preparer=Preparer(engine.card, tokenizer, engine.settings),
        model_name=model_name or name,
        tokenizer_path=str(getattr(tokenizer, "name_or_path", "") or name),
        api_key=api_key,
    )
    # no pages: they would load scripts from elsewhere
    app = FastAPI(title="dspark", version=dspark.__version__, docs_url=None, redoc_url=None)
    app.include_router(router(api))
    app.include_router(page_router(api))
    app.openapi = cache(partial(document, app))  # type: ignore[method-assign]
    app.add_middleware(_RequestId)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        shaped = ApiError(error.status_code, message, code="not_found")
        if error.status_code == 405:
            shaped.code = "method_not_allowed"
        return JSONResponse(shaped.body(), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        # in the middle of its body; nobody reads this
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        request_id = request_id_of(request)
        log.error("request %s failed", request_id, exc_info=error)
        message = f"internal error; request {request_id}"
        shaped = ApiError(500, message, kind="server_error", code="internal_error")
        return JSONResponse(shaped.body(), 500)

    return app


class _RequestId:
    """Gives each request an id and returns it as X-Request-Id.

    HEAD is answered as GET is; uvicorn leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        made = new_request_id()
        scope.setdefault("state", {})["request_id"] = made
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", made.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            log.info("request %s: the server did not wait for its client", made)


class _Server(uvicorn.Server):
    """uvicorn that lets the engine finish before it closes its connections."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine
        self._told = False
        self._lost_since: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain, then stop. Second: stop now."""
        if self._told:
            self.should_exit = self.force_exit = True
            return
        self._told = True
        # on a thread of its own: a signal handler must not wait for the engine's lock
        threading.Thread(target=self.stop, args=(sig,), name="dspark-drain", daemon=True).start()

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: end where there is nothing left that could answer."""
        if self.engine.lost is not None:
            self._lost_since = self._lost_since or time.monotonic()
            if time.monotonic() - self._lost_since > _LAST_WORDS_S:
                self.should_exit = True
                self.config.timeout_graceful_shutdown = _LOST_CLIENTS_S
        return await super().on_tick(counter)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Finish what was accepted, refuse what is new, then end."""
        limit = self.engine.settings.drain_s
        log.info("%s: finishing the requests in hand (at most %g s)", signal.strsignal(sig), limit)
        if not self.engine.drain(limit):
            log.warning("requests still running after %g s are ended as they stand", limit)
        self.engine.close()
        self.should_exit = True


def _server(
    model: Model,
    tokenizer: Any,
    model_name: str | None,
    settings: ServeSettings | None,
    api_key: str | None,
) -> _Server:
    engine = Engine(model, tokenizer, settings)
    app = create_app(engine, tokenizer, model_name=model_name, api_key=api_key)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_CLIENTS_S
    )
    return _Server(config, engine)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off (40 ms between two small chunks) only for sockets that say TCP
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}); choose another host or port"
        ) from error
    return sock


def serve(
    load: Load | LoadLeader,
    tokenizer: Any,
    *,
    load_rank: LoadRank | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str | None = None,
    settings: ServeSettings | None = None,
    api_key: str | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was accepted and return.

    ``load`` is called in a process of its own, which decodes, and ``load_rank`` in those of further
    ranks; see `process.EngineProcess`.

    Raises:
        ConfigError: the address cannot be listened on.
        DSparkError: what ``load`` raised.
        EngineLost: the engine process died or hung, and open requests were told so.
    """
    settings = settings or ServeSettings()
    with _listen(host, port) as sock, EngineProcess(load, settings, load_rank) as model:
        _yield_to_engine()
        server = _server(model, tokenizer, model_name, settings, api_key)
        log.info("serving %s on http://%s:%d", model.card.name, *sock.getsockname()[:2])
        try:
            server.run(sockets=[sock])
        finally:
            if server.force_exit:
                model.kill()
            server.engine.close()
        if server.engine.lost is not None and not server.force_exit:
            raise EngineLost(server.engine.lost)


def _yield_to_engine() -> None:
    """Where both share a core, a commit that arrives does not interrupt the step behind it."""
    with suppress(AttributeError, OSError):  # no Linux, or not allowed: only a little slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def serving(
    model: Model,
    tokenizer: Any,
    *,
    port: int = 0,
    model_name: str | None = None,
    settings: ServeSettings | None = None,
    api_key: str | None = None,
) -> Iterator[str]:
    """Serve a model on a thread of this process, on 127.0.0.1; yields the address.

    Raises:
        ConfigError: the port is taken.
    """
    with _listen("127.0.0.1", port) as sock:
        server = _server(model, tokenizer, model_name, settings, api_key)
        # listening from here on: a client that comes before the loop runs waits, it is not refused
        sock.listen(128)
        thread = threading.Thread(target=server.run, args=([sock],), name="dspark-http")
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.engine.close()
            server.should_exit = True
            thread.join()


@contextmanager
def running(
    target: Target,
    draft: Draft | None,
    tokenizer: Any,
    *,
    settings: ServeSettings | None = None,
    **options: Any,
) -> Iterator[str]:
    """The same with everything in this process; ``options`` as above.

    Raises:
        ConfigError: as above, or a setting does not fit.
    """
    settings = settings or ServeSettings()
    decoder = choose(target, draft, end_ids(tokenizer), settings)
    model = LocalModel(target, draft, settings, decoder)
    with serving(model, tokenizer, settings=settings, **options) as address:
        yield address
