"""The live dashboard: a server on the loopback address that reads what the runs write.

    GET /               the page with all data so far
    GET /data?since=T   JSON: the same data, and a token for it; the token alone if it is T

The page polls every few seconds. The server answers only this machine, and no page of another site whose name resolves
to this machine: the request's Host must be the loopback's.
"""

import secrets
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from trainer.health.dashboard.page import as_json, page, payload
from trainer.health.dashboard.read import Run
from trainer.health.dashboard.summary import summary

LOOPBACK = "127.0.0.1"


class Live:
    """The data of the runs as they are now. Thread-safe."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._runs = [Run(path) for path in paths]
        self._lock = threading.Lock()
        self._states: list[dict[str, Any]] | None = None
        self._data: dict[str, Any] = {}

    def page(self) -> str:
        return page(self.data(), live=True)

    def data(self, token: str = "") -> dict[str, Any]:
        """Return all data, or only the token if it is that of the latest data."""
        with self._lock:
            has_new = [run.poll() for run in self._runs]
            states = [summary(run) for run in self._runs]  # a run falls silent without a new line
            if any(has_new) or states != self._states:
                self._states = states
                self._data = payload(self._runs) | {"token": secrets.token_hex(8)}
            return {"token": token} if self._data["token"] == token else self._data


class Server(ThreadingHTTPServer):
    """Serves runs on the loopback address; port 0 picks a free one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        super().__init__((LOOPBACK, port), Handler)
        self.live = Live(paths)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = 60

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        path, _, query = self.path.partition("?")
        if host not in (LOOPBACK, "localhost"):
            self._answer(403, "text/plain", "this server answers to 127.0.0.1 and localhost")
        elif path == "/":
            self._answer(200, "text/html", self.server.live.page())
        elif path == "/data":
            token = parse_qs(query).get("since", [""])[0]
            self._answer(200, "application/json", as_json(self.server.live.data(token)))
        else:
            self._answer(404, "text/plain", "not found; there are / and /data")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        """Handle the request as the base class does, but ignore a page that was closed meanwhile."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line every few seconds would drown the others."""
