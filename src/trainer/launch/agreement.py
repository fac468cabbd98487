"""Checks that all ranks have the same config, code and torch, and names the rank that differs before building anything.

Nodes are set up by hand. A stale checkout or a different override on one of them would train something unintended, or
wait forever in a collective that the others never call.
"""

import hashlib
import platform
from collections import Counter
from dataclasses import asdict

import torch

from precision.errors import UserError, listed
from trainer.config import Config
from trainer.config_diff import HIDDEN, flat, is_secret
from trainer.files import SOURCE
from trainer.launch.world import World


def agree(world: World, config: Config, plan: str) -> None:
    """Raise UserError, naming the first difference and the ranks, unless all ranks have the same. A collective.

    plan: the resolved precision plan, which also depends on the GPU.
    """
    if not world.is_distributed:
        return
    plain = {key: str(getattr(value, "value", value)) for key, value in flat(asdict(config)).items()}
    facts = {**plain, **_versions(), "the precision plan": _hash(plan.encode())}
    digests = world.gather(_hash(repr(facts).encode()))
    if len(set(digests)) == 1:
        return
    everyone = world.gather(facts)
    keys = dict.fromkeys(key for theirs in everyone for key in theirs)
    for key in keys:
        values = [theirs.get(key, "nothing") for theirs in everyone]
        if len(set(values)) > 1:
            usual = Counter(values).most_common(1)[0][0]
            others = [rank for rank, value in enumerate(values) if value != usual]
            shown = [HIDDEN, "another value"] if is_secret(key) else [values[others[0]], usual]
            raise UserError(
                f"{key}={shown[0]} on rank{'s' * (len(others) > 1)} {listed(others, 8)}, {shown[1]} on the others: all "
                "ranks of a run have the same config, code and torch; start them with the same command, from the same "
                "checkout"
            )
    raise AssertionError("digests differ and facts do not")


def _versions() -> dict[str, str]:
    sources = sorted(SOURCE.rglob("*.py"))
    code = _hash(b"".join(source.relative_to(SOURCE).as_posix().encode() + source.read_bytes() for source in sources))
    return {"torch": torch.__version__, "python": platform.python_version(), "the source code of octet": code}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
