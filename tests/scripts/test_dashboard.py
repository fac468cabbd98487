"""scripts/dashboard.py from the command line: what it writes, what it refuses, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from trainer.launch.command_line import guarded

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Folder of two runs of three steps, and one that has not begun."""
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss/lm": 5.0 + number / step}) for step in (1, 2, 3)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "dashboard.py"), *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *(path for path in sys.path if path)])}


def dashboard(runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), cwd=runs, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done


def test_a_page_of_one_run_and_of_two(runs: Path) -> None:
    done = dashboard(runs, "a")
    assert (done.returncode, done.stdout) == (0, "a/dashboard.html\n"), done.stderr
    assert "<title>a - Octet</title>" in (runs / "a" / "dashboard.html").read_text()
    for words, page in (((), "a/comparison.html"), (("--out", "both.html"), "both.html")):
        done = dashboard(runs, "a", "b", *words)
        assert (done.returncode, done.stdout) == (0, f"{page}\n"), done.stderr
        assert "gap/training" in (runs / page).read_text()


def test_mistakes_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("dashboard_script", ROOT / "scripts" / "dashboard.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.chdir(runs)
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for arguments, said in (
        (["nope"], "nope: no such folder; give"),
        (["empty"], "empty: no metrics.jsonl in it; give"),
        (["a", "a"], "named twice"),
        (["a", "--out", "no/where.html"], "--out no/where.html: its folder does not exist"),
        (["a", "--out", "empty"], "--out empty: not a file; give a file"),
        (["a", "--port", "1"], "--port 1: it is for --serve"),
        (["a", "--serve", "--out", "x"], "--out x: --serve writes no file"),
        (["a", "--serve", "--port", port], f"--port {port}: Address already in use"),
        (["a", "--serve", "--port", "70000"], "--port 70000: not between"),
        (["no/where", "--serve"], "no/where: no such folder, and no no where it could appear"),
        ([".", "--serve"], ".: a folder of runs"),
    ):
        monkeypatch.setattr(sys, "argv", ["dashboard.py", *arguments])
        assert guarded(script.run) == 2, arguments
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("octet: error: ") and said in err and err.count("\n") == 1, err
    taken.close()


def test_serving_until_it_is_interrupted(runs: Path) -> None:
    serving = subprocess.Popen(
        command("a", "later", "--serve", "--port", "0"),
        cwd=runs, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored below a shell's background job
    )  # fmt: skip
    assert serving.stdout is not None
    assert serving.stdout.readline() == "later is not there yet; it will be shown when it is\n"
    url = serving.stdout.readline().split()[0]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
        assert b"<title>a, later - Octet</title>" in answer.read()
    serving.send_signal(signal.SIGINT)
    _, errors = serving.communicate(timeout=20)
    assert (serving.returncode, errors) == (0, "")
