"""The live server: what is new, to this machine alone."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import continue_run, make_run

from trainer.health.dashboard.serve import Server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    """Serves a run of 60 steps and one that is not there yet."""
    make_run(tmp_path / "first", steps=60, goal=100)
    server = Server([tmp_path / "first", tmp_path / "later"], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server: Server, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def data(server: Server, token: str = "") -> dict[str, Any]:
    status, text = ask(server, f"/data?since={token}")
    assert status == 200
    return json.loads(text)


def test_a_page_gets_the_data_again_when_there_is_something_new(served: Server, tmp_path: Path) -> None:
    assert served.server_address[0] == "127.0.0.1"
    status, text = ask(served, "/")
    assert status == 200 and 'data-live="true"' in text and "connect-src 'self'" in text
    found = data(served)
    assert [run["about"]["state"] for run in found["runs"]] == ["running", "waiting"]
    assert data(served, found["token"]) == {"token": found["token"]}
    continue_run(tmp_path / "first", 60, 4)
    make_run(tmp_path / "later", steps=20, recipe="bf16")
    new = data(served, found["token"])
    assert [run["about"]["step"] for run in new["runs"]] == [64, 20]
    assert max(len(group["x"]) for group in new["runs"][0]["curves"]) == 32


def test_foreign_requests_are_refused(served: Server) -> None:
    assert ask(served, "/data", host="evil.example:80")[0] == 403
    assert ask(served, "/", host="localhost:1")[0] == 200
    assert ask(served, "/../metrics.jsonl")[0] == 404
    assert ask(served, "http://[")[0] == 404  # no URL at all
