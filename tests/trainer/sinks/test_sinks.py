"""Sinks: every line whole, every event heard, nothing that a sink does stops training."""

import logging
import os
import re
import warnings
from typing import TextIO, cast

import pytest
from full_disk import full_disk
from rich.console import Console
from run_lines import events, metrics
from screens import Screen, settings

from trainer.launch.liveness.job_store import Failure
from trainer.run.run_folder import Note, RunFolder
from trainer.sinks import Sinks, Summary
from trainer.sinks.console import BestEffortStream, open_screen

METRICS = {
    "step": 20,
    "tokens": 81920,
    "loss/total": 5.4321,
    "loss/lm": 5.1234,
    "optim/grad_norm": 1.234,
    "optim/lr": 3e-4,
    "perf/tokens_per_second": 12345.6,
    "recovery/skipped_steps": 0,
}


def summary(run: RunFolder) -> Summary:
    return Summary(run.path, 200, 3.21, 4.5, 12345.0, 1.234, 2)


@pytest.mark.parametrize("left", [0, 1])
def test_lines_that_were_there_at_the_checkpoint_are_missed(run: RunFolder, left: int) -> None:
    with Sinks(settings(), run, 9) as sinks:
        for step in (1, 2):
            sinks.metrics(METRICS | {"step": step})
        state = sinks.state_dict()
        sinks.load_state_dict(state)
    file = run.path / "metrics.jsonl"
    assert events(run.path) == []
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:left]))
    with Sinks(settings(), run, 9) as sinks:
        sinks.load_state_dict(state)
    (event,) = events(run.path)
    ends = "ends at step 1" if left else "has no lines"
    assert event["kind"] == "alert" and f"metrics.jsonl {ends}, and had step 2" in event["message"]


# ---------------------------------------------------------------------------------------------------- who hears what


