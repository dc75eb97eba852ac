"""One server, asked over HTTP: what may pass is tried again, what cannot be mended ends at once.

Tried again with growing, random pauses: 429 and 503 (their Retry-After is kept to), other 5xx,
time-outs, connections refused or dropped, bodies that end half way, and whatever `parse` calls a
bad answer. Other 4xx say that this request is wrong, and 401, 403 and 404 that every one is.
"""

import asyncio
import email.utils
import json
import os
import random
import re
import time
import urllib.parse
from asyncio import sleep
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from dspark.config import SampleSettings
from dspark.corpus.engines import Api, BadAnswer
from dspark.errors import ConfigError, RunError

__all__ = ["Client", "Failed", "Failure"]

FIRST_PAUSE_S = 0.5
"""Pause behind the first failure, give or take a half; each further one is twice as long."""
LONGEST_PAUSE_S = 60.0
LONGEST_RETRY_AFTER_S = 600.0

_SPOKEN: dict[str, Api] = {"vllm": "vllm", "sglang": "sglang", "dspark": "vllm"}
"""By the owner that a server names in its list of models."""

T = TypeVar("T")


class Failure(StrEnum):
    """Why an endpoint did not answer a row."""

    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    TIMED_OUT = "timed_out"
    CONNECTION = "connection"
    INVALID_JSON = "invalid_json"
    BAD_ANSWER = "bad_answer"
    REFUSED = "refused"


class Failed(Exception):
    """A request that failed for good."""

    def __init__(self, kind: Failure, detail: str, attempts: int) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.attempts = attempts


