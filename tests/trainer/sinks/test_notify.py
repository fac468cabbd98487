"""Notices go out by webhook and command, and the run never waits for them."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from precision.errors import UserError
from trainer.config import Config
from trainer.launch.liveness.job_store import Failure
from trainer.run.run_folder import RunFolder
from trainer.sinks import Sinks, notify
from trainer.sinks.notify import Notifier, check_targets, is_sent
from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

EVENT = {
    "time": "2030-01-01T00:00:00.000+00:00", "step": 12, "kind": "alert", "message": "scale of x fell",
    "rule": "scale_drop", "value": 64.0, "threshold": 32.0, "tensor": "x",
}  # fmt: skip


class Server:
    """A webhook on loopback: keeps what it gets, and answers as configured."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status, self.answers = 200, threading.Event()
        self.answers.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                outer.answers.wait(60)
                outer.got.append(json.loads(body))
                self.send_response(outer.status)
                self.send_header("Location", "/elsewhere")  # of a redirect
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()
    yield made
    made.close()


def wrote(path: Path) -> str:
    """A command that writes its input and its environment to `path`."""
    script = path.with_suffix(".sh")
    script.write_text(f'#!/bin/sh\n{{ cat; echo; env | grep ^OCTET_; }} >> "{path}"\n')
    script.chmod(0o755)
    return str(script)


def test_both_get_the_whole_event(server: Server, tmp_path: Path) -> None:
    warned: list[str] = []
    notifier = Notifier(server.url, wrote(tmp_path / "out"), Path("runs/first"), warned.append)
    notifier.send(EVENT | {"loss": float("nan")})
    notifier.close()
    (got,) = server.got
    assert got.items() >= (EVENT | {"run": "first", "folder": "runs/first", "loss": None}).items()
    assert got["text"] == "octet first, step 12: alert: scale of x fell"
    first, *rest = (tmp_path / "out").read_text().splitlines()
    assert json.loads(first) == got
    variables = dict(line.split("=", 1) for line in rest)
    assert variables["OCTET_ALERT_RULE"] == "scale_drop" and variables["OCTET_ALERT_STEP"] == "12"
    assert variables["OCTET_ALERT_MESSAGE"] == "scale of x fell" and variables["OCTET_ALERT_RUN"] == "first"
    assert warned == []


@pytest.mark.parametrize("trouble", ["status", "refused", "slow"])
def test_a_webhook_that_does_not_work_is_reported_once(
    server: Server, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "WEBHOOK_SECONDS", 0.2)
    warned: list[str] = []
    url = server.url
    if trouble == "status":
        server.status = 500
    elif trouble == "slow":
        server.answers.clear()
    else:
        url = "http://127.0.0.1:9/secret"
    notifier = Notifier(url, None, Path("runs/first"), warned.append)
    for _ in range(3):
        notifier.send(EVENT)
    assert trouble != "slow" or server.got == []  # `send` is back, and no answer has come
    notifier.close()
    server.answers.set()
    (warning,) = warned
    assert warning.startswith("health.alerts.webhook (127.0.0.1) failed: ") and "secret" not in warning


@pytest.mark.parametrize(("status", "fails"), [(301, True), (302, True), (303, False), (308, True)])
def test_a_redirect_that_loses_the_notice_is_reported(server: Server, status: int, fails: bool) -> None:
    warned: list[str] = []
    server.status = status
    notifier = Notifier(server.url, None, Path("runs/first"), warned.append)
    notifier.send(EVENT)
    notifier.close()
    assert bool(warned) is fails and all(f"HTTP Error {status}" in text for text in warned)


@pytest.mark.parametrize(
    "address",
    ["http://[foo", "http://host:abc/", "ftp://host/", "https:///x", "http://me:pw@host/", "http://host/a b"],
)
def test_an_address_that_can_never_work_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(UserError, match=r"^health\.alerts\.webhook: not an address to post to; set http") as refusal:
        check_targets(address, None)
    assert address not in str(refusal.value)
    check_targets("https://hooks.example.com:8443/services/T0/B0?x=%20", None)


@pytest.mark.parametrize(
    ("command", "seconds", "says"),
    [
        ("sh -c 'echo no mail today >&2; exit 3'", 120.0, r"\(sh\) failed: exit code 3: no mail today"),
        ("sh -c 'sleep 600 & sleep 600'", 0.2, r"\(sh\) failed: not done after 0 seconds, and killed"),
    ],
)
def test_a_command_that_fails_or_hangs_is_reported_once(
    command: str, seconds: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "COMMAND_SECONDS", seconds)
    warned: list[str] = []
    notifier = Notifier(None, command, Path("runs/first"), warned.append)
    notifier.send(EVENT)
    notifier.send(EVENT)
    notifier.close(300.0)
    (warning,) = warned
    assert re.search(says, warning), warning


