"""Run folders: the table of `run.resume`, and what is dropped on the way."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of
from omegaconf import OmegaConf
from run_folders import TEXTS, damage, digest, logged, make_run, quiet, snapshot
from small import SMALL

from models import DeepSeek
from precision import Plan
from precision.errors import UserError
from trainer.checkpoint import Checkpointer, read, read_meta
from trainer.config import RunConfig, load
from trainer.config.paths import with_absolute_paths
from trainer.config_diff import configs_before
from trainer.launch.world import World
from trainer.run import run_folder
from trainer.run.location import check_writable, locate
from trainer.run.names import CHECKPOINTS, EVENTS, METRICS
from trainer.run.resume_source import check_origin, check_resumable, identity
from trainer.run.run_folder import RunFolder, check_shared, find_checkpoint, saved_backends


def test_open_takes_names_and_texts_from_the_config(tmp_path: Path) -> None:
    overrides = ["+recipe=fp8_delayed", f"run.dir={tmp_path}", "trainer.seed=7"]
    config = config_of(overrides)  # pyright: ignore[reportArgumentType]
    run = RunFolder.open(config, overrides, "the plan\n", {"gpu": None, "rows": {}}, World(torch.device("cpu")))
    run.close()
    assert run.path.parent == tmp_path and run.path.name.endswith("fp8_delayed")
    written = OmegaConf.to_container(OmegaConf.load(run.path / "config.yaml"))
    assert load(written) == with_absolute_paths(config)  # pyright: ignore[reportArgumentType]
    assert (run.path / "overrides.txt").read_text().splitlines() == overrides
    assert (run.path / "precision_plan.txt").read_text() == "the plan\n"
    assert json.loads((run.path / "environment.json").read_text())["torch"] == torch.__version__
    assert saved_backends(run.path) == {"gpu": None, "rows": {}}
    assert saved_backends(tmp_path) is None and saved_backends(None) is None
    (run.path / "backends.json").write_text("{")
    with pytest.raises(ValueError, match=r"backends.json: cannot be read .*; remove it, and backends are chosen again"):
        saved_backends(run.path)


def test_a_rank_that_does_not_see_the_folder_of_rank_0_is_refused(
    runs: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with run.dir on the disk of each node: the first checkpoint would be the first to notice."""
    path = opened(runs).path
    mark = path / ".shared.new"
    mark.touch()
    monkeypatch.setattr(World, "gather", lambda _, value, named="": ["", value])
    monkeypatch.setattr(World, "on_rank_0", lambda _, ask, named="": ask() or mark)
    first, second = (World(torch.device("cpu"), rank=rank, size=2) for rank in (0, 1))
    check_shared(None, second)
    check_shared(path, first)
    assert [each.name for each in path.glob(".*")] == [".lock", mark.name]  # without its own
    for elsewhere in (runs / "b", opened(runs, "c").path):
        mark = elsewhere / mark.name
        with pytest.raises(
            UserError, match=rf"run\.dir={runs}: rank 1 does not see .* \({elsewhere} on .*all nodes share"
        ):
            check_shared(None, second, patience=0.0)


def test_a_run_does_not_write_into_the_run_that_took_its_place(runs: Path, opened: Any) -> None:
    """Its folder was deleted, and another run of its name begun: both saved checkpoints there."""
    first = opened(runs)
    shutil.rmtree(first.path)
    second = opened(runs)
    with pytest.raises(UserError, match=r"run\.name=a: .* is in use by process"):
        first.recreate_if_deleted(3, quiet)
    second.close()
    with pytest.raises(UserError, match=r"run\.name=a: .*/a was deleted during the run, and is another run's now"):
        first.recreate_if_deleted(6, quiet)


def test_a_folder_that_not_all_ranks_see_stays_as_it_was(runs: Path, opened: Any) -> None:
    def refuse(path: Path) -> None:
        raise UserError("not shared")

    with pytest.raises(UserError, match="not shared"):
        opened(runs, "new", locked=refuse)
    assert not (runs / "new").exists()
    make_run(runs, checkpoints=(100, 200))
    before = snapshot(runs)
    with pytest.raises(UserError, match="not shared"):
        opened(runs, resume="auto", texts=TEXTS | {"config.yaml": "lr: 2\n"}, locked=refuse)
    assert snapshot(runs) == before


# ---------------------------------------------------------------------------------------------------- never


def test_a_new_run_gets_a_folder_with_what_produced_it(runs: Path, opened: Any) -> None:
    run = opened(runs)
    assert run.path == runs / "a" and run.is_new and run.first_step == 0 and run.notes == []
    assert snapshot(run.path) == {name: digest(text.encode()) for name, text in TEXTS.items()}


