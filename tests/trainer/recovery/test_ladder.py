"""The ladder's bookkeeping: what is left out, what survives in recovery.json, and what damage to it means."""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from trainer.config.health import TO_BF16
from trainer.config.recovery import RecoveryConfig, RewindConfig, SpikesConfig
from trainer.data.loader import SECTION, window_name
from trainer.recovery.ladder import Ladder, Rewind, SkippedStep
from trainer.step.guard import TrainingStopped


def ladder(folder: Path, margin: int = 0, in_fp8: bool = True, in_fp16: bool = False) -> Ladder:
    made = RecoveryConfig(2, SpikesConfig(False, 128, 64, 6.0), RewindConfig(2, margin, 0.5, 10))
    return Ladder(made, folder, batch=4, in_fp8=in_fp8, in_fp16=in_fp16)


REWIND = Rewind(step=10, first=8, to=6, attempt=1, windows=[[28, 40]], lr_factor=0.5, lr_until=17)


@pytest.mark.parametrize(
    ("margin", "windows"), [(0, [[4, 8], [20, 28]]), (1, [[0, 12], [16, 32]]), (2, [[0, 36]]), (9, [[0, 64]])]
)
def test_the_margin_is_left_out_on_both_sides(tmp_path: Path, margin: int, windows: list[list[int]]) -> None:
    ours = ladder(tmp_path, margin)
    for step, begin in ((2, 4), (6, 20), (7, 24)):
        ours.note(SkippedStep(step, begin, begin + 4, "loss (forward)"))
    assert ours.exhausted and ours._left_out() == windows


def test_the_margin_stays_within_a_section(tmp_path: Path) -> None:
    ours = ladder(tmp_path, margin=2)
    ours.note(SkippedStep(2, SECTION + 4, SECTION + 8, "loss (forward)"))
    assert ours._left_out() == [[SECTION, SECTION + 16]]


def test_a_committed_step_ends_a_streak(tmp_path: Path) -> None:
    ours = ladder(tmp_path)
    for step in range(1, 10):
        ours.note(None if step % 3 == 0 else SkippedStep(step, 0, 4, "loss (forward)"))
        assert not ours.exhausted
    assert ours.streak == []


def test_rewinds_and_the_streak_survive_a_resume(tmp_path: Path) -> None:
    ours = ladder(tmp_path)
    ours.write(REWIND, Mock(side_effect=AssertionError))
    ours.note(SkippedStep(12, 48, 52, "loss (forward)"))
    other = ladder(tmp_path)
    other.load_state_dict(ours.state_dict(), other.read())
    assert other.streak == ours.streak and other.rewinds == [REWIND]
    assert ladder(tmp_path / "other").read() == []


def test_trouble_of_a_discarded_course_is_not_the_same_trouble(tmp_path: Path) -> None:
    """The run has resumed from step 3, before the rewinds of its first course."""
    ours, checkpoint = ladder(tmp_path), tmp_path / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    ours.rewinds = [REWIND, replace(REWIND, to=5, attempt=2)]
    for step in (4, 5, 6):
        ours.note(SkippedStep(step, 16, 20, "loss (forward)"))
    choice = ours.choose(3, checkpoint.parent, Mock(), lambda path: None)
    assert isinstance(choice, Rewind) and (choice.to, choice.attempt) == (3, 1)


def test_a_step_has_the_rewinds_up_to_the_last_one_that_went_back_to_before_it(tmp_path: Path) -> None:
    ours = ladder(tmp_path)
    ours.rewinds = [REWIND, replace(REWIND, to=9, windows=[[48, 52]], lr_until=20), replace(REWIND, to=3, lr_until=30)]
    for rewinds, step, windows, until in (
        (ours.rewinds[:2], 6, None, None),
        (ours.rewinds[:2], 7, [[28, 40]], 17),
        (ours.rewinds[:2], 9, [[28, 40]], 17),
        (ours.rewinds[:2], 10, [[28, 40], [48, 52]], 20),
        (ours.rewinds, 3, None, None),
        (ours.rewinds, 4, [[28, 40], [48, 52]], 30),
    ):
        loader, schedule, other = Mock(), Mock(), ladder(tmp_path)
        other.rewinds = rewinds
        other.apply(step, loader, schedule)
        assert loader.mock_calls == ([] if windows is None else [call.leave_out(windows)])
        assert schedule.mock_calls == ([] if until is None else [call.lower(0.5, until)])
    assert [step for step in range(1, 12) if ours.begins(step)] == [4, 7, 10]


@pytest.mark.filterwarnings("ignore:.*from before files had digests")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"rewinds": [{"step": 3}]}',
        '{"rewinds": 3}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "recovery.json").write_text(text)
    with pytest.raises(ValueError, match=r"recovery\.json: .*; remove it; the data that was left out") as refusal:
        ladder(tmp_path).read()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("numbers", "place", "advice"),
    [
        ("fp8", "loss (forward)", f"a lower optim.lr, {TO_BF16} or precision.rules for that module"),
        ("fp16", "loss (forward)", "a lower optim.lr or +recipe=bf16"),
        ("bf16", "loss (forward)", "a lower optim.lr"),
        ("bf16", "gradient norm (spike)", "a lower optim.lr or a higher recovery.spikes.threshold"),
    ],
)
def test_the_advice_at_the_end_is_one_that_the_run_can_follow(
    tmp_path: Path, numbers: str, place: str, advice: str
) -> None:
    ours = ladder(tmp_path / "lr=1,2", in_fp8=numbers == "fp8", in_fp16=numbers == "fp16")
    ours.note(SkippedStep(3, 0, 4, place))
    resume = f"run.dir={tmp_path} \"run.name='lr=1,2'\" run.resume=auto"
    with pytest.raises(TrainingStopped, match=re.escape(f" then resume with {resume} and {advice}") + "$"):
        ours.take("no checkpoint", 3, lambda *event, **what: None)


def test_a_disk_that_takes_nothing_does_not_end_the_run(tmp_path: Path) -> None:
    on_event = Mock()
    ladder(tmp_path / "not there").write(REWIND, on_event)
    ((kind, step, message), what) = on_event.call_args
    assert (kind, step, what) == ("rollback", 10, {"failed": True})
    assert "recovery.json cannot be written (No such file or directory)" in message


def test_windows_of_a_phase_with_another_length_are_named_within_their_section() -> None:
    names = [window_name(begin, end) for begin, end in ((4, 4), (4, 1011), (SECTION + 4, SECTION + 4))]
    assert names == ["4", "4 to 1,011", "4 of section 1"]
