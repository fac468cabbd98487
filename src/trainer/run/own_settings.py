"""The settings that a command line changes: those of an existing run, if it names one.

    python train.py run.name=mine run.resume=auto trainer.max_steps=20       resumes with the run's own settings
    python train.py --from-run runs/mine run.name=other optim.lr=1e-3        starts a run with the settings of another

They come from the run's `config.yaml`, or, if that was altered (`trainer.digests`), from its newest checkpoint. A run
that was started with `run.resume=auto` resumes by its name alone. Not taken over: secrets, which no run stores; keys
that apply to one start (`debug`, `profile`, `dry_run`, `gpu`, `force_memory`); and, by another run, the name and
`run.resume`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from precision.errors import UserError
from trainer.checkpoint import DamagedCheckpoint, list_checkpoints, read_meta
from trainer.checkpoint.manifest import STATE, verify
from trainer.config.paths import NO_PATHS
from trainer.config_diff import HIDDEN, read_yaml
from trainer.digests import accepting, read_stamped
from trainer.launch.saved_config import OF_ONE_START, OwnSettings
from trainer.run.location import named_by, state_of
from trainer.run.names import CHECKPOINTS, CONFIG

_ELSE = "start it with all its settings under another run.name"


def own_settings(run: Mapping[str, Any], restarted: bool, from_run: str | None) -> OwnSettings | None:
    """Return the settings to start from; None for those of configs/. Raises UserError for a run that has none.

    run: what the command line sets in that section, and the default of `dir`. restarted: by torchrun.
    """
    folder, resume = _to_resume(run, restarted)
    if folder is not None:
        try:
            own = _read(folder, f"run.name={folder.name}")
        except UserError:
            if resume is not None:
                raise
            return None  # `RunFolder` refuses a run that exists
        if resume is not None or (from_run is None and own.tree["run"].get("resume") != "never"):
            place = {"name": folder.name, "dir": str(folder.parent), "resume": "auto"}
            return OwnSettings(own.tree | {"run": own.tree["run"] | place}, own.source, own.secrets)
    if from_run is None:
        return None
    folder = _with_name(Path(from_run))
    if not folder.is_dir() or state_of(folder) != "run":
        raise UserError(f"--from-run {from_run}: it is not the folder of a run; give one that has a {CONFIG}")
    other = _read(folder, f"--from-run {from_run}")
    place = {"name": None, "dir": str(folder.parent), "resume": "never"}
    return OwnSettings(other.tree | {"run": other.tree["run"] | place}, other.source, other.secrets)


def _to_resume(run: Mapping[str, Any], restarted: bool) -> tuple[Path | None, str | None]:
    """Return the run folder that a command line may mean to resume, and its `run.resume`. A path has to name a run; a
    name is checked when the folder is opened."""
    resume = run.get("resume")
    if isinstance(resume, str) and resume not in NO_PATHS:
        folder = _with_name(named_by(resume, restarted)[0])
    else:
        resume = "auto" if restarted else resume
        if resume not in (None, "auto") or run.get("name") is None:
            return None, None
        folder = Path(str(run["dir"])) / str(run["name"])
    return (folder if os.path.isfile(folder / CONFIG) else None), resume  # no error of a name that is too long


def _with_name(folder: Path) -> Path:
    """Return a folder whose path ends in its name: that of `.` and `..` does not."""
    return folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))


def _read(folder: Path, setting: str) -> OwnSettings:
    """Return the settings of the run in `folder`. setting: the key that names it, for errors."""
    path, source = folder / CONFIG, str(folder)
    try:
        tree = read_yaml(read_stamped(path, ""))
        if not isinstance(tree.get("run"), dict):
            raise yaml.YAMLError("no config of a run")
    except (UserError, yaml.YAMLError):
        checkpoint, tree = _of_a_checkpoint(folder)
        if checkpoint is None:
            raise UserError(f"{setting}: {path} was altered, and no checkpoint has its settings; {_ELSE}") from None
        source = f"{checkpoint} ({CONFIG} was altered; to accept an edit: {accepting(path)})"
    return OwnSettings({key: tree[key] for key in tree if key not in OF_ONE_START}, source, _secrets(folder))


def _of_a_checkpoint(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint with an intact config, and that config."""
    for checkpoint in reversed(list_checkpoints(folder / CHECKPOINTS)):
        try:
            verify(checkpoint, only=STATE)
        except DamagedCheckpoint:
            continue
        if (tree := read_meta(checkpoint).get("config")) is not None:
            return checkpoint, tree
    return None, {}


def _secrets(folder: Path) -> tuple[str, ...]:
    """Keys of secrets that the command lines of a run have given."""
    lines = [
        line.partition("=")
        for path in folder.glob("overrides*.txt")
        for line in path.read_text(errors="replace").split("\n")
    ]
    return tuple(sorted({key.lstrip("+~") for key, _, value in lines if value == HIDDEN}))
