"""The live dashboard: a server on the loopback address that reads what the runs write.

    GET /               the page with all data so far
    GET /data?since=T   JSON: what is new since the response with token T, and a new token

The page polls every few seconds. A token records how much of each run has been sent. An unknown token (the server was
restarted) or an outdated one (a run rewound) yields everything. The server answers only this machine, and no page of
another site whose name resolves to this machine: the request's Host must be the loopback's.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from trainer.health.dashboard.page import Cursor, as_json, page, payload
from trainer.health.dashboard.read import Run

LOOPBACK = "127.0.0.1"
READERS = 100
"""Number of remembered tokens, thus of open pages."""
MOST_NEW = 2000
"""If a page misses more steps than this, it gets everything again, decimated."""


class Live:
    """The runs, and what each open page has received. Thread-safe."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._runs = [Run(path) for path in paths]
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, list[Cursor]] = OrderedDict()
        self._numbers = itertools.count(1)
        self._origin = id(self)

    def page(self) -> str:
        """Return the page with all data."""
        return page(self.data(""), live=True)

    def data(self, token: str) -> dict[str, Any]:
        """Return what is new since the response with this token."""
        with self._lock:
            for run in self._runs:
                run.poll()
            sent = self._tokens.get(token)
            now = [Cursor(run) for run in self._runs]
            answer = payload(self._runs, sent=[_recent(*pair) for pair in zip(sent, now, strict=True)] if sent else ())
            fresh = f"{self._origin}-{next(self._numbers)}"
            self._tokens[fresh] = now
            while len(self._tokens) > READERS:
                self._tokens.popitem(last=False)
            return answer | {"token": fresh}


def _recent(sent: Cursor, now: Cursor) -> Cursor | None:
    """Return the cursor, or None if the run has advanced so far that sending all of it again is better."""
    most = max((count - sent.series.get(key, 0) for key, count in now.series.items()), default=0)
    return sent if most <= MOST_NEW else None


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
        """Send the page or its data."""
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
