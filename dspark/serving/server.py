"""The server as a whole: the application, and running it until it is told to stop."""

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
from dspark.serving.choice import choose
from dspark.serving.engine import Engine
from dspark.serving.openapi import document
from dspark.serving.page import page_router
from dspark.serving.prepare import Preparer
from dspark.serving.protocol import ApiError
from dspark.serving.routes import router
from dspark.serving.settings import ServeSettings
from dspark.target import Target

__all__ = ["create_app", "running", "serve"]

log = logging.getLogger(__name__)


def create_app(
    engine: Engine,
    tokenizer: Any,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
) -> FastAPI:
    """The ASGI application over an engine. ``model_name`` defaults to the target's name."""
    api = Api(
        engine=engine,
        preparer=Preparer(
            engine.target,
            tokenizer,
            engine.settings,
            engine.context,
            most_stops=engine.decoder.most_stops,
            logprobs=engine.decoder.logprobs,
        ),
        model_name=model_name or engine.target.name,
        tokenizer_path=str(getattr(tokenizer, "name_or_path", "") or engine.target.name),
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
    """Gives each request an id and returns it as X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        made = new_request_id()
        scope.setdefault("state", {})["request_id"] = made

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", made.encode()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Server(uvicorn.Server):
    """uvicorn that lets the engine finish before it closes its connections."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine
        self._told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain, then stop. Second: stop now."""
        if self._told:
            self.should_exit = self.force_exit = True
            return
        self._told = True
        # on a thread of its own: a signal handler must not wait for the engine's lock
        threading.Thread(target=self.stop, args=(sig,), name="dspark-drain", daemon=True).start()

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Finish what was accepted, refuse what is new, then end."""
        limit = self.engine.settings.drain_s
        log.info("%s: finishing the requests in hand (at most %g s)", signal.strsignal(sig), limit)
        if not self.engine.drain(limit):
            log.warning("requests still running after %g s are ended as they stand", limit)
        self.engine.close()
        self.should_exit = True


def _server(
    target: Target,
    draft: Draft | None,
    tokenizer: Any,
    model_name: str | None,
    settings: ServeSettings | None,
    api_key: str | None,
) -> _Server:
    settings = settings or ServeSettings()
    decoder = choose(target, draft, tokenizer, settings)
    engine = Engine(target, draft, tokenizer, settings, decoder)
    app = create_app(engine, tokenizer, model_name=model_name, api_key=api_key)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
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
    target: Target,
    draft: Draft | None,
    tokenizer: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str | None = None,
    settings: ServeSettings | None = None,
    api_key: str | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was accepted and return.

    Raises:
        ConfigError: the address cannot be listened on, or a setting does not fit.
    """
    with _listen(host, port) as sock:
        server = _server(target, draft, tokenizer, model_name, settings, api_key)
        log.info("serving %s on http://%s:%d", target.name, *sock.getsockname()[:2])
        try:
            server.run(sockets=[sock])
        finally:
            server.engine.close()


@contextmanager
def running(
    target: Target,
    draft: Draft | None,
    tokenizer: Any,
    *,
    port: int = 0,
    model_name: str | None = None,
    settings: ServeSettings | None = None,
    api_key: str | None = None,
) -> Iterator[str]:
    """The same on a thread of this process, on 127.0.0.1; yields the address.

    Raises:
        ConfigError: the port is taken, or a setting does not fit.
    """
    with _listen("127.0.0.1", port) as sock:
        server = _server(target, draft, tokenizer, model_name, settings, api_key)
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
