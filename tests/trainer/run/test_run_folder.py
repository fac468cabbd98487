"""Run folders of new runs: what is in them, and which places are refused."""

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
from run_folders import TEXTS, digest, make_run, quiet, snapshot

from precision.errors import UserError
from trainer.config import RunConfig, load
from trainer.config.paths import with_absolute_paths
from trainer.launch.world import World
from trainer.run import run_folder
from trainer.run.location import check_writable, locate
from trainer.run.names import CHECKPOINTS
from trainer.run.run_folder import RunFolder, saved_backends
from trainer.run.shared_disk import check_shared


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
    path, rank_0 = opened(runs).path, World(torch.device("cpu"), size=2)
    seen_by_rank_1 = path

    def coordinate(world: World, ask: Any, look: Any, named: str) -> Any:
        return ask(lambda mark: [look(mark), look(seen_by_rank_1 / mark.name)])

    monkeypatch.setattr(World, "coordinate", coordinate)
    check_shared(path, rank_0)
    assert [each.name for each in path.glob(".*")] == [".lock"]
    for seen_by_rank_1 in (runs / "b", opened(runs, "c").path):
        says = rf"run\.dir={runs}: rank 1 does not see .* \({seen_by_rank_1} on .*all nodes share"
        with pytest.raises(UserError, match=says):
            check_shared(path, rank_0, patience=0.0)


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
    path, _ = locate(runs, None, "never", "../ours, with/slashes")  # precision.name
    assert path.parent == runs and path.name.endswith("-..-ours-with-slashes")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "/tmp/x", ".hidden", "-x", "a b", "."])
def test_a_name_that_is_no_folder_name_is_refused(runs: Path, opened: Any, name: str) -> None:
    with pytest.raises(ValueError, match="must be a plain folder name"):
        opened(runs, name)
    with pytest.raises(ValueError, match=r"run\.name=n{20}\.\.\.: 256 bytes, and a folder's name has at most 255"):
        opened(runs, "n" * 256)
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
        opened(tmp_path / ("a" * 300), name)


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
