"""`config_of(overrides)`: the config that train.py would load, in a tenth of the time.

Hydra reads and merges the YAML files once for each choice of files, for all processes of a test run; values are set in
a copy. What Hydra itself refuses is tested where it is the subject (`trainer/config`, `trainer/launch`).
"""

import copy
import hashlib
import os
import pickle
import re
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from models import DeepSeek
from precision import Plan
from precision.hardware import Gpu
from trainer.config import Config, load
from trainer.config.load import fit_config

CONFIGS = Path(__file__).parents[2] / "configs"
SHARED = "OCTET_TESTS_COMPOSED"  # a folder of this test run, in which its processes keep what they have composed
_parser = OverridesParser.create()


def config_of(overrides: Sequence[str]) -> Config:
    """The config of a command line. Where a value refers to another (`${a.b}`), it becomes that; `load` has OmegaConf
    do it, which takes longer than all the rest."""
    tree = tree_of(overrides)
    try:
        return fit_config(_resolved(tree, tree))
    except KeyError:  # another kind of reference, or a wrong one
        return load(tree)


def model_of(config: Config, gpu: Gpu | None = None) -> tuple[DeepSeek, Plan]:
    """A config's model without memory, and its plan."""
    plan = Plan(config.precision, config.model.num_layers, gpu)
    with torch.device("meta"):
        return DeepSeek(config.model, plan), plan


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _resolved(node: Any, root: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _resolved(value, root) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(value, root) for value in node]
    if not isinstance(node, str) or "${" not in node:
        return node
    if (found := _REFERENCE.fullmatch(node)) is None:
        raise KeyError(node)
    return _resolved(reduce(lambda section, key: section[key], found[1].split("."), root), root)


def tree_of(overrides: Sequence[str]) -> dict[str, Any]:
    """What Hydra composes, as plain dicts and lists."""
    parsed = [parse(text) for text in overrides]
    chosen = [(each.key_or_group, text) for text, each in zip(overrides, parsed, strict=True)]
    files = sorted((each for each in chosen if _is_plain(each[0])), key=lambda each: each[0])  # the last of one counts
    tree = copy.deepcopy(_composed(tuple(text for _, text in files)))
    for each in parsed:
        key = each.key_or_group
        if not _is_plain(key):
            *path, last = key.split(".")
            section = tree
            for name in path:
                section = section[name]
            value = copy.deepcopy(each.value())
            known = section.get(last) if each.is_add() else section[last]
            section[last] = known | value if isinstance(value, dict) and isinstance(known, dict) else value
    return tree


@cache
def parse(text: str) -> Override:
    """An override as Hydra understands it."""
    return _parser.parse_override(text)


def _is_plain(key: str) -> bool:
    """Whether the key chooses a file of configs/."""
    return "." not in key and (CONFIGS / key).is_dir()


@cache
def _composed(files: tuple[str, ...]) -> dict[str, Any]:
    folder = os.environ.get(SHARED)
    if folder is None:
        return _compose(files)
    kept = Path(folder) / hashlib.sha256(repr(files).encode()).hexdigest()
    if not kept.exists():
        with FileLock(f"{kept}.lock", poll_interval=0.01):  # ranks of a test want the same at the same time
            if not kept.exists():
                mine = kept.with_suffix(".new")
                mine.write_bytes(pickle.dumps(_compose(files)))
                mine.replace(kept)
    return pickle.loads(kept.read_bytes())


def _compose(files: tuple[str, ...]) -> dict[str, Any]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = OmegaConf.to_container(compose("train", overrides=list(files)))
    assert isinstance(tree, dict)
    return tree  # type: ignore[return-value]
