"""The HTTP routes that generate: OpenAI's, and the one of SGLang's benchmark client."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dspark.serving.answer import Part, gather
from dspark.serving.api import Api, read_body, request_id_of
from dspark.serving.channel import Channel, ClientGone, Quiet
from dspark.serving.likelihood import Likelihood
from dspark.serving.openapi import body_of
from dspark.serving.prepare import Work
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
from dspark.serving.upkeep import add_upkeep

__all__ = ["router"]

_CLIENT_CLOSED = Response(status_code=499)


def router(api: Api) -> APIRouter:
    """All routes of one server."""
    routes = APIRouter()
    keyed = [Depends(api.check_key)]
    limit = api.engine.settings.max_body_bytes

    @routes.post("/v1/chat/completions", dependencies=keyed, openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatRequest, await read_body(request, limit))
        api.check_model(body.model)
        work = await api.prepare(api.preparer.chat, body)
        return await _answer(api, request, "chat", body, work)

    @routes.post("/v1/completions", dependencies=keyed, openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await read_body(request, limit))
        api.check_model(body.model)
        work = await api.prepare(api.preparer.completion, body)
        return await _answer(api, request, "text", body, work)

    @routes.post("/generate", dependencies=keyed, openapi_extra=body_of(GenerateRequest))
    async def generate(request: Request) -> Response:
        body = parse(GenerateRequest, await read_body(request, limit))
        _check_stream(
            body.stream, ("sampling_params.stream_interval", body.sampling_params.stream_interval)
        )
        work = await api.prepare(api.preparer.native, body)
        made = request_id_of(request)
        name = body.rid or made
        # no comments between the events: SGLang's client takes every line for JSON
        channel = Channel(api.engine, work, made, request.receive, rid=name)
        if body.stream:
            return await _stream(channel, _native_events(channel, work, name))
        try:
            end = await _wait(channel)
        except ClientGone:
            return _CLIENT_CLOSED
        return JSONResponse(native_chunk(name, work, end.text, end, end.likelihoods))

    add_upkeep(routes, api)
    return routes


async def _wait(channel: Channel) -> Finished:
    try:
        while not isinstance(event := await channel.next(), Finished):
            pass
        return event
    finally:
        channel.close()


def _check_stream(stream: bool | None, *options: tuple[str, Any]) -> None:
    """Refuse options that have no effect without a stream."""
    for name, given in options:
        if given is not None and not stream:
            raise _needs_stream(name, True)


def _needs_stream(name: str, needed: bool) -> ApiError:
    message = f"'{name}' needs 'stream': {json.dumps(needed)}"
    return ApiError(400, message, param=name, code="invalid_value")


async def _answer(
    api: Api,
    request: Request,
    kind: Literal["chat", "text"],
    body: ChatRequest | CompletionRequest,
    work: Work,
) -> Response:
    options, with_ids = body.stream_options, bool(body.return_token_ids)
    _check_stream(
        body.stream,
        ("stream_options", options),
        ("stream_interval", body.stream_interval),
        ("dspark_tokens", body.dspark_tokens or None),
    )
    if with_ids and body.stream:
        raise _needs_stream("return_token_ids", False)
    made = request_id_of(request)
    # with a name of the caller's own as in SGLang, where it is the id
    name = body.rid or f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{made}"
    shape = Shape(kind, name, made, int(time.time()), api.model_name, work, with_ids=with_ids)
    channel = Channel(
        api.engine,
        work,
        made,
        request.receive,
        rid=name,
        quiet_s=api.engine.settings.keepalive_s if body.stream else 0.0,
    )
    if body.stream:
        events = _openai_events(api, channel, shape, options or StreamOptions())
        return await _stream(channel, events)
    try:
        end = await _wait(channel)
    except ClientGone:
        return _CLIENT_CLOSED
    parser = work.parser()
    answer = gather([*parser.push(end.text), *parser.flush()])
    return JSONResponse(shape.whole(end, answer, await api.reasoning_tokens(work, end, parser)))


async def _stream(channel: Channel, events: AsyncIterator[dict[str, Any] | None]) -> Response:
    """Server-sent events; None is a comment that keeps the connection alive.

    The first is awaited here: an early error still has its status code.
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


def _line(event: dict[str, Any] | None) -> str:
    if event is None:
        return ": keep-alive\n\n"
    # ASCII only: some clients break lines at U+2028 or U+0085 too
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


async def _openai_events(
    api: Api, channel: Channel, shape: Shape, options: StreamOptions
) -> AsyncIterator[dict[str, Any] | None]:
    prompt_tokens, parser = len(shape.work.prompt_ids), shape.work.parser()
    num_calls = told = cached = 0

    def with_usage(chunk: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        if options.continuous_usage_stats:
            return {**chunk, "usage": usage(prompt_tokens, num_tokens, cached=cached)}
        return {**chunk, "usage": None} if options.include_usage else chunk

    opening = shape.opening()
    while not isinstance(event := await channel.next(), Finished):
        if isinstance(event, Quiet):
            yield None
            continue
        cached = event.num_cached_tokens
        if opening is not None:
            yield with_usage(opening, 0)
            opening = None
        parts = parser.push(event.text)
        likely, trace, told = event.likelihoods, event.trace, event.num_tokens
        # tokens whose text is held back have an event where something is told of each
        if not parts and (shape.work.params.interval is not None or likely or trace is not None):
            parts = [Part("content")]
        for part in parts:
            yield with_usage(shape.part(part, num_calls, likely, trace), event.num_tokens)
            num_calls, likely, trace = num_calls + (part.call is not None), None, None
    cached = event.num_cached_tokens
    if opening is not None:
        yield with_usage(opening, 0)
    num_tokens = len(event.token_ids)
    for part in parser.flush():
        yield with_usage(shape.part(part, num_calls), num_tokens)
        num_calls += part.call is not None
    rest = event.likelihoods[told:] if event.likelihoods else None
    yield with_usage(shape.closing(event, num_calls, rest or None), num_tokens)
    if options.include_usage:
        yield shape.counts(event, await api.reasoning_tokens(shape.work, event, parser))


async def _native_events(
    channel: Channel, work: Work, request_id: str
) -> AsyncIterator[dict[str, Any]]:
    text, likelihoods = "", None if work.params.top_logprobs is None else list[Likelihood]()
    while not isinstance(event := await channel.next(), Finished):
        assert isinstance(event, Delta), "this channel was asked for no comments"
        text += event.text
        if likelihoods is not None:
            likelihoods += event.likelihoods or []
        yield native_chunk(request_id, work, text, event, likelihoods)
    yield native_chunk(request_id, work, text, event, event.likelihoods)
