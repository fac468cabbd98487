"""The mesh: the axes of parallelism and each rank's place on them.

    blocks                              pipeline; the axes below are within a stage
    sequences                           (replicate x shard) x (context x tensor)
    weights of all kinds but experts    replicate x (shard x context) x tensor
    experts' weights                    expert_replicate x expert_shard x expert

Ranks are numbered row by row, so the last axis consists of neighbours: a context group, a shard group and an expert
group lie in one node if they fit. The ranks of a context group have the same sequences and a piece of each
(`models.context`); every rank has tokens of its own, and weights are cut over `shard x context` ranks. The ranks of a
tensor group (`models.tensor`) also share sequences; they split heads and vocabulary and replicate all other weights.
The ranks of a stage (`models.stage`) are neighbours, and rank i of each stage has the same sequences. `expert`
subdivides all ranks of a stage: an expert group is some of the ranks that weights are cut over, or some whole groups of
these. Each of its ranks owns E / expert whole experts, and shares each of them with the other `expert_shard x
expert_replicate` ranks that own the same ones, if any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precision.errors import counted, refuse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.config import ParallelConfig

LARGE = 2**24  # elements of a weight: a gradient of 64 MiB, worth a message of its own


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes, all resolved."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.stage * self.pipeline

    @property
    def stage(self) -> int:
        """Ranks of a stage. Together they have all tokens."""
        return self.data * self.sequence

    @property
    def data(self) -> int:
        """Number of groups that share sequences; each has different ones."""
        return self.replicate * self.shard

    @property
    def sequence(self) -> int:
        """Ranks that share sequences."""
        return self.context * self.tensor

    @property
    def cut(self) -> int:
        """Ranks that each weight outside the experts is cut over."""
        return self.shard * self.context

    @property
    def expert_shard(self) -> int:
        """Ranks that shard each expert's weights."""
        return self.cut if self.expert == 1 else max(self.cut * self.tensor // self.expert, 1)

    @property
    def expert_replicate(self) -> int:
        """Ranks that have the same part of the same experts."""
        return self.stage // (self.expert * self.expert_shard)

    @property
    def shares_experts(self) -> bool:
        """Whether several ranks have weights of the same experts."""
        return self.expert_shard * self.expert_replicate > 1


ONE_PROCESS = Degrees()


def is_large(shape: Sequence[int], ranks: int) -> bool:
    """Return whether a weight shared by `ranks` ranks gets its own message: it is large, and cut evenly."""
    return math.prod(shape) >= LARGE and ranks > 1 and shape[0] % ranks == 0


@dataclass(frozen=True)
class FsdpPolicy:
    """FSDP's behaviour at each microbatch."""

    reduce_each_microbatch: bool = True
    """Reduce gradients after each microbatch; else once a step."""
    keep_gathered: bool = False
    """Keep gathered weights until the step's last backward pass; else free and gather them again."""


def resolve(config: ParallelConfig, world: int) -> Degrees:
    """Return the degrees for `world` processes. Raises UserError, naming key, value and fix, for incompatible ones."""
    context, tensor, pipeline = config.context, config.tensor, config.pipeline
    for axis, size in {"context": context, "tensor": tensor, "pipeline": pipeline}.items():
        if size < 1:
            refuse(f"parallel.{axis}", size, "out of range", "set 1 or more")
    stage, least = world // pipeline, 1
    axes = ("pipeline", pipeline, world), ("context", context, stage), ("tensor", tensor, stage // context)
    for axis, size, ranks in axes:
        least *= size
        if ranks % size:
            of = "" if ranks == world else " of a stage" if ranks == stage else " that parallel.context leaves"
            them = f"the {ranks} processes" if ranks > 1 else "the one process"
            why = f"it does not divide {them}{of}"
            refuse(f"parallel.{axis}", size, why, f"set {divisor_near(size, ranks)}, or start a multiple of {least}")
    sizes = {"replicate": config.replicate, "shard": config.shard}
    for axis, size in {**sizes, "expert": config.expert}.items():
        if size < 1 and size != -1:
            refuse(f"parallel.{axis}", size, "out of range", "set 1 or more, or -1 for what is left")
    left = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(left) == 2:
        why = "parallel.shard=-1 takes what is left already"
        refuse("parallel.replicate", -1, why, "set the number of groups, or of ranks in a group")
    groups = stage // (context * tensor)
    others = {"context": context, "tensor": tensor, "pipeline": pipeline}
    of = " * ".join(f"parallel.{k}={v}" for k, v in others.items() if v > 1)
    these = f"the {world} processes" if world > 1 else "one process"
    these = f"the {counted(groups, 'group')} of {of} processes" if of else these
    if left:
        if groups % known:
            known_axis = next(axis for axis in sizes if axis not in left)
            fix = f"set {divisor_near(known, groups)}, or start a multiple of {known * least}"
            refuse(f"parallel.{known_axis}", known, f"it does not divide {these}", fix)
        sizes[left[0]] = groups // known
    elif known != groups:
        if known == least == 1:
            why = f"parallel.replicate * parallel.shard must be the {world} processes"
            refuse("parallel.shard", config.shard, why, "set parallel.shard=-1, which uses all, or start one process")
        axis = "shard" if config.shard != 1 or config.replicate == 1 else "replicate"
        others = {"replicate": config.replicate, "shard": config.shard, **others}
        beside = " and ".join(f"parallel.{k}={v}" for k, v in others.items() if k != axis and (v > 1 or k in sizes))
        start = known * least
        there = f"there are {world} processes" if world > 1 else "there is one process"
        why = f"with {beside} it needs {start} ranks, and {there}"
        other = next(v for k, v in sizes.items() if k != axis)
        fix = f"start {start} with torchrun"
        if groups % other == 0:
            fix += f", or set parallel.{axis}=-1 to take what is left"
        refuse(f"parallel.{axis}", sizes[axis], why, fix if world > 1 else f"{fix}; dry_run=true shows it anywhere")
    expert = stage if config.expert == -1 else config.expert
    cut = sizes["shard"] * context * tensor
    if not fits_expert(expert, cut, stage):
        beside = "".join(f" * parallel.{k}" for k, v in (("context", context), ("tensor", tensor)) if v > 1)
        ranks = f"parallel.shard{beside}={cut}"
        why = f"an expert group is a part of the {ranks} ranks of {stage}, or several whole ones"
        refuse("parallel.expert", expert, why, f"set {_expert_near(expert, cut, stage)}")
    return Degrees(sizes["replicate"], sizes["shard"], expert, context, pipeline, tensor)


def forecast_degrees(config: ParallelConfig, processes: int) -> Degrees:
    """Return the degrees that a forecast is for. If all are given, they hold whatever the number of `processes`. A
    degree of -1 takes the remaining processes; with one process, as few as the other degrees allow. Raises as
    `resolve`."""
    left = -1 in (config.replicate, config.shard)
    if left and processes > 1:
        return resolve(config, processes)
    sizes = config.replicate, config.shard, config.context, config.tensor
    stage, stages = math.prod(size for size in sizes if size > 0), max(config.pipeline, 1)
    return resolve(config, stages * (math.lcm(stage, max(config.expert, 1)) if left else stage))


def fits_expert(expert: int, shard: int, world: int) -> bool:
    """Return whether `world` ranks in groups of `shard` can form expert groups of `expert` ranks."""
    return world % expert == 0 and (shard % expert == 0 or expert % shard == 0)


def divisor_near(number: int, of: int) -> int:
    """Return the largest divisor of `of` that is not above `number`."""
    return next(n for n in range(min(number, of), 0, -1) if of % n == 0)


def _expert_near(expert: int, shard: int, world: int) -> int:
    return next(n for n in range(min(expert, world), 0, -1) if fits_expert(n, shard, world))


@dataclass(frozen=True)
class Mesh:
    """Process groups of a run, as DeviceMeshes.

    weights: `shard x context` as one axis, or `replicate x` that. experts: the same of the experts' weights
    (`expert_shard`, or `expert_replicate x expert_shard`). expert: the ranks that together own all experts; None
    without expert parallelism. context: the ranks that share sequences and exchange heads; None without context
    parallelism. tensor: the ranks that heads and vocabulary are cut over; None without tensor parallelism. sequence:
    context x tensor as one axis; None if sequences are whole. pipeline: a rank of each stage; None with one stage.
    stage: the ranks of a stage, over which tensor groups reduce; None with one stage, and without tensor parallelism.
    """

    degrees: Degrees
    weights: DeviceMesh
    experts: DeviceMesh
    expert: DeviceMesh | None
    context: DeviceMesh | None
    pipeline: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    stage: DeviceMesh | None = None


def stage_group(degrees: Degrees, device_type: str) -> ProcessGroup | None:
    """Return the ranks of this rank's stage; None, the default group, with one stage. A collective, as `build_mesh`."""
    from torch.distributed.device_mesh import init_device_mesh

    if degrees.pipeline == 1:
        return None
    sizes = degrees.pipeline, degrees.stage
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "stage"))["stage"].get_group()


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """Build the mesh. A collective: every rank of the default process group calls it. device_type: cuda or cpu."""
    from torch.distributed.device_mesh import init_device_mesh

    d = degrees

    def mesh_of(**axes: int) -> DeviceMesh:
        """Return the ranks of a stage along these axes; with several stages along `pipeline` first."""
        sizes = ({"pipeline": d.pipeline} if d.pipeline > 1 else {}) | axes
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    mesh = mesh_of(replicate=d.replicate, cut=d.cut, **({"tensor": d.tensor} if d.tensor > 1 else {}))
    weights = mesh["replicate", "cut"] if d.replicate > 1 else mesh["cut"]
    pipeline = mesh["pipeline"] if d.pipeline > 1 else None
    context = tensor = sequence = stage = None
    if d.tensor > 1:
        tensor = mesh["tensor"]
        stage = mesh_of(stage=d.stage)["stage"] if d.pipeline > 1 else None
        context = mesh_of(data=d.data, context=d.context, tensor=d.tensor)["context"] if d.context > 1 else None
    if d.sequence > 1:
        sequence = mesh_of(data=d.data, sequence=d.sequence)["sequence"]
        context = sequence if d.tensor == 1 else context
    if d.expert == 1:
        return Mesh(degrees, weights, weights, None, context, pipeline, tensor, sequence, stage)
    mesh = mesh_of(expert_replicate=d.expert_replicate, expert_shard=d.expert_shard, expert=d.expert)
    experts = mesh["expert_replicate", "expert_shard"] if d.expert_replicate > 1 else mesh["expert_shard"]
    return Mesh(degrees, weights, experts, mesh["expert"], context, pipeline, tensor, sequence, stage)
