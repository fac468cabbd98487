"""`load()`: a tree composed by Hydra -> `Config`, strictly.

Hydra composes the YAML and the command line into a plain tree. `load()` converts it to the dataclasses of `sections`
and refuses whatever does not fit: an unknown key (even if added with `+`), a missing key, a value of the wrong type.
Nothing changes a config after `load()`.
"""

import re
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from precision.config import Precision
from precision.errors import UserError
from trainer.config.other_frameworks import octet_key
from trainer.config.schema import ELSEWHERE, fit, generic, keys_of, nearest, shown
from trainer.config.sections import Config
from trainer.config_diff import printable

RECIPE = "recipe"  # a group of configs without a section of its own; `+recpe=fp8_jit` means it


def load(composed: DictConfig | dict[str, Any]) -> Config:
    """Return the config in a composed tree (plain, or OmegaConf's).

    Raises UserError with key, value and fix, in one line, for whatever does not fit the schema.
    """
    created = OmegaConf.create(composed)
    try:
        tree = OmegaConf.to_container(created, resolve=True)
    except InterpolationResolutionError as error:
        named = re.search(r"(?:key '|access )(\w+)", str(error.msg))
        if named and named[1] in (hints := get_type_hints(Config)):  # that section may be what is wrong
            plain = cast(dict[str, Any], OmegaConf.to_container(created, resolve=False))
            fit(plain.get(named[1]), hints[named[1]], unknown_key, named[1])
        raise UserError(f"{error.full_key}: {str(error.msg).splitlines()[0]}; correct the ${{...}} in it") from error
    return fit_config(tree)


def fit_config(tree: Any) -> Config:
    """Return the config in a plain tree, in which nothing refers to another key. Raises as `load` does."""
    config: Config = fit(tree, Config, unknown_key)
    config.precision.table.optim.moments = Precision(config.optim.moments.value)  # it may have been set there
    return config


def unknown_key(key: str, value: Any) -> str:
    """Return the message for a key that the schema does not have."""
    wrong = generic(key)
    listed, entry, _ = wrong.rpartition("[]")
    parent = listed + entry or wrong.rpartition(".")[0]
    siblings = [k for k in keys_of(Config) if k.rpartition(".")[0] == parent]
    # an entry of a list has no keys of other sections
    keys = siblings if entry else [each for each in keys_of(Config) if "[]" not in each]
    same_name = [k for k in keys if k.rpartition(".")[2] == wrong.rpartition(".")[2]]
    meant = same_name[0] if len(same_name) == 1 else octet_key(wrong)  # optim.max_steps
    meant = meant or nearest(wrong, siblings if parent else [*siblings, RECIPE]) or nearest(wrong, keys, ELSEWHERE)
    name = (meant or "").rpartition(".")[2]
    if entry and f"{parent}.{name}" in siblings:  # with its number, as the command line takes it
        meant = f"{key[: key.rindex(']') + 1]}.{name}"
    problem = f"{key}={shown(printable(key, value))}: there is no such key"
    if wrong.partition(".")[0] == RECIPE:
        return f"{problem}; the first line of a recipe's file is # @package _global_"
    if meant == RECIPE:
        return f"{problem}; did you mean +{RECIPE}={shown(value)}?"
    if meant is not None:
        return f"{problem}; did you mean {meant}?"
    if parent and siblings:
        return f"{problem}; {parent} has {', '.join(k.rpartition('.')[2] for k in siblings)}"
    return f"{problem}; the sections are {', '.join(k for k in keys if '.' not in k)}"


def suggestion_for(name: str) -> str | None:
    """Return the key or recipe that `name` probably misspells, or None."""
    keys = keys_of(Config)
    # a section takes no value, and a key in a list needs its entry
    values = [key for key in keys if "[]" not in key and not any(other.startswith(f"{key}.") for other in keys)]
    if name in keys:  # a section whose config can be chosen: model=NAME
        return name
    meant = octet_key(name) or nearest(name, [*values, RECIPE], ELSEWHERE)
    return f"+{RECIPE}" if meant == RECIPE else meant
