"""A hub on this machine, which keeps what was committed and can refuse."""

import base64
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Hub:
    """State of the hub; ``refuse`` maps a part of a path to the status that it is answered with."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    branches: set[str] = field(default_factory=lambda: {"main"})
    refuse: dict[str, int] = field(default_factory=dict)
    said: str = "as you say"
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/draft", "name": "me/draft"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        verb, _, rest = path.removeprefix("/api/models/me/draft").strip("/").partition("/")
        if not verb:
            return {"id": "me/draft", "private": self.private, "siblings": []}
        if verb == "branch":
            self.branches.add(rest)
            return {}
        if verb == "tree":
            return [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in self.files.items()
            ]
        if verb == "preupload":
            named = [one["path"] for one in json.loads(body)["files"]]
            kept = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in named]
            return {"files": kept, "commitOid": "0"}
        if verb == "commit":
            return self._commit(rest, body)
        return {}

    def _commit(self, branch: str, body: bytes) -> Any:
        lines = [json.loads(line) for line in body.splitlines()]
        told = {"branch": branch, "message": lines[0]["value"]["summary"], "added": {}}
        told["deleted"] = [o["value"]["path"] for o in lines if o["key"] == "deletedFile"]
        for one in lines:
            if one["key"] == "file":
                told["added"][one["value"]["path"]] = base64.b64decode(one["value"]["content"])
        self.commits.append(told)
        for name in told["deleted"]:
            del self.files[name]
        self.files |= told["added"]
        return {"commitUrl": f"{self.url}/me/draft/commit/c0ffee", "commitOid": "c0ffee"}


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Start it; the caller shuts it down."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if "me/draft" in path or path == "/api/repos/create":
                hub.tokens.add(self.headers.get("Authorization"))
            status = next((code for part, code in hub.refuse.items() if part in path), 200)
            value = hub.answer(path, body) if status == 200 else {"error": hub.said}
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_HEAD = _reply

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server