def test_the_end_waits_for_what_is_on_its_way_but_not_long(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "WEBHOOK_SECONDS", 300.0)
    server.answers.clear()
    warned: list[str] = []
    notifier = Notifier(server.url, None, Path("runs/first"), warned.append)
    for _ in range(notify.WAITING + 5):
        notifier.send(EVENT)
    notifier.close(0.2)
    assert server.got == [], "it is back, and no answer has come"
    assert len(warned) == 2 and "further ones are discarded" in warned[0] and "not delivered by the end" in warned[1]
    server.answers.set()


def test_alerts_rewinds_and_failures_are_sent() -> None:
    assert all(is_sent(kind, {}) for kind in ("alert", "rollback", "failure"))
    assert is_sent("checkpoint", {"failed": True}) and is_sent("throttle", {"rule": "x"})
    assert not any(is_sent(kind, {}) for kind in ("nonfinite", "spike", "checkpoint", "resume", "signal", "profile"))


def test_a_run_sends_its_alerts_and_its_end(server: Server, config: Callable[..., Config], tmp_path: Path) -> None:
    """One that diverges and is stopped: the webhook and the command hear of both, with the run's name."""
    out = tmp_path / "messages"
    wild = config(
        f"health.alerts.webhook={server.url}",
        f"health.alerts.command={wrote(out)}",
        "run.name=wild",
        "optim.lr=10",
        "trainer.max_steps=12",
        "debug.inject={step: 6, where: loss, value: nan}",
        "recovery.max_consecutive_skips=0",
        "recovery.rewind.max=0",
    )
    with pytest.raises(TrainingStopped):
        Trainer(wild, [f"health.alerts.webhook={server.url}", f"health.alerts={{webhook: {server.url}}}"]).train()
    kept = [path for path in (Path(wild.run.dir) / "wild").rglob("*") if path.is_file()]
    assert len(kept) > 8 and not [path for path in kept if b"/secret" in path.read_bytes()]
    kinds = [(notice["kind"], notice.get("rule")) for notice in server.got]
    assert ("alert", "loss_rise") in kinds and kinds[-1] == ("failure", None)
    assert {notice["run"] for notice in server.got} == {"wild"}
    assert out.read_text().count('"run": "wild"') == len(server.got)


def test_a_run_stopped_by_its_user_sends_nothing(server: Server, config: Callable[..., Config]) -> None:
    trainer = Trainer(config(f"health.alerts.webhook={server.url}", "trainer.max_steps=2"))
    trainer.run.close(TrainingStopped("stopped by SIGTERM", exit_code=143))
    assert server.got == []


def test_the_end_of_a_job_of_many_ranks_is_sent_once(
    server: Server, config: Callable[..., Config], tmp_path: Path
) -> None:
    """By the rank that reports the failure; not by the others' errors that follow from it."""
    logging = config("run.name=many").logging
    run = RunFolder(tmp_path, "many", "never", "bf16", {"config.yaml": "trainer: {seed: 1}\n"})
    for rank in (0, 1):
        sinks = Sinks(logging, run, 10, None, rank, server.url, None, alone=False)
        if rank == 1:
            sinks.ended(Failure("error: rank 0 was killed", 1, 0, 1, 7))
        sinks.close(RuntimeError("a collective failed"))
    run.close()
    (got,) = server.got
    assert (got["kind"], got["step"], got["message"]) == ("failure", 7, "error: rank 0 was killed")


def test_an_end_that_all_ranks_reach_alike_is_sent_by_the_first(
    server: Server, config: Callable[..., Config], tmp_path: Path
) -> None:
    """Too many skipped steps: no rank has failed, and `ended` is not called."""
    logging = config("run.name=many").logging
    run = RunFolder(tmp_path, "many", "never", "bf16", {"config.yaml": "trainer: {seed: 1}\n"})
    for error in (TrainingStopped("3 steps in a row skipped"), TrainingStopped("stopped by SIGTERM", exit_code=143)):
        for rank in (0, 1):
            Sinks(logging, run, 10, None, rank, server.url, None, alone=False).close(error)
    run.close()
    (got,) = server.got
    assert (got["kind"], got["message"]) == ("failure", "3 steps in a row skipped")
