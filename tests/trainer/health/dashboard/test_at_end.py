"""A run that really trains leaves its page when it ends, as it ended."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config import Config
from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

STATE = re.compile(r'"state":"(\w+)","state_text":"([^"]*)"')


def test_the_page_is_written_at_the_end_of_a_run(config: Callable[..., Config]) -> None:
    keys = "+recipe=fp8_delayed", "trainer.max_steps=2", "health.every=2", "health.dashboard=true"
    summary = Trainer(config(*keys, "run.name=done")).train()
    text = (summary.folder / "dashboard.html").read_text()
    assert STATE.findall(text) == [("finished", "")]
    for key in ("loss/validation", "optim/update_ratio", "fp8/error", "blocks/kurtosis_qkv", "moe/entropy"):
        assert f'"{key}":' in text, key
    assert "layers.0.attn.q:input" in text and '"load":{"step":2' in text


def test_the_page_is_written_when_a_run_is_stopped(config: Callable[..., Config], tmp_path: Path) -> None:
    broken = config(
        "+recipe=bf16", "trainer.max_steps=4", "run.name=broken", "recovery.max_consecutive_skips=1",
        "recovery.rewind.max=0", "health.dashboard=true", "debug.inject={step: 1, steps: 9, where: loss, value: nan}",
    )  # fmt: skip
    with pytest.raises(TrainingStopped) as stopped:
        Trainer(broken).train()
    text = (tmp_path / "runs" / "broken" / "dashboard.html").read_text()
    ((state, why),) = STATE.findall(text)
    assert state == "failed" and why[:30] == str(stopped.value)[:30] and '"kind":"nonfinite"' in text
