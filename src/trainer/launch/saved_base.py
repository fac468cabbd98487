"""A config that a run has saved, as what Hydra composes on instead of `configs/train.yaml`.

Each section that has a group in `configs/` becomes a choice of that group, `as_saved`, and the default one. So a group
or recipe on the command line replaces whole sections, as it does in a run's first command line, and keys change single
values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

AS_SAVED = "as_saved"


def register(configs: Path, name: str, tree: Mapping[str, Any]) -> str:
    """Make the plain config `tree` known to Hydra, with the settings of Hydra itself in `configs`/`name`.yaml. Returns
    the name of the primary config."""
    from hydra.core.config_store import ConfigStore

    store, primary = ConfigStore.instance(), yaml.safe_load((configs / f"{name}.yaml").read_text())
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
    """The arguments, with ++ before keys: a saved config has each key that its version knew, those included that
    `configs` leaves to +KEY, and `load()` refuses what no version knows."""

    def force(argument: str) -> str:
        key = argument.lstrip("+").partition("=")[0]
        is_key = "=" in argument and argument[:1] not in "-~" and not key.startswith("hydra") and "@" not in key
        return f"++{argument.lstrip('+')}" if is_key and not (configs / key).is_dir() else argument

    return [force(argument) for argument in arguments]


def run_section(configs: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What the command line says about `run`, and the default of `run.dir`; without what refers to other keys."""
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