def test_metrics_go_to_the_file_the_console_and_the_log(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        sinks.metrics({"step": 20, "loss/validation": 4.5})
    assert metrics(run.path) == [METRICS, {"step": 20, "loss/validation": 4.5}]
    shown = "step  20/200  loss 5.4321  lm 5.1234  norm 1.23  lr 3.0e-04  12,346 tok/s"
    assert shown in screen.text and "step  20/200  validation 4.5000\n" in screen.text
    assert shown in (run.path / "logs" / "rank0.log").read_text()


def test_events_go_to_the_file_the_console_and_the_log(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(), run, 200, screen.console) as sinks:
        sinks.event("nonfinite", 60, "step 60 is not finite, first at [red]layers.3[/]", module="layers.3", value=None)
    (event,) = events(run.path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", event.pop("time"))
    message = "step 60 is not finite, first at [red]layers.3[/]"
    assert event == {"step": 60, "kind": "nonfinite", "message": message, "module": "layers.3", "value": None}
    assert f"nonfinite: {message}\n" in screen.text  # brackets are not markup
    assert f"nonfinite: {message}" in (run.path / "logs" / "rank0.log").read_text()


def test_what_happened_while_the_folder_was_opened_comes_first(run: RunFolder, screen: Screen) -> None:
    run.notes.append(Note("checkpoint", 200, "damaged checkpoint skipped", {"path": "x"}))
    with Sinks(settings(), run, 200, screen.console) as sinks:
        sinks.event("resume", 100, "resumed")
    assert [(event["kind"], event["step"]) for event in events(run.path)] == [("checkpoint", 200), ("resume", 100)]


def test_a_silent_console_still_shows_alarms_and_the_summary(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(console=False), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        sinks.event("checkpoint", 20, "saved")
        sinks.event("checkpoint", 20, "no space", failed=True)
        sinks.event("spike", 20, "loss")
        sinks.summary(summary(run))
    assert screen.text.splitlines()[:3] == ["checkpoint: no space", "spike: loss", ""]
    assert "validation loss    3.2100 nats per token (bigrams: 4.5000)" in screen.text
    assert metrics(run.path) == [METRICS] and len(events(run.path)) == 3


def test_an_error_of_all_ranks_is_reported_once(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Sinks(settings(), run, 200, rank=1) as sinks:
        sinks.event("rollback", 20, "the run stops", failed=True)
        sinks.event("power", 20, "NVML has lost the GPU of rank 3", rank=3, failed=True)
        sinks.event("profile", 20, "no space", failed=True)
    assert capsys.readouterr().err == "octet: rank 1: profile: no space\n"
    assert "rollback: the run stops" in (run.path / "logs" / "rank1.log").read_text()


def test_the_summary_names_losses_speed_memory_and_folder(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(), run, 200, screen.console) as sinks:
        sinks.summary(summary(run))
    log = (run.path / "logs" / "rank0.log").read_text()
    for value in ("3.2100 nats", "4.5000", "12,345", "1.23 GiB", "2 of 200", str(run.path)):
        assert value in screen.text and value in log


def test_warnings_and_library_logs_reach_the_screen_in_one_line_and_the_log(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(), run, 200, screen.console):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("beware", stacklevel=1)
        logging.getLogger("some.library").error("broken\nin two lines")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("trainer.data").info("rebuilding the bins")
    log = (run.path / "logs" / "rank0.log").read_text()
    assert screen.text.count("\n") == 2 and "beware" in screen.text and "broken\n" in screen.text
    assert "beware" in log and "in two lines" in log and "rebuilding the bins" in log and "chatter" not in log
    handlers = len(logging.getLogger().handlers)
    with Sinks(settings(), run, 200, screen.console):
        assert len(logging.getLogger().handlers) == handlers + 2
    assert len(logging.getLogger().handlers) == handlers


def test_a_crash_leaves_its_traceback_in_the_log(run: RunFolder, screen: Screen) -> None:
    with pytest.raises(ZeroDivisionError), Sinks(settings(), run, 200, screen.console):
        _ = 1 / 0
    log = (run.path / "logs" / "rank0.log").read_text()
    assert "stopped by ZeroDivisionError" in log and "_ = 1 / 0" in log
    assert screen.text == ""  # train.py says it there


def test_a_log_file_on_a_full_disk_does_not_fill_the_screen(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(), run, 200, screen.console) as sinks, full_disk(0):
        for step in range(20):
            sinks.event("checkpoint", step, "fine")
    assert screen.text.count("cannot be written") == 2  # events.jsonl and rank0.log, once each
    assert screen.text.count("checkpoint: fine") == 20


# ---------------------------------------------------------------------------------------------------- the console


def test_a_pipe_gets_plain_whole_lines_with_the_time_left(
    run: RunFolder, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Sinks(settings(), run, 200, screen.console) as sinks:
        for step in range(1, 21):
            now += 30 if step == 1 else 2  # kernels are compiled in the first step
            sinks.progress(step)
            if step in (1, 20):
                sinks.metrics(METRICS | {"step": step})
        for step in (11, 21):  # after a rewind to step 10
            sinks.metrics(METRICS | {"step": step})
            now += 20
        sinks.event("alert", 20, "long " * 60)
    assert "\x1b" not in screen.raw
    first, second, again, after, third = screen.raw.splitlines()
    assert again.endswith("tok/s") and after.endswith("0:05:58 left")
    assert re.fullmatch(r"step   1/200  loss .* 12,346 tok/s", first)
    assert re.fullmatch(r"step  20/200  loss .* 12,346 tok/s  0:06:00 left", second)
    assert third.startswith("alert: long") and len(third) > 300


def test_a_run_without_an_end_has_a_remaining_time(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(), run, 2**53, screen.console) as sinks:
        for step in (1, 2):
            sinks.metrics(METRICS | {"step": step})
    assert screen.raw.splitlines()[-1].endswith("left")


def test_a_terminal_gets_a_live_line_and_is_left_as_it_was(run: RunFolder) -> None:
    screen = Screen(terminal=True)
    with Sinks(settings(), run, 200, screen.console) as sinks:
        for step in range(1, 21):
            sinks.progress(step)
        sinks.metrics(METRICS)
        screen.shows(r"━.* 20/200 loss 5.4321  12,346 tok/s .* left")
        print("printed by a library")
        assert "step  20/200  loss 5.4321  lm 5.1234" in screen.text
        sinks.activity("evaluating 12/34")
        screen.shows(r"━.* 20/200 evaluating 12/34 .* left")
        sinks.metrics({"step": 20, "loss/validation": 4.5})
        screen.shows(r"20/200 loss 5.4321", since=len(screen.text))
    assert "printed by a library\n" in screen.text
    assert screen.raw.count("\x1b[?25l") == screen.raw.count("\x1b[?25h") == 1  # cursor hidden, shown


def test_sinks_that_cannot_be_opened_leave_the_terminal_as_it_was(run: RunFolder) -> None:
    screen = Screen(terminal=True)
    (run.path / "events.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        Sinks(settings(), run, 200, screen.console)
    assert screen.raw == ""


def test_a_narrow_terminal_keeps_loss_and_speed(run: RunFolder) -> None:
    screen = Screen(terminal=True, width=50)
    with Sinks(settings(), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
    assert "step  20/200  loss 5.4321  lm 5.1234  12,346 tok/s" in screen.text and "norm" not in screen.text
    assert "lr 3.0e-04" in (run.path / "logs" / "rank0.log").read_text()


def test_handlers_that_hold_stderr_print_above_the_live_line(run: RunFolder) -> None:
    import sys

    logger = logging.getLogger("octet.test.holds_stderr")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    before = handler.stream
    try:
        with Sinks(settings(), run, 200, Screen(terminal=True).console):
            assert handler.stream is not before
        assert handler.stream is before
    finally:
        logger.removeHandler(handler)


def test_a_loss_that_is_not_finite_stands_out(run: RunFolder) -> None:
    screen = Screen(terminal=True)
    with Sinks(settings(), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS | {"loss/total": float("nan"), "recovery/skipped_steps": 3})
    assert "\x1b[1;31mnan" in screen.raw and "3 skipped" in screen.text


def test_another_rank_writes_its_log_and_nothing_else(
    run: RunFolder, screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    with Sinks(settings(), run, 200, screen.console, rank=3) as sinks:
        sinks.metrics(METRICS)
        sinks.event("resume", 20, "resumed")
        sinks.event("checkpoint", 20, "no space", failed=True)
        sinks.progress(20)
        sinks.summary(summary(run))
    assert sorted(path.name for path in run.path.iterdir() if not path.name.startswith(".")) == ["config.yaml", "logs"]
    assert [path.name for path in (run.path / "logs").iterdir()] == ["rank3.log"]
    log = (run.path / "logs" / "rank3.log").read_text()
    assert "step  20/200  loss 5.4321" in log and "resumed" in log and "no space" in log
    assert screen.text == "" and capsys.readouterr().err == "octet: rank 3: checkpoint: no space\n"


def test_the_reporting_rank_writes_the_event_even_when_its_files_are_closed(run: RunFolder, screen: Screen) -> None:
    failure = Failure("error: rank 0 (a, process 1) has died, in step 7", 1, 0, 3, 7)
    for rank in (0, 3):
        sinks = Sinks(settings(), run, 200, screen.console, rank=rank)
        sinks.close()
        sinks.ended(failure)
    first, second = events(run.path)
    assert (first["kind"], first["step"], first["rank"], first["exit_code"]) == ("failure", 7, 0, 1)
    assert first["message"] == second["message"] == failure.message


def test_a_run_outlives_the_reader_of_its_screen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainer")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        screen = open_screen(True, 0, 9, Console(file=cast(TextIO, BestEffortStream(stream))))
        for step in (1, 2):
            screen.metrics({"step": step, "loss/total": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "the terminal cannot be written to (Broken pipe): further output is only in this file"
    ]