class _Again(Exception):
    def __init__(self, kind: Failure, detail: str, after: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.after = after


class Client:
    """Use as an async context manager; ``settings.endpoint`` must be set."""

    def __init__(self, settings: SampleSettings) -> None:
        if settings.endpoint is None:
            raise ConfigError("sample.endpoint is not set")
        self.root = settings.endpoint.removesuffix("/v1")
        self.retries = 0
        """Attempts behind the first, over all requests."""
        self._settings = settings
        self._key = key = os.environ.get(settings.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"the key in {settings.api_key_env} cannot be sent: it must be one line of ASCII"
            )
        self._forms = _forms(key)
        trusted = httpx.create_ssl_context()
        try:
            # a pool looks through all its connections for every request, which at hundreds of them
            # costs more than the request; so each connection is a pool of its own
            self._idle = [
                httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {key}"} if key else {},
                    timeout=httpx.Timeout(None, connect=min(30.0, settings.request_timeout_s)),
                    verify=trusted,
                )
                for _ in range(settings.concurrency)
            ]
            httpx.URL(self.root)
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"sample.endpoint '{settings.endpoint}' is no URL ({error}); give one such as "
                "http://host:30000/v1"
            ) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for http in self._idle:
            await http.aclose()

    async def find(self) -> tuple[Api, str, str]:
        """API, model name and kind of engine, asked of the server where the settings leave them.

        The kind is the API's name, or `dspark` where the server says that it is `dspark serve`.

        Raises:
            ConfigError: the server turns requests away, or serves no such model.
            RunError: it does not answer.
        """
        api, model = self._settings.endpoint_api, self._settings.model
        if api != "auto" and model is not None:
            return api, model, api
        try:
            listed = await self._insist("GET", "/v1/models", None, _models)
        except Failed as error:
            raise RunError(
                f"sample.endpoint {self._settings.endpoint} does not list its models after "
                f"{error.attempts} attempts: {error}"
            ) from None
        names: list[str] = [one["id"] for one in listed]
        if model is None:
            model = names[0]
        elif model not in names:
            raise ConfigError(
                f"sample.model '{model}' is not served at {self._settings.endpoint}, which has "
                f"{_line(self.hide(', '.join(names[:5])))}"
            )
        owner = listed[names.index(model)].get("owned_by")
        if api == "auto":
            api = _SPOKEN[owner] if isinstance(owner, str) and owner in _SPOKEN else "openai"
        return api, model, "dspark" if owner == "dspark" else api

    async def ask(
        self, path: str, body: dict[str, Any], parse: Callable[[Any], T], *, seed: int = 0
    ) -> T:
        """POST until ``parse`` takes the answer.

        Args:
            parse: raises `BadAnswer` for JSON that should be asked for again.
            seed: of the pauses' jitter.

        Raises:
            Failed: this request has no answer.
            ConfigError: the server turns every request away.
        """
        return await self._insist("POST", path, body, parse, seed)

    async def _insist(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        parse: Callable[[Any], T],
        seed: int = 0,
    ) -> T:
        jitter = random.Random(seed)
        for attempt in range(1, self._settings.max_retries + 2):
            try:
                return parse(await self._once(method, path, body, attempt))
            except BadAnswer as error:
                problem = _Again(Failure.BAD_ANSWER, _line(self.hide(str(error))))
            except _Again as error:
                problem = error
            if attempt > self._settings.max_retries:
                raise Failed(problem.kind, problem.detail, attempt)
            self.retries += 1
            # requests that failed together must not come back together
            if problem.after is not None:
                await sleep(problem.after + jitter.uniform(0, FIRST_PAUSE_S))
            else:
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
                await sleep(pause * jitter.uniform(0.5, 1.5))
        raise AssertionError

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, attempt: int) -> Any:
        limit = self._settings.request_timeout_s
        http = self._idle.pop()
        try:
            async with asyncio.timeout(limit):
                response = await http.request(method, self.root + path, json=body)
        except (TimeoutError, httpx.TimeoutException):
            raise _Again(Failure.TIMED_OUT, f"no answer within {limit:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OverflowError, UnicodeError) as error:
            # also a body that ends before its length, and a host that the resolver cannot read
            said = self.hide(str(error)) or type(error).__name__
            raise _Again(Failure.CONNECTION, _line(said)) from None
        finally:
            self._idle.append(http)
        status = response.status_code
        if status >= 400:
            self._problem(response, attempt)
        if status >= 300:
            where = _line(self.hide(response.headers.get("location", "")))
            raise ConfigError(
                f"sample.endpoint {self._settings.endpoint} redirects ({status}) to '{where}': "
                "give that address"
            )
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise _Again(Failure.INVALID_JSON, _line(self.hide(str(error)))) from None

    def _problem(self, response: httpx.Response, attempt: int) -> None:
        status = response.status_code
        detail = f"{status} {_line(self.hide(_said(response)))}".strip()
        if status in (401, 403, 404):
            what = (
                f"check the key in the variable {self._settings.api_key_env}"
                if status != 404
                else "check sample.endpoint, sample.endpoint_api and sample.model"
            )
            raise ConfigError(
                f"sample.endpoint {self._settings.endpoint} answers {response.url.path} with "
                f"{detail}: {what}"
            )
        if status == 429:
            raise _Again(Failure.RATE_LIMITED, detail, _retry_after(response))
        if status >= 500 or status == 408:
            raise _Again(Failure.SERVER_ERROR, detail, _retry_after(response))
        raise Failed(Failure.REFUSED, detail, attempt)

    def hide(self, text: str) -> str:
        """``text`` without the key, as it is or as JSON and URLs write it.

        Whatever a server said goes through here on its way to a person or a file.
        """
        for form in self._forms:
            text = re.sub(re.escape(form), "***", text, flags=re.IGNORECASE)
        return text


def _forms(key: str) -> list[str]:
    """The longest first: a short one may be a piece of it."""
    plain = {key, json.dumps(key)[1:-1], repr(key)[1:-1]}
    quoted = {urllib.parse.quote(key, safe=""), urllib.parse.quote(key)}
    return sorted((plain | quoted | {urllib.parse.quote_plus(key)}) - {""}, key=len, reverse=True)


def _said(response: httpx.Response) -> str:
    """The sentence in an error's body, where its shape is known; else all of it."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return response.text
    for name in ("error", "message", "detail"):
        found = body.get(name) if isinstance(body, dict) else None
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str) and found.strip():
            return found
    return response.text


def _models(body: Any) -> list[dict[str, Any]]:
    data = body.get("data") if isinstance(body, dict) else None
    found = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
    if not found or not all(isinstance(one.get("id"), str) for one in found):
        raise BadAnswer("no list of models")
    return found


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds; the header holds seconds or a date."""
    value = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if seconds == seconds else None


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
