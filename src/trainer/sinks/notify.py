"""Notifications for an absent user: a webhook (HTTP POST) and a command of the user's.

It sends what deserves waking a person: alerts, rewinds, failures (of a checkpoint, say), and the end of a run that
could not continue. A notice is one JSON object,

    {"run": "first", "step": 1200, "kind": "alert", "rule": "scale_drop", "message": "...", "value": 0.2,
     "threshold": 32.0, "tensor": "layers.3.attn.o:grad", "time": "...", "folder": "...", "host": "...",
     "text": "octet first, step 1200: alert: ..."}

with `rule`, `value`, `threshold` and further names only if the event has them. `text` is the whole notice in a line,
under the name that Slack and similar services expect. The command gets the object on its standard input, and each field
in its environment: OCTET_ALERT_MESSAGE, OCTET_ALERT_STEP, ...

Notifications never delay training. Webhook and command each have a queue, a thread, and a time limit for each notice;
notices that do not fit in the queue are dropped. `warn` reports a failure once, without the URL's path, which is often
a secret.
"""

import contextlib
import http.client
import json
import os
import platform
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from precision.errors import UserError, counted
from trainer.sinks.jsonl import finite_or_none
from trainer.sinks.trackers import one_line

SENT = frozenset({"alert", "rollback", "failure"})
"""Kinds of events that are sent. Any event with a `rule` or with `failed` is sent, too."""

WEBHOOK_SECONDS = 10.0
COMMAND_SECONDS = 30.0
WAITING = 50
"""Length of a queue of notices."""

Notice = Mapping[str, Any]


def check_targets(webhook: str | None, command: str | None) -> None:
    """Raise UserError, naming key, value and fix, for a webhook or command that can never work."""
    if webhook is not None and not _is_address(webhook):
        kind = "http:// or https:// and a host, without a user name, blanks or letters beyond ASCII"
        raise UserError(f"health.alerts.webhook: not an address to post to; set {kind}")
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"health.alerts.command: {error}; quote it as for a shell") from None
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else ""
        raise UserError(f"health.alerts.command: no program {name!r} here; give its path (sh -c '...': shell)")


def _is_address(webhook: str) -> bool:
    try:
        parts = urlsplit(webhook)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.username is None
        return bool(known) and parts.port != 0 and all(" " < letter <= "~" for letter in webhook)
    except ValueError:  # of brackets, or of the port
        return False


def is_sent(kind: str, what: Mapping[str, Any]) -> bool:
    """Return whether an event is sent."""
    return kind in SENT or "rule" in what or bool(what.get("failed"))


class Notifier:
    """Sends notices about the run in `folder`. Without webhook and command it does nothing. Thread-safe.

    warn(text): called when something cannot be delivered, once each.
    """

    def __init__(self, webhook: str | None, command: str | None, folder: Path, warn: Callable[[str], None]):
        self._about = {"run": folder.name, "folder": str(folder), "host": platform.node()}
        self._channels: list[_Channel] = []
        if webhook is not None:
            name = f"health.alerts.webhook ({urlsplit(webhook).hostname})"
            self._channels.append(_Channel(name, lambda notice: _post(webhook, notice), warn))
        if command is not None:
            words = shlex.split(command)
            name = f"health.alerts.command ({words[0]})"
            self._channels.append(_Channel(name, lambda notice: _run(words, notice), warn))

    def send(self, event: Notice) -> None:
        """Queue an event, as in events.jsonl. Returns at once."""
        text = f"octet {self._about['run']}, step {event['step']}: {event['kind']}: {event['message']}"
        notice = {**self._about, **{key: finite_or_none(value) for key, value in event.items()}, "text": text}
        for channel in self._channels:
            channel.put(notice)

    def close(self, seconds: float = 15.0) -> None:
        """Wait at most `seconds` for notices in delivery; warn if some are left."""
        deadline = time.monotonic() + seconds
        for channel in self._channels:
            channel.close(deadline)


class _Channel:
    """A queue of notices and the thread that delivers them."""

    def __init__(self, name: str, deliver: Callable[[Notice], None], warn: Callable[[str], None]):
        self._name, self._deliver, self._warn = name, deliver, warn
        self._queue: queue.Queue[Notice | None] = queue.Queue(WAITING)
        self._failed, self._closed = False, False
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def put(self, notice: Notice) -> None:
        try:
            self._queue.put_nowait(notice)
        except queue.Full:
            self._fail(f"{WAITING} notices are queued; further ones are discarded")

    def close(self, deadline: float) -> None:
        if self._closed:
            return
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(
                lambda: self._queue.unfinished_tasks == 0, max(0.0, deadline - time.monotonic())
            )
            left = self._queue.unfinished_tasks
        if left:
            self._warn(f"{self._name}: {counted(left, 'notice')} not delivered by the end")
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _work(self) -> None:
        while (notice := self._queue.get()) is not None and not self._closed:
            try:
                self._deliver(notice)
            except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
                self._fail(one_line(error))
            finally:
                self._queue.task_done()

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._warn(f"{self._name} failed: {reason}; training continues, and later failures of it are not reported")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows 303 alone, the answer to a POST that was taken: after the others a GET, without the notice, follows."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        return super().redirect_request(req, fp, code, msg, headers, newurl) if code == 303 else None


def _post(url: str, notice: Notice) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "octet"}
    request = urllib.request.Request(url, json.dumps(notice, default=str).encode(), headers, method="POST")
    with urllib.request.build_opener(_Redirects).open(request, timeout=WEBHOOK_SECONDS):
        pass


def _run(words: list[str], notice: Notice) -> None:
    parts = {f"OCTET_ALERT_{key.upper()}": str(value).replace("\0", "") for key, value in notice.items()}
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **parts},
        start_new_session=True,  # a ^C at the terminal must not reach it, and its children can be ended with it
    )
    try:
        _, errors = process.communicate(json.dumps(notice, default=str).encode(), timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise OSError(f"not done after {COMMAND_SECONDS:.0f} seconds, and killed") from None
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"exit code {process.returncode}" + (f": {last}" if last else ""))
