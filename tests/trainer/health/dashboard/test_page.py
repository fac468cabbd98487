"""The page: small, self-contained, and no text of a run can become more than text. What its head says of a run."""

import json
import os
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import opened

from trainer.health.dashboard.at_end import write_at_end
from trainer.health.dashboard.page import EVENTS, page, payload
from trainer.health.dashboard.read import Run, Series
from trainer.health.dashboard.summary import model_line, summary

EVIL = "</script><script>alert(1)</script><!--\u2028"


def small(folder: Path, name: str = "mine", steps: int = 10, goal: int = 10, more: str = "") -> Path:
    """A run folder with little in it."""
    path = folder / name
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text(f"trainer: {{max_steps: {goal}, seed: 1}}\nlogging: {{every: 1}}\n{more}")
    text = "".join(json.dumps({"step": step, "loss/lm": 5 - step / 10}) + "\n" for step in range(1, steps + 1))
    (path / "metrics.jsonl").write_text(text)
    return path


class Found(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    evil = EVIL.replace("/", "\\")  # no folder's name has a slash
    path = small(tmp_path, evil, more=f"precision: {{name: {json.dumps(EVIL)}}}\n")
    (path / "events.jsonl").write_text(json.dumps({"step": 1, "kind": EVIL, "message": EVIL, "tensor": EVIL}) + "\n")
    (path / "tensors.jsonl").write_text(json.dumps({"names": {"fp8": [EVIL]}}) + "\n")
    text = page(payload([opened(path)]))
    found = Found(text)
    assert found.tags.count("script") == 2 and "img" not in found.tags
    data = data_of(text)["runs"][0]
    assert data["events"][0]["text"] == data["about"]["recipe"] == EVIL and data["name"] == evil
    assert "{{" not in text


def test_nothing_comes_from_a_network(long_run: Run) -> None:
    text = page(payload([long_run]))
    loads = [value for name, value in Found(text).attributes if name in ("src", "href") and value != "data:,"]
    assert loads == [] and "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text and "connect-src 'none'" in text
    assert len(text) < 3e6


def test_long_runs_stay_small(tmp_path: Path, long_run: Run) -> None:
    """Five runs of 20,000 logged steps, and one with many tensors."""
    runs = []
    for number in range(5):
        run = Run(tmp_path / f"run{number}")
        for key in ("loss/lm", *(f"some/{i}" for i in range(12))):
            series = run.series[key] = Series()
            series.steps.extend(range(1, 20_001))
            series.values.extend(number + 1 / step for step in range(1, 20_001))
        runs.append(run)
    text = page(payload([*runs, long_run]))
    assert 3e5 < len(text) < 3e6


def test_many_events(tmp_path: Path) -> None:
    path = small(tmp_path)
    entries = [{"step": i, "kind": "checkpoint" if i % 3 else "alert", "message": "x" * 900} for i in range(5000)]
    entries[2500]["kind"] = "spike"
    (path / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    events = payload([opened(path)])["runs"][0]["events"]
    assert 100 < len(events) <= EVENTS and len(events[0]["text"]) == 400
    assert (events[0]["step"], events[-1]["step"]) in {(0, 4999), (0, 4998)}
    assert any(event["kind"] == "spike" for event in events)


def test_a_run_without_multi_token_prediction_has_no_curve_of_its_loss(tmp_path: Path) -> None:
    run = opened(small(tmp_path))
    for step, value in ((9, 0.0), (10, 0.0), (11, 0.5)):
        run.series.setdefault("loss/mtp", Series()).add(step, value)
        keys = {key for group in payload([run])["runs"][0]["curves"] for key in group["k"]}
        assert ("loss/mtp" in keys) == (value > 0)


def test_runs_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    runs = [opened(small(tmp_path / folder, "mine")) for folder in ("a", "b")]
    data = payload(runs)
    assert [run["name"] for run in data["runs"]] == ["a/mine", "b/mine"] and data["remark"] == ""
    other = small(tmp_path, "other")
    runs[0].config = {"trainer": {"max_steps": 10, "seed": 1}, "hub_token": "a", "run": {"name": "a"}}
    (other / "config.yaml").write_text("trainer: {max_steps: 10, seed: 2}\nhub_token: b\nrun: {name: b}\nnew: x\n")
    data = payload([runs[0], opened(other)])
    assert "trainer.seed" in data["remark"]
    expected = [("trainer.seed", ["1", "2"]), ("hub_token", ["(not shown)"] * 2), ("new", ["", "x"])]
    assert data["differences"] == expected
    runs[0].config = {}
    assert payload([runs[0], opened(other)])["differences"] is None  # not known: the page does not say that none differ


def test_the_head_of_the_page_shows_the_run(long_run: Run) -> None:
    about = summary(long_run)
    assert about["recipe"] == "fp8_delayed" and about["model"] == "moonlight_16b, 8 layers of 2048, 64 experts"
    assert about["machine"] == "8 x NVIDIA H200" and about["step"] == about["goal"] == 4000
    assert about["tokens"] == 4000 * 256 * 4096 and about["state"] == "finished" and about["alerts"] == 2
    assert about["loss"] == pytest.approx(2.14, abs=0.02) and about["validation"] == pytest.approx(2.1685, abs=1e-3)
    dense = {"num_layers": 8, "hidden_size": 2048, "num_experts": 64, "num_dense_layers": 8, "num_mtp_layers": 0}
    assert model_line(long_run, dense) == "moonlight_16b, 8 layers of 2048, dense"


def test_a_run_that_logs_by_tokens_is_silent_after_twenty_intervals(tmp_path: Path) -> None:
    path = small(tmp_path, steps=1)
    trainer = "{max_steps: 100000, max_tokens: null, global_batch_size: 4, microbatch_size: 4, sequence_length: 1000"
    trainer += ", seed: 1, device: cpu}"
    (path / "config.yaml").write_text(f"trainer: {trainer}\nlogging: {{every: 1M}}\n")  # every 250 steps
    (path / "metrics.jsonl").write_text('{"step": 1, "perf/step_seconds": 1}\n')
    states = []
    for seconds in (4900, 5100):
        written = time.time() - seconds
        os.utime(path / "metrics.jsonl", (written, written))
        states.append(summary(opened(path))["state"])
    assert states == ["running", "silent"]


def test_how_a_run_stands(tmp_path: Path) -> None:
    path = small(tmp_path, steps=5)

    def stands() -> str:
        return summary(opened(path))["state"]

    assert stands() == "running"
    long_ago = time.time() - 3600
    os.utime(path / "metrics.jsonl", (long_ago, long_ago))
    assert stands() == "silent"
    log = path / "logs" / "rank0.log"
    log.write_text(
        "2026-11-21 INFO trainer: step 5/10\n2026-11-21 INFO trainer: stopped by ValueError: too bad\nTrace\n"
    )
    assert stands() == "failed" and summary(opened(path))["state_text"] == "too bad"
    with log.open("a") as file:  # it continues
        file.write("2026-11-21 INFO trainer: resume: resumed from step_5\n")
    assert stands() == "running"
    events = path / "events.jsonl"
    events.write_text('{"step": 5, "kind": "signal", "message": "stopped by SIGTERM after step 5; saved"}\n')
    assert stands() == "stopped"
    with events.open("a") as file:
        file.write('{"step": 5, "kind": "resume", "message": "resumed"}\n')
    assert stands() == "running"
    done = small(tmp_path, "done")
    (done / "events.jsonl").write_text('{"step": 9, "kind": "signal", "message": "SIGTERM: all", "finishes": true}\n')
    assert summary(opened(done))["state"] == "finished", "a signal in the last evaluation"
    assert summary(opened(tmp_path / "nowhere"))["state"] == "waiting"


def test_the_page_at_the_end_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small(tmp_path, steps=5)
    write_at_end(path, ValueError("the reason"))
    about = data_of((path / "dashboard.html").read_text())["runs"][0]["about"]
    assert (about["state"], about["state_text"]) == ("failed", "the reason") and not caplog.records
    assert not list(path.glob(".*"))


def test_a_page_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small(tmp_path, "two words")
    (path / "dashboard.html").mkdir()
    write_at_end(path, None)
    (record,) = caplog.records
    assert "dashboard.html is not written (IsADirectoryError" in record.getMessage()
    assert f"scripts/dashboard.py '{path}' makes it" in record.getMessage()
    assert not list(path.glob(".*"))


def test_the_page_is_waited_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small(tmp_path)
    answers, answered = threading.Event(), list[bool]()  # of a file system
    monkeypatch.setattr(Run, "poll", lambda run: answered.append(answers.wait(60)))
    write_at_end(path, None, patience=0.05)
    assert answered == [] and "not done within 0.05 s" in caplog.text
    answers.set()
