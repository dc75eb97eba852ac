"""Routes that generate nothing for anybody: what is served, whether it lives, tokens and text."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response

import dspark
from dspark.decoding import SamplingParams
from dspark.serving.api import Api, read_body
from dspark.serving.channel import unavailable
from dspark.serving.engine import Draining, Engine, EngineLost
from dspark.serving.openapi import body_of
from dspark.serving.protocol import (
    AbortRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from dspark.serving.request import Event, Failed, GenerateParams, Job

__all__ = ["add_upkeep"]

_PROBE_S = 20.0
"""How long /health_generate waits for a token, as in SGLang."""


def add_upkeep(routes: APIRouter, api: Api) -> None:
    """Add these routes."""
    keyed = [Depends(api.check_key)]
    limit = api.engine.settings.max_body_bytes

    @routes.get("/v1/models", dependencies=keyed)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [api.model()]}

    @routes.get("/v1/models/{name:path}", dependencies=keyed)
    async def model(name: str) -> dict[str, Any]:
        api.check_model(name)
        return api.model()

    @routes.get("/model_info", dependencies=keyed)
    @routes.get("/get_model_info", dependencies=keyed)
    async def model_info() -> dict[str, Any]:
        return api.model_info()

    @routes.get("/server_info", dependencies=keyed)
    @routes.get("/get_server_info", dependencies=keyed)
    async def server_info() -> dict[str, Any]:
        return api.info()

    @routes.post("/flush_cache", dependencies=keyed, response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        api.engine.flush()
        return PlainTextResponse(
            "Accept and step figures start anew; the next request finds no earlier prompt.\n"
        )

    @routes.post("/abort_request", dependencies=keyed, openapi_extra=body_of(AbortRequest))
    async def abort_request(request: Request) -> dict[str, Any]:
        body = parse(AbortRequest, await read_body(request, limit))
        if body.abort_all:
            return {"aborted": api.engine.abort(None)}
        return {"aborted": api.engine.abort(body.rid) if body.rid else []}

    @routes.post("/tokenize", dependencies=keyed, openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = parse(TokenizeRequest, await read_body(request, limit))
        api.check_model(body.model)
        return await api.prepare(api.preparer.tokens, body)

    @routes.post("/detokenize", dependencies=keyed, openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        body = parse(DetokenizeRequest, await read_body(request, limit))
        api.check_model(body.model)
        return await api.prepare(api.preparer.text, body)

    @routes.get("/version", dependencies=keyed)
    async def version() -> dict[str, str]:
        return {"version": dspark.__version__}

    @routes.get("/health")
    @routes.get("/ping")
    async def health() -> dict[str, str]:
        if (trouble := api.engine.trouble) is not None:
            raise unavailable(trouble)
        return {"status": "ok"}

    @routes.get("/health_generate", dependencies=keyed)
    async def health_generate() -> dict[str, str]:
        await _generates(api.engine)
        return {"status": "ok"}

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        engine = api.engine
        text = engine.metrics.render(running=engine.num_running, waiting=engine.num_waiting)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _generates(engine: Engine) -> None:
    """Wait for a token: of a request of its own, or of those that are being decoded.

    Raises:
        ApiError: 503, none came.
    """
    before, end = engine.commits, time.monotonic() + _PROBE_S
    failed: list[Failed] = []

    def heard(event: Event) -> None:
        if isinstance(event, Failed):
            failed.append(event)

    params = GenerateParams(max_new_tokens=1, sampling=SamplingParams(), ignore_eos=True)
    job: Job | None = None
    try:
        while engine.commits == before:
            if failed:
                raise unavailable(failed[0].message)
            if time.monotonic() > end:
                raise unavailable(f"no token within {_PROBE_S:g} s")
            if job is None and not engine.num_running and not engine.num_waiting:
                try:
                    job = engine.submit("health", [0], params, heard)
                except (Draining, EngineLost) as error:
                    raise unavailable(str(error)) from None
            await asyncio.sleep(0.01)
    finally:
        if job is not None:
            job.cancel()
