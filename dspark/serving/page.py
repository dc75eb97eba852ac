"""`GET /`: one page that shows live what the draft does, and the counters that it reads.

The page holds no data, so it is open; whatever it asks for needs the server's key. Its policy lets
it run only the script and style it came with, and talk only to the server it came from.
"""

import hashlib
import re
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse

from dspark.serving.api import Api

__all__ = ["page_router"]

_FILE = Path(__file__).with_name("page.html")


def page_router(api: Api) -> APIRouter:
    """The page and `/live`."""
    routes = APIRouter()
    html = _FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(html),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @routes.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    @routes.get("/live", dependencies=[Depends(api.check_key)])
    async def live() -> dict[str, Any]:
        engine = api.engine
        return {
            "clock_s": time.monotonic(),
            "healthy": engine.healthy,
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            **engine.metrics.live(),
        }

    return routes


def _policy(html: str) -> str:
    """Content-Security-Policy that names the inline script and style by their hashes."""
    script, style = (_hash(html, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
