"""`run.resume`: which run folder and checkpoint it takes, and what is dropped on the way."""

import errno
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from composed import config_of
from run_folders import TEXTS, damage, logged, make_run, quiet, snapshot
from small import SMALL

from models import DeepSeek
from precision import Plan
from precision.errors import UserError
from trainer.checkpoint import Checkpointer, read, read_meta
from trainer.config_diff import configs_before
from trainer.run import run_folder
from trainer.run.location import locate
from trainer.run.names import CHECKPOINTS, EVENTS, METRICS
from trainer.run.resume_source import check_origin, check_resumable, identity
from trainer.run.run_folder import find_checkpoint


def test_auto_without_a_name_is_refused(runs: Path, opened: Any) -> None:
    with pytest.raises(ValueError, match=r"run.resume=auto: run.name is not set"):
        opened(runs, None, "auto")
    assert not runs.exists()


def test_auto_starts_a_run_that_does_not_exist(runs: Path, opened: Any) -> None:
    run = opened(runs, resume="auto")
    assert run.is_new
    assert [note.message for note in run.notes] == [f"nothing to resume: {run.path} is new"]


def test_auto_starts_again_in_the_folder_of_a_run_killed_before_its_first_checkpoint(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=())
    (path / CHECKPOINTS / ".writing_step_00000100").mkdir(parents=True)
    run = opened(runs, resume="auto")
    assert run.path == path and run.is_new
    assert not (path / METRICS).exists() and not (path / EVENTS).exists()
    assert "starting again" in run.notes[0].message


