"""What all routes of one server share: the engine, the key, the name, reading a body."""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fastapi import Request

import dspark
from dspark.serving.answer import AnswerParser
from dspark.serving.engine import Engine
from dspark.serving.prepare import Preparer, Work
from dspark.serving.protocol import ApiError
from dspark.serving.request import Finished

__all__ = ["Api", "new_request_id", "read_body", "request_id_of"]

T = TypeVar("T")


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

    async def prepare(self, method: Callable[..., T], *arguments: Any) -> T:
        """Tokenise on a thread, so that a long prompt does not hold up other streams."""
        async with self._tokenizing:
            return await asyncio.to_thread(method, *arguments)

    async def reasoning_tokens(self, work: Work, end: Finished, parser: AnswerParser) -> int:
        """What the usage says of a whole answer."""
        method, chars = self.preparer.reasoning_tokens, parser.reasoning_chars
        return await self.prepare(method, work, end.token_ids, chars) if chars else 0

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model '{name[:200]}' does not exist here, only '{self.model_name}'",
                param="model",
                code="model_not_found",
            )

    def model(self) -> dict[str, Any]:
        """The one model, as OpenAI describes it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "dspark",
            "max_model_len": self.preparer.max_model_len,
        }

    def check_key(self, request: Request) -> None:
        """Bearer key, when the server has one; the page, /health, /ping and /metrics stay open."""
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
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
        engine, card = self.engine, self.engine.card
        return {
            **self.model_info(),
            "version": dspark.__version__,
            "served_model_name": self.model_name,
            "device": card.device,
            "dtype": card.dtype,
            "synthetic_weights": card.synthetic_weights,
            "engine": card.engine,
            "context": card.context,
            "max_model_len": self.preparer.max_model_len,
            "speculative_algorithm": card.algorithm,
            "num_draft_tokens": engine.num_draft_tokens,
            "prefix_reuse": {
                "limit_bytes": card.prefix_cache_bytes,
                "piece_tokens": card.prefill_rows,
            },
            "settings": asdict(engine.settings),
            "internal_states": [engine.metrics.snapshot()],
        }

    def model_info(self) -> dict[str, Any]:
        """/model_info: where SGLang's client finds the tokenizer."""
        return {
            "model_path": self.engine.card.name,
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


async def read_body(request: Request, limit: int) -> bytes:
    """The body, unless it is too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(f"of {int(declared)} bytes is larger than {limit} bytes")
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            raise _too_large(f"is larger than {limit} bytes")
    return bytes(raw)


def _too_large(how: str) -> ApiError:
    return ApiError(413, f"the request body {how}", code="body_too_large")