@pytest.mark.parametrize("checkpoints", [(), (100,)])
def test_never_refuses_a_run_that_exists_and_leaves_it_alone(
    runs: Path, opened: Any, checkpoints: tuple[int, ...]
) -> None:
    path = make_run(runs, checkpoints=checkpoints)
    before = snapshot(runs)
    with pytest.raises(
        ValueError, match=r"run.name=a: .*a exists; choose another run.name, or .* run.resume=auto"
    ) as refusal:
        opened(runs)
    assert "\n" not in str(refusal.value)
    assert snapshot(runs) == before and path.exists()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_folder_that_is_no_run_is_not_written_into(runs: Path, opened: Any, resume: str) -> None:
    (runs / "a").mkdir(parents=True)
    (runs / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is not a run folder"):
        opened(runs, resume=resume)
    (runs / "b").write_text("a file")
    with pytest.raises(ValueError, match="exists and is not a run folder"):
        opened(runs, "b", resume)
    assert snapshot(runs) == {"a/thesis.tex": digest(b"years of work"), "b": digest(b"a file")}


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_an_empty_folder_is_taken(runs: Path, opened: Any, resume: str) -> None:
    (runs / "a").mkdir(parents=True)
    assert opened(runs, resume=resume).is_new


def test_runs_without_a_name_get_different_ones_that_sort_by_time(runs: Path, opened: Any) -> None:
    names = [opened(runs, None).path.name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"\d{8}-\d{6}-fp8_delayed(-\d)?", name) for name in names), names


@pytest.mark.parametrize("name", ["", "../x", "a/b", "/tmp/x", ".hidden", "-x", "a b", "."])
def test_a_name_that_is_no_folder_name_is_refused(runs: Path, opened: Any, name: str) -> None:
    with pytest.raises(ValueError, match="must be a plain folder name"):
        opened(runs, name)
    assert not runs.exists()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_dangling_link_is_reported_as_one(runs: Path, opened: Any, resume: str) -> None:
    runs.mkdir()
    (runs / "a").symlink_to("gone")
    with pytest.raises(ValueError, match=r"run.name=a: .*a is a link to gone, which is not there; make that folder"):
        opened(runs, resume=resume)


@pytest.mark.parametrize("name", ["a", None])
def test_a_folder_that_cannot_be_made_is_refused_by_its_key(tmp_path: Path, opened: Any, name: str | None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run\.dir=.*file: .* cannot be used \(Not a directory\); set a folder that"):
        opened(tmp_path / "file", name)
    with pytest.raises(ValueError, match=r"run\.dir=.* cannot be used \(File name too long\)"):
        opened(tmp_path, "a" * 300)


def test_a_folder_that_cannot_be_written_is_refused_before_data_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    check_writable(RunConfig(None, str(tmp_path / "new" / "runs"), "never", None))
    with pytest.raises(
        UserError, match=r"run\.dir=.*file/runs: .*file cannot be used \(Not a directory\); set a folder"
    ):
        check_writable(RunConfig("a", str(tmp_path / "file" / "runs"), "auto", None))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"run\.dir=.*/runs: /.* cannot be used \(Permission denied\); set a folder"):
        check_writable(RunConfig(None, str(tmp_path / "runs"), "never", None))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------------------------------------------- auto


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


@pytest.mark.parametrize("name", ["a", None])
def test_a_full_disk_leaves_no_folder_of_a_run_that_has_not_begun(
    runs: Path, name: str | None, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (runs / "b").mkdir(parents=True)
    with monkeypatch.context() as on:
        on.setattr(run_folder, "replace_file", full)
        for attempt in (name, "b"):
            with pytest.raises(OSError, match="No space"):
                opened(runs, attempt)
    assert [path.name for path in runs.iterdir()] == ["b"], "what was there before stays"
    run = opened(runs, name)
    run.undo(None, ValueError(), None)
    assert (run.path / "config.yaml").is_file()
    run.undo(None, OSError(errno.ENOSPC, "while the tokenizer is copied, say"), None)
    assert not run.path.exists()
    path = make_run(runs, checkpoints=(200,))
    again = opened(runs, "a", "auto")
    again.undo(None, OSError(errno.ENOSPC, "at a resumption"), None)
    assert (path / CHECKPOINTS).is_dir()


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
    with pytest.raises(UserError, match=r"^model\.rope_scaling=null: .*; set model\.rope_scaling=\{.*\}$") as no:
        check_resumable(changed, read_meta(path), path)
    assert config_of([*SMALL, str(no.value).split("; set ")[1]]).model == began.model


# ---------------------------------------------------------------------------------------------------- a path


def test_a_run_folder_as_path_resumes_in_it(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    run = opened(Path("elsewhere"), None, str(path))
    assert run.path == path and run.first_step == 200


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
    path = make_run(runs, checkpoints=())
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
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
