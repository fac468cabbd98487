"""The profiler's window: exactly its steps are in the trace, the run says where it is, windows that cannot be are
refused."""

import gzip
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_lines import events

from trainer.config import Config, ProfileConfig
from trainer.forecast.preflight import check
from trainer.step.guard import TrainingStopped
from trainer.step.profiler import Profiler
from trainer.trainer import Trainer

Configs = Callable[..., Config]
# a trace holds every operation: few of them make it quick to write and read
ONE_BLOCK = "model.num_layers=1", "model.num_mtp_layers=0", "trainer.microbatch_size=4", "health.every=0"


def spans(path: Path) -> list[str]:
    """Names of what a trace recorded."""
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_the_window_is_in_the_trace_and_nothing_else(config: Configs, capfd: pytest.CaptureFixture[str]) -> None:
    run = Trainer(config("+recipe=fp8_delayed", "profile.steps=[2,3]", *ONE_BLOCK)).train().folder
    assert "profiler_start" not in capfd.readouterr().err  # Kineto's own lines
    trace = run / "profile" / "trace_step2-3.json.gz"
    names = spans(trace)
    assert sorted(name for name in names if name.startswith("step ")) == ["step 2", "step 3"]
    assert {"aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_fused_adamw_"} <= set(names)
    (event,) = events(run, "profile")
    assert event["step"] == 3 and event["paths"] == [str(trace)]
    assert "no memory snapshot" in event["message"]
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_a_run_that_stops_within_the_window_keeps_what_it_has_and_resumes_in_it(config: Configs) -> None:
    trainer = Trainer(config("run.name=cut", "profile.steps=[2,4]", "profile.memory=false", *ONE_BLOCK))
    step = trainer._step

    def stop_in_the_third(tokens: torch.Tensor) -> None:
        step(tokens)
        if trainer.step == 3:
            signal.raise_signal(signal.SIGTERM)

    trainer._step = stop_in_the_third  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped):
        trainer.train()
    (planted := trainer.run.folder.path / "profile" / "trace_step4-4.json.gz").symlink_to("/dev/full")
    run = Trainer(config("run.name=cut", "run.resume=auto", "profile.steps=[2,4]", *ONE_BLOCK)).train().folder
    assert planted.is_file() and not planted.is_symlink(), "replaced, not written through"
    assert {path.name for path in (run / "profile").iterdir()} == {"trace_step2-3.json.gz", "trace_step4-4.json.gz"}
    assert [event["step"] for event in events(run, "profile")] == [3, 4]
    assert "memory" not in events(run, "profile")[0]["message"]


def test_a_failing_disk_costs_the_profile_only(tmp_path: Path) -> None:
    heard = []

    def note(kind: str, step: int, message: str, **what: object) -> None:
        heard.append((kind, step, message, what))

    profiler = Profiler(ProfileConfig([2, 2], memory=False), tmp_path, torch.device("cpu"), note, None)
    (tmp_path / "profile").write_text("in the way")
    for step in (1, 2, 3):
        profiler.begin(step)
        profiler.end(step)
    profiler.close()
    ((kind, step, message, what),) = heard
    assert (kind, step, what) == ("profile", 2, {"failed": True})
    assert message.startswith("steps 2 to 2 were recorded, but: ") and str(tmp_path / "profile") in message


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ("[0,2]", "profile.steps=[0, 2]: no such window of steps; set [FIRST,LAST], from 1 to trainer.max_steps=6"),
        ("[3,2]", "profile.steps=[3, 2]: no such window"),
        ("[5,7]", "profile.steps=[5, 7]: no such window"),
        ("[5]", "profile.steps=[5]: a window has a first and a last step; set [10,12], or null"),
    ],
)
def test_windows_that_cannot_be_are_refused(config: Configs, window: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        check(config(f"profile.steps={window}"))
