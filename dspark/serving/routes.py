"""The HTTP routes: OpenAI's, and those that SGLang's benchmark client calls."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import dspark
from dspark.serving.channel import Channel, ClientGone, unavailable
from dspark.serving.engine import Engine
from dspark.serving.prepare import Preparer, Work
from dspark.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    StreamOptions,
    parse,
)
from dspark.serving.request import Delta, Finished
from dspark.serving.responses import Shape, native_chunk, usage

__all__ = ["Api", "new_request_id", "request_id_of", "router"]

_CLIENT_CLOSED = Response(status_code=499)


@dataclass
class Api:
    """What the routes share."""

    engine: Engine
    preparer: Preparer
    model_name: str
    tokenizer_path: str
    api_key: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    _tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prepare(self, method: Callable[[Any], Work], request: Any) -> Work:
        """Tokenise on a thread, so that a long prompt does not hold up other streams."""
        async with self._tokenizing:
            return await asyncio.to_thread(method, request)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model '{name[:200]}' does not exist here, only '{self.model_name}'",
                param="model",
                code="model_not_found",
            )

    def check_key(self, request: Request) -> None:
        """Bearer key, when the server has one; the page, /health and /metrics stay open."""
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        # starlette reads header bytes as latin-1; a key may hold anything
        if not hmac.compare_digest(given.encode("latin-1"), self.api_key.encode()):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def info(self) -> dict[str, Any]:
        """/server_info: what is served and its figures since the last flush."""
        engine, target = self.engine, self.engine.target
        return {
            **self.model_info(),
            "version": dspark.__version__,
            "served_model_name": self.model_name,
            "device": str(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "engine": engine.decoder.name,
            "context": engine.context,
            "max_model_len": self.preparer.max_model_len,
            "speculative_algorithm": "DSPARK" if engine.draft is not None else None,
            "num_draft_tokens": engine.num_draft_tokens,
            "settings": asdict(engine.settings),
            "internal_states": [engine.metrics.snapshot()],
        }

    def model_info(self) -> dict[str, Any]:
        """/model_info: where SGLang's client finds the tokenizer."""
        return {
            "model_path": self.engine.target.name,
            "tokenizer_path": self.tokenizer_path,
            "is_generation": True,
        }


def new_request_id() -> str:
    """One id a request, in the response's headers, in error messages and in the log."""
    return secrets.token_hex(12)


def request_id_of(request: Request) -> str:
    """The id that the server's middleware gave to the request."""
    made: str = request.state.request_id
    return made