def test_auto_resumes_from_the_newest_checkpoint_and_drops_later_metrics(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    run = opened(runs, resume="auto")
    assert run.resumed_from == path / CHECKPOINTS / "step_00000200" and run.first_step == 200 and not run.is_new
    assert logged(path) == [0, 100, 150, 200]
    assert logged(path, EVENTS) == [0, 100, 150, 200, 250, 300]  # what happened, happened
    assert [note.message for note in run.notes] == ["2 lines later than step 200 dropped from metrics.jsonl"]


def test_the_texts_of_before_are_kept_beside_the_new_ones(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(200,))
    for rate in (2, 3):
        run = opened(runs, resume="auto", texts=TEXTS | {"config.yaml": f"lr: {rate}\n"})
        assert run.notes[-1].message == f"other settings than before: lr {rate - 1} -> {rate}"
        run.close()
    texts = {file.name: file.read_text() for file in path.glob("config*")}
    assert texts == {
        "config.yaml": "lr: 3\n",
        "config.before_step_00000200.yaml": "lr: 1\n",
        "config.before_step_00000200-2.yaml": "lr: 2\n",
    }
    assert not list(path.glob("precision_plan.before*"))


def test_a_run_that_goes_back_keeps_the_text_of_the_steps_that_stay(runs: Path, opened: Any) -> None:
    """lr 1 up to step 300, then 2; from step 100 on 3: the first hundred steps had 1, and 2 was discarded."""
    path = make_run(runs, checkpoints=(100,))
    (path / "config.yaml").write_text("lr: 2\n")
    (path / "config.before_step_00000300.yaml").write_text("lr: 1\n")
    opened(runs, resume="auto", texts=TEXTS | {"config.yaml": "lr: 3\n"}).close()
    assert {file.name: file.read_text() for file in path.glob("*config*")} == {
        "config.yaml": "lr: 3\n",
        "config.before_step_00000100.yaml": "lr: 1\n",
        "discarded_config.before_step_00000300.yaml": "lr: 1\n",
        "discarded_config.yaml": "lr: 2\n",
    }
    assert [file.name for file in configs_before(path).values()] == ["config.before_step_00000100.yaml"]


def test_a_resumption_that_the_disk_ends_leaves_a_run(runs: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(runs, checkpoints=(200,))
    write = run_folder.replace_file

    def full(file: Path, content: bytes) -> None:
        if file.name == "config.yaml":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, content)

    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(OSError, match="No space"):
        opened(runs, resume="auto", texts=TEXTS | {"config.yaml": "lr: 2\n"})
    monkeypatch.undo()
    assert (path / "config.yaml").read_text() == "lr: 1\n"
    assert opened(runs, resume="auto").first_step == 200


def test_a_config_that_cannot_resume_is_refused_before_anything_changes(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    damage(path / CHECKPOINTS / "step_00000200")
    before = snapshot(path)

    def check(meta: dict[str, Any], checkpoint: Path) -> None:
        raise ValueError(f"model.num_layers=3: {checkpoint.name} has {meta}")

    with pytest.raises(ValueError, match=r"model.num_layers=3: step_00000100 has {'step': 100}"):
        opened(runs, resume="auto", check=check)
    assert snapshot(path) == before
    opened(runs, resume="auto")  # and the lock is free again


@pytest.mark.parametrize(
    ("change", "set_back", "takes_weights"),
    [
        ("model.qk_scale=2", "model.qk_scale=1.0", True),
        ("model.rope_theta=2", "model.rope_theta=10000.0", True),
        ("trainer.seed=9", "trainer.seed=0", True),
        ("optim=muon_cosine", "optim.name=adamw", True),
        ("model.activation=gelu", "model.activation=swiglu", False),
        ("model.num_experts=8", "model.num_experts=4", False),
        ("model.q_lora_rank=8", "model.q_lora_rank=null", False),
        ("model.num_mtp_layers=0", "model.num_mtp_layers=1", False),
    ],
)
def test_a_refused_resumption_suggests_the_weights_only_where_they_fit(
    change: str, set_back: str, takes_weights: bool, tmp_path: Path
) -> None:
    began, changed = config_of([*SMALL, "trainer.seed=0"]), config_of([*SMALL, "trainer.seed=0", change])
    checkpointer = Checkpointer(tmp_path / CHECKPOINTS, 0, quiet)
    model = DeepSeek(began.model, Plan(began.precision, began.model.num_layers))
    checkpointer.save(1, {"model": model.state_dict()}, identity(began))
    checkpointer.close()
    path = tmp_path / CHECKPOINTS / "step_00000001"
    with pytest.raises(UserError, match=rf"{re.escape(change.split('=')[0])}.*; set {re.escape(set_back)}(,|$)") as no:
        check_resumable(changed, read_meta(path), path)
    assert (f"run.init_from={path}" in str(no.value)) is takes_weights
    changed.run.init_from = str(path)
    if takes_weights:
        check_origin(changed)
    else:
        with pytest.raises(UserError, match="use that run's model"):
            check_origin(changed)
    check_resumable(config_of([*SMALL, "trainer.seed=0", change, set_back]), read_meta(path), path)


def test_a_suggested_section_can_be_typed(tmp_path: Path) -> None:
    scaling = "model.rope_scaling={factor: 4.0, original_max_position_embeddings: 32, beta_fast: 32.0}"
    began, changed = config_of([*SMALL, scaling]), config_of(SMALL)
    checkpointer = Checkpointer(tmp_path, 0, quiet)
    checkpointer.save(1, {"model": {}}, identity(began))
    checkpointer.close()
    path = tmp_path / "step_00000001"
    with pytest.raises(UserError, match=r"^model\.rope_scaling=null: .*; set 'model\.rope_scaling=\{.*\}'$") as no:
        check_resumable(changed, read_meta(path), path)
    assert config_of([*SMALL, *shlex.split(str(no.value).split("; set ")[1])]).model == began.model


# ---------------------------------------------------------------------------------------------------- a path


def test_a_run_folder_as_path_resumes_in_it(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    run = opened(Path("elsewhere"), None, str(path))
    assert run.path == path and run.first_step == 200
    copy = shutil.copytree(path, runs / "a (copy)")  # as file managers name it; no run.name may have a space
    assert opened(runs, copy.name, str(copy)).path == copy


def test_a_checkpoint_as_path_resumes_from_it_and_later_ones_are_set_aside(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200, 300))
    run = opened(runs, "a", str(path / CHECKPOINTS / "step_00000100"))
    assert run.path == path and run.first_step == 100 and logged(path) == [0, 100]
    run.close()
    assert opened(runs, resume="auto").first_step == 100  # not 300, which belongs to what was given up
    assert "set aside" in run.notes[0].message and "step_00000300.set_aside" in run.notes[0].message


@pytest.mark.parametrize(
    "target", ["atuo", "runs/nothing", "{runs}", "{runs}/a/checkpoints", "{runs}/a/checkpoints/step_00000400"]
)
def test_a_path_that_leads_nowhere_is_refused(runs: Path, opened: Any, target: str) -> None:
    make_run(runs, checkpoints=(100,))
    before = snapshot(runs)
    with pytest.raises(ValueError, match=r"run.resume=.*: must be never, auto, or the path") as refusal:
        opened(runs, None, target.format(runs=runs))
    assert "\n" not in str(refusal.value) and snapshot(runs) == before


def test_a_path_to_a_run_without_a_checkpoint_is_refused(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=()).rename(runs / "[a]")
    with pytest.raises(ValueError, match=r"has no checkpoint to resume from; .* \"run.name='\[a\]'\" run.resume=auto$"):
        opened(runs, None, str(path))


def test_a_path_to_a_damaged_checkpoint_is_refused_by_the_file(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    damage(path / CHECKPOINTS / "step_00000200")
    before = snapshot(path)
    with pytest.raises(ValueError, match=r"run.resume=.*rank00000.safetensors has 20 bytes"):
        opened(runs, None, str(path / CHECKPOINTS / "step_00000200"))
    assert snapshot(path) == before


def test_a_path_and_another_name_contradict(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100,))
    with pytest.raises(ValueError, match=r"run.name=b: .* or start a new run from its weights with run.init_from"):
        opened(runs, "b", str(path))
    assert not (runs / "b").exists()


def test_a_checkpoint_may_be_given_from_inside_its_run_or_by_a_link(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    one = (path / CHECKPOINTS / "step_00000100").resolve()
    (tmp_path / "link").symlink_to(one)
    for folder, given in ((one.parent, one.name), (one, "."), (tmp_path, "link")):
        monkeypatch.chdir(folder)
        assert find_checkpoint(Path(given), "RUN", quiet) == one
        assert locate(runs, None, given, "") == (path.resolve(), one)


def test_find_checkpoint_takes_a_run_or_a_checkpoint(runs: Path) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    one = path / CHECKPOINTS / "step_00000100"
    assert find_checkpoint(one, "run.init_from", quiet) == one
    assert read(find_checkpoint(path, "run.init_from", quiet))[1] == {"step": 200}
    with pytest.raises(ValueError, match=r"run.init_from=nowhere: no checkpoint there"):
        find_checkpoint(Path("nowhere"), "run.init_from", quiet)
    damage(one)
    with pytest.raises(ValueError, match=r"run.init_from=.*step_00000100: .*rank00000.safetensors"):
        find_checkpoint(one, "run.init_from", quiet)
    damage(path / CHECKPOINTS / "step_00000200")
    with pytest.raises(ValueError, match=r"run.init_from=.*a: every checkpoint there is damaged"):
        find_checkpoint(path, "run.init_from", quiet)


def test_secrets_that_change_are_reported_without_their_values(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100,))
    config = "health: {alerts: {webhook: https://example.org/PRIVATE%d, command: tell PRIVATE%d}}\n"
    (path / "config.yaml").write_text(config % (1, 1))
    run = opened(runs, resume="auto", texts={**TEXTS, "config.yaml": config % (2, 2)})
    said = " ".join(note.message for note in run.notes)
    assert "health.alerts.webhook" in said and "health.alerts.command" in said and "PRIVATE" not in said


def test_a_run_without_its_config_is_named_and_told_how_to_resume(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", checkpoints=(100,))
    (path / "config.yaml").unlink()
    with pytest.raises(
        ValueError, match=r"a/config\.yaml is missing; make an empty one, and the settings of its newest"
    ):
        locate(tmp_path, None, str(path), "")
    (path / "config.yaml").touch()
    assert locate(tmp_path, None, str(path), "") == (path, None)
