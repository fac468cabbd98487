"""The saved config of a run as the base of a composition by Hydra, in place of `configs/train.yaml`.

Each section that has a group in `configs/` becomes the default choice of that group, `as_saved`. So a group or recipe
on the command line replaces whole sections, as in a run's first command line, and keys change single values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config_diff import changed_keys

AS_SAVED = "as_saved"
OF_ONE_START = "debug", "profile", "dry_run", "gpu", "force_memory"
"""Keys that apply to one start of a run only."""
MOMENTS = "precision.table.optim.moments"


@dataclass(frozen=True)
class OwnSettings:
    """The settings of an existing run, which a command line changes.

    tree: its config as plain values, without `OF_ONE_START`. source: the folder or file they come from. secrets: keys
    that the run was started with, and whose values no file stores.
    """

    tree: dict[str, Any]
    source: str
    secrets: tuple[str, ...] = ()

    def line(self, config: Mapping[str, Any]) -> str:
        """Return the line that reports them. config: of the run to start, as `kept_tree` returns it."""
        ours = {key: value for key, value in config.items() if key not in OF_ONE_START}
        changed = changed_keys(self.tree, ours) or "nothing"
        missing = [key for key in self.secrets if _value(config, key) is None]
        left_out = f"; not stored and not given: {', '.join(missing)}" if missing else ""
        return f"settings of {self.source}; changed here: {changed}{left_out}"


def register(configs: Path, name: str, tree: Mapping[str, Any]) -> str:
    """Make the plain config `tree` known to Hydra, with the settings of Hydra itself in `configs`/`name`.yaml. Returns
    the name of the primary config."""
    from hydra.core.config_store import ConfigStore

    store, primary = ConfigStore.instance(), yaml.safe_load((configs / f"{name}.yaml").read_text())
    tree = _with_reference(tree)
    groups = {key for key in tree if (configs / key).is_dir()}
    for group in groups:
        store.store(group=group, name=AS_SAVED, node=dict(tree[group]))
    primary["defaults"] = [
        {key: AS_SAVED if key in groups else value for key, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in primary["defaults"]
    ]
    store.store(name=AS_SAVED, node=primary | {key: tree[key] for key in tree if key not in groups})
    return AS_SAVED


def forced(configs: Path, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ++ before keys. A saved config has all keys of its version, also those that `configs`
    leaves to +KEY; `load()` refuses unknown ones."""

    def force(argument: str) -> str:
        key = argument.lstrip("+").partition("=")[0]
        is_key = "=" in argument and argument[:1] not in "-~" and not key.startswith("hydra") and "@" not in key
        return f"++{argument.lstrip('+')}" if is_key and not (configs / key).is_dir() else argument

    return [force(argument) for argument in arguments]


def run_section(configs: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the command line sets in `run`, and the default of `run.dir`; without references to other keys."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parser, default = OverridesParser.create(), yaml.safe_load((configs / f"{name}.yaml").read_text())["run"]["dir"]
    section = OmegaConf.create({"run": {"dir": default}})
    for argument in arguments:
        if argument.lstrip("+").startswith(("run.", "run=")):
            try:
                override = parser.parse_override(argument)
                if not override.is_sweep_override():
                    OmegaConf.update(section, override.key_or_group, override.value())
            except (HydraException, OmegaConfBaseException):  # composing reports it
                continue
    try:
        return dict(OmegaConf.to_container(section, resolve=True)["run"])  # type: ignore[index, call-overload]
    except (OmegaConfBaseException, TypeError, ValueError):
        return {"dir": default}


def _with_reference(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tree with `optim.moments` as `configs/optim` has it: what the precision table decides, which a recipe
    or key may change."""
    if _value(tree, MOMENTS) is None or _value(tree, MOMENTS) != _value(tree, "optim.moments"):
        return tree
    return {**tree, "optim": {**tree["optim"], "moments": f"${{{MOMENTS}}}"}}


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