def router(api: Api) -> APIRouter:
    """All routes of one server."""
    routes = APIRouter()
    keyed = [Depends(api.check_key)]
    limit = api.engine.settings.max_body_bytes

    @routes.post("/v1/chat/completions", dependencies=keyed)
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatRequest, await _body(request, limit))
        api.check_model(body.model)
        work = await api.prepare(api.preparer.chat, body)
        return await _answer(api, request, "chat", body, work)

    @routes.post("/v1/completions", dependencies=keyed)
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await _body(request, limit))
        api.check_model(body.model)
        work = await api.prepare(api.preparer.completion, body)
        return await _answer(api, request, "text", body, work)

    @routes.post("/generate", dependencies=keyed)
    async def generate(request: Request) -> Response:
        body = parse(GenerateRequest, await _body(request, limit))
        work = await api.prepare(api.preparer.native, body)
        channel = Channel(api.engine, work, request_id_of(request), request.receive)
        if body.stream:
            return await _stream(channel, _native_events(channel, work, request_id_of(request)))
        try:
            end = await _wait(channel)
        except ClientGone:
            return _CLIENT_CLOSED
        return JSONResponse(native_chunk(request_id_of(request), work, end.text, end))

    @routes.get("/v1/models", dependencies=keyed)
    async def models() -> dict[str, Any]:
        model = {
            "id": api.model_name,
            "object": "model",
            "created": api.created,
            "owned_by": "dspark",
            "max_model_len": api.preparer.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @routes.get("/model_info", dependencies=keyed)
    @routes.get("/get_model_info", dependencies=keyed)
    async def model_info() -> dict[str, Any]:
        return api.model_info()

    @routes.get("/server_info", dependencies=keyed)
    @routes.get("/get_server_info", dependencies=keyed)
    async def server_info() -> dict[str, Any]:
        return api.info()

    @routes.post("/flush_cache", dependencies=keyed)
    async def flush_cache() -> Response:
        api.engine.flush()
        return Response("Accept and step figures start anew; there is no prefix cache to drop.\n")

    @routes.get("/health")
    async def health() -> dict[str, str]:
        if not api.engine.healthy:
            raise unavailable(
                "the server is shutting down"
                if api.engine.draining
                else "the worker makes no progress"
            )
        return {"status": "ok"}

    @routes.get("/metrics")
    async def metrics() -> Response:
        engine = api.engine
        text = engine.metrics.render(running=engine.num_running, waiting=engine.num_waiting)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


async def _body(request: Request, limit: int) -> bytes:
    too_big = ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_big
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            raise too_big
    return bytes(raw)


async def _wait(channel: Channel) -> Finished:
    try:
        while not isinstance(event := await channel.next(), Finished):
            pass
        return event
    finally:
        channel.close()


async def _answer(
    api: Api,
    request: Request,
    kind: Literal["chat", "text"],
    body: ChatRequest | CompletionRequest,
    work: Work,
) -> Response:
    streamed, options = bool(body.stream), body.stream_options
    for name, given, needed in (
        ("stream_options", options is not None, True),
        ("return_token_ids", bool(body.return_token_ids), False),
        ("dspark_tokens", bool(body.dspark_tokens), True),
    ):
        if given and streamed is not needed:
            raise ApiError(
                400,
                f"'{name}' needs 'stream': {json.dumps(needed)}",
                param=name,
                code="invalid_value",
            )
    made = request_id_of(request)
    shape = Shape(
        kind, made, int(time.time()), api.model_name, work, with_ids=bool(body.return_token_ids)
    )
    channel = Channel(api.engine, shape.work, shape.request_id, request.receive)
    if streamed:
        return await _stream(channel, _openai_events(channel, shape, options or StreamOptions()))
    try:
        return JSONResponse(shape.whole(await _wait(channel)))
    except ClientGone:
        return _CLIENT_CLOSED


async def _stream(channel: Channel, events: AsyncIterator[dict[str, Any]]) -> Response:
    """Server-sent events. The first is awaited here: an early error still has its status code.

    No keep-alive comments are sent in between: SGLang's client takes every line for JSON.
    """
    try:
        first = await anext(events)
    except ClientGone:
        channel.close()
        return _CLIENT_CLOSED
    except BaseException:
        channel.close()
        raise

    async def lines() -> AsyncIterator[str]:
        try:
            yield _line(first)
            async for event in events:
                yield _line(event)
        except ApiError as error:
            # the status line is long gone; OpenAI's clients raise on an error event
            yield _line(error.body())
        except ClientGone:
            return
        finally:
            channel.close()
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _line(event: dict[str, Any]) -> str:
    # ASCII only: some clients break lines at U+2028 or U+0085 too
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


async def _openai_events(
    channel: Channel, shape: Shape, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    prompt_tokens = len(shape.work.prompt_ids)

    def with_usage(chunk: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        if options.continuous_usage_stats:
            return {**chunk, "usage": usage(prompt_tokens, num_tokens)}
        return {**chunk, "usage": None} if options.include_usage else chunk

    event = await channel.next()
    if (opening := shape.opening()) is not None:
        yield with_usage(opening, 0)
    while isinstance(event, Delta):
        yield with_usage(shape.text(event), event.num_tokens)
        event = await channel.next()
    yield with_usage(shape.closing(event), len(event.token_ids))
    if options.include_usage:
        yield shape.counts(event)


async def _native_events(
    channel: Channel, work: Work, request_id: str
) -> AsyncIterator[dict[str, Any]]:
    text = ""
    while isinstance(event := await channel.next(), Delta):
        text += event.text
        yield native_chunk(request_id, work, text, event)
    yield native_chunk(request_id, work, text, event)
