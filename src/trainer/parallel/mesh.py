"""The mesh: which rank does what.

    weights of all kinds but experts    replicate x shard
    experts' weights                    expert_replicate x expert_shard x expert

Ranks are counted row by row, so that the last axis is made of neighbours: a shard group, and an expert group, lie in
one node where they fit. `expert` subdivides the other two axes: an expert group is some ranks of a shard group, or some
whole shard groups. Each of its ranks owns E / expert whole experts, and shares each of them with the `expert_shard x
expert_replicate` ranks that own the same ones, if there are others; all `replicate x shard` ranks have tokens of their
own.

Axes for tensor, context and pipeline parallelism have their names in the config, and nothing behind them yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precision.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.config import ParallelConfig

RESERVED = ("tensor", "context", "pipeline")
LARGE = 2**24  # numbers of a weight: a gradient of 64 MiB, which is worth being a message of its own


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes, none of them left open."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    @property
    def expert_shard(self) -> int:
        """Ranks that share each expert's weights."""
        return max(self.shard // self.expert, 1)

    @property
    def expert_replicate(self) -> int:
        """Ranks that have the same part of the same experts."""
        return self.world // (self.expert * self.expert_shard)

    @property
    def shares_experts(self) -> bool:
        """Whether several ranks have weights of the same experts."""
        return self.expert_shard * self.expert_replicate > 1


def is_large(shape: Sequence[int], ranks: int) -> bool:
    """Whether a weight that so many ranks share travels by itself: it is large, and as much of it on each of them."""
    return math.prod(shape) >= LARGE and ranks > 1 and shape[0] % ranks == 0


@dataclass(frozen=True)
class FsdpPolicy:
    """What FSDP does at each microbatch."""

    reduce_each_microbatch: bool = True
    """Reduce gradients after each microbatch; else once a step."""
    keep_gathered: bool = False
    """Keep gathered weights until the step's last backward pass; else free and gather them again."""


def resolve(config: ParallelConfig, world: int) -> Degrees:
    """The degrees for `world` processes. UserError, naming key, value and fix, for what does not go together."""
    for axis in RESERVED:
        if getattr(config, axis) != 1:
            _refuse(axis, getattr(config, axis), "there is no such parallelism yet", f"set parallel.{axis}=1")
    sizes = {"replicate": config.replicate, "shard": config.shard}
    for axis, size in {**sizes, "expert": config.expert}.items():
        if size < 1 and size != -1:
            _refuse(axis, size, "out of range", "set 1 or more, or -1 for what is left")
    left = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(left) == 2:
        why = "parallel.shard=-1 takes what is left already"
        _refuse("replicate", -1, why, "set the number of groups, or of ranks in a group")
    if left:
        if world % known:
            known_axis = next(axis for axis in sizes if axis not in left)
            why = f"it does not divide the {world} processes"
            _refuse(known_axis, known, why, f"set {_divisor_near(known, world)}, or start a multiple of {known}")
        sizes[left[0]] = world // known
    elif known != world:
        if known == 1:
            why = f"parallel.replicate * parallel.shard are all {world} processes"
            _refuse("shard", config.shard, why, "choose parallel=fsdp, which takes all, or start one process")
        why = f"with parallel.replicate={config.replicate} it makes {known} ranks, and there are {world} processes"
        axis = "shard" if config.shard != 1 else "replicate"
        _refuse(axis, sizes[axis], why, f"start {known}, or set parallel.{axis}=-1 to take what is left")
    expert = world if config.expert == -1 else config.expert
    shard = sizes["shard"]
    if not fits_expert(expert, shard, world):
        why = f"an expert group is a part of the parallel.shard={shard} ranks of {world}, or several whole ones"
        _refuse("expert", expert, why, f"set {_expert_near(expert, shard, world)}")
    return Degrees(sizes["replicate"], shard, expert)


def fits_expert(expert: int, shard: int, world: int) -> bool:
    """Whether `world` ranks in groups of `shard` can be expert groups of so many ranks."""
    return world % expert == 0 and (shard % expert == 0 or expert % shard == 0)


def _refuse(axis: str, value: int, why: str, fix: str) -> None:
    raise UserError(f"parallel.{axis}={value}: {why}; {fix}")


def _divisor_near(number: int, of: int) -> int:
    return next(n for n in range(min(number, of), 0, -1) if of % n == 0)


def _expert_near(expert: int, shard: int, world: int) -> int:
    return next(n for n in range(min(expert, world), 0, -1) if fits_expert(n, shard, world))


@dataclass(frozen=True)
class Mesh:
    """Process groups of a run, as DeviceMeshes.

    weights: `shard`, or `replicate x shard`. experts: the same of the experts' weights (`expert_shard`, or
    `expert_replicate x expert_shard`). expert: the ranks that together own all experts; None without expert
    parallelism.
    """

    degrees: Degrees
    weights: DeviceMesh
    experts: DeviceMesh
    expert: DeviceMesh | None


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """A collective: every rank of the default process group calls it. device_type: cuda or cpu."""
    from torch.distributed.device_mesh import init_device_mesh

    d = degrees
    mesh = init_device_mesh(device_type, (d.replicate, d.shard), mesh_dim_names=("replicate", "shard"))
    weights = mesh if d.replicate > 1 else mesh["shard"]
    if d.expert == 1:
        return Mesh(degrees, weights, weights, None)
    shape = d.expert_replicate, d.expert_shard, d.expert
    names = "expert_replicate", "expert_shard", "expert"
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    experts = mesh[names[:2]] if d.expert_replicate > 1 else mesh["expert_shard"]
    return Mesh(degrees, weights, experts, mesh["expert"])
