"""The search for layouts: of all degrees that fit into a machine, with stages, microbatches and recomputation, the
fastest.

Best first: degrees have a bound of their speed, without a bubble and with nothing computed again; each layout of them
has one, too, what it would do with memory for FSDP's fewest messages. The fastest bound is looked at next: degrees are
replaced by their layouts; of a layout memory is forecast, and what fits has a speed. One that is faster than all bounds
left is the fastest of all, so that few forecasts of memory answer. Memory knows no bandwidths: machines that differ in
these alone share the forecasts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, groupby

from precision import Plan
from precision.errors import UserError
from trainer.config import Config, Recompute
from trainer.forecast.cost import SPARE, Cost, Machine, timed
from trainer.forecast.memory import exceeds, forecast, forecast_memory, parameters
from trainer.forecast.muon import busiest
from trainer.forecast.stages import check_stages, goes_round, stage_models
from trainer.forecast.tensor import check_tensor
from trainer.parallel.mesh import Degrees, FsdpPolicy, fits_expert

FEWEST = FsdpPolicy(reduce_each_microbatch=False, keep_gathered=True)
STAGES = (1, 2, 4)  # a rank
AGAIN = {Recompute.none: [Recompute.selective], Recompute.selective: [Recompute.full], Recompute.full: []}
"""What is looked at after a choice, for the room that it makes: it is no faster."""


@dataclass(frozen=True)
class _Candidate:
    """A layout: sequences of a GPU and step, degrees, recomputation, microbatch, stages a rank."""

    sequences: int
    degrees: Degrees
    recompute: Recompute
    size: int
    per_rank: int


class Search:
    """Layouts of a config with the sizes of axes (and stages a rank) that are `given`."""

    def __init__(self, config: Config, plan: Plan, given: Mapping[str, int] | None = None):
        self._config, self._plan, self._given = config, plan, dict(given or {})
        self._per_rank = self._given.pop("stages_per_rank", None)
        self._held: dict[tuple[float, _Candidate], tuple[FsdpPolicy, float, float] | None] = {}

    def fastest_first(self, machine: Machine, sequences: Sequence[int]) -> Iterator[Cost]:
        """Of each choice of degrees the fastest layout that fits, of so many sequences a GPU and step. Of equals the
        simplest first, then that of the fewest microbatches, which the host has less work with."""
        done: set[Degrees] = set()
        for _, equals in groupby(self._in_order(machine, sequences, done), key=_speed):
            for one in sorted(equals, key=_rank):
                if one.degrees not in done:
                    done.add(one.degrees)
                    yield one

    def _in_order(self, machine: Machine, sequences: Sequence[int], done: set[Degrees]) -> Iterator[Cost]:
        """done: degrees that are not looked at further."""
        queue: list[tuple[float, int, tuple[Degrees, int] | _Candidate | Cost]] = []
        too_large: dict[_Candidate, int] = {}  # the least microbatch that does not fit, of layouts that differ in it
        number = count()

        def push(speed: float, what: tuple[Degrees, int] | _Candidate | Cost) -> None:
            heappush(queue, (-speed, next(number), what))

        for degrees in self._degrees(machine):
            for n in sequences:
                if (share := n * machine.gpus // degrees.data) >= degrees.pipeline:
                    size = _divisors(share, share // degrees.pipeline)[-1]
                    one = _Candidate(n, degrees, Recompute.none, size, self._per_rank or 1)
                    bound = self._timed(one, machine)
                    push(bound.tokens / (bound.step - bound.idle), (degrees, n))
        while queue:
            _, _, one = heappop(queue)
            if isinstance(one, tuple):
                for each in self._candidates(machine, *one) if one[0] not in done else ():
                    push(self._timed(each, machine).tokens_per_second, each)
                continue
            if one.degrees in done:
                continue
            if isinstance(one, Cost):
                yield one
                continue
            for recompute in AGAIN[one.recompute]:
                slower = replace(one, recompute=recompute)
                push(self._timed(slower, machine).tokens_per_second, slower)
            kind = replace(one, size=0)
            several = one.size * one.degrees.data < one.sequences * machine.gpus
            if several and one.size > too_large.get(kind, one.size):
                continue
            if (fits := self._memory(one, machine)) is not None:
                found = self._timed(one, machine, *fits)
                push(found.tokens_per_second, found)
            elif several:  # more of them take more; one alone frees activations as it makes gradients
                too_large[kind] = min(one.size, too_large.get(kind, one.size))

    def _degrees(self, machine: Machine) -> Iterator[Degrees]:
        for degrees in _degrees(machine, self._config, self._given):
            if _states(self._config, self._plan, degrees) <= SPARE * machine.memory:
                yield degrees

    def _candidates(self, machine: Machine, degrees: Degrees, sequences: int) -> Iterator[_Candidate]:
        """Of a context group's microbatches those that no smaller group computes the same pieces of, with fewer
        messages."""
        share = sequences * machine.gpus // degrees.data  # of a group that has the same sequences
        for size in _divisors(share, share // degrees.pipeline):
            if math.gcd(size, degrees.context) == 1:
                for per_rank in self._stages(degrees, share // size):
                    yield _Candidate(sequences, degrees, Recompute.none, size, per_rank)

    def _stages(self, degrees: Degrees, microbatches: int) -> Iterator[int]:
        """Numbers of stages a rank."""
        p, blocks = degrees.pipeline, self._config.model.num_layers
        for v in (self._per_rank,) if self._per_rank else STAGES:
            if v == 1 or (p > 1 and p * v <= blocks + 1 and goes_round(microbatches, p)):
                yield v

    def _run(self, one: _Candidate, machine: Machine) -> Config:
        size = one.sequences * machine.gpus
        trainer = replace(self._config.trainer, microbatch_size=one.size, global_batch_size=size)
        parallel = replace(self._config.parallel, stages_per_rank=one.per_rank)
        return replace(self._config, trainer=trainer, recompute=one.recompute, parallel=parallel)

    def _timed(
        self,
        one: _Candidate,
        machine: Machine,
        policy: FsdpPolicy = FEWEST,
        memory: float = 0.0,
        most: float = 1.0,
    ) -> Cost:
        return timed(self._run(one, machine), self._plan, one.degrees, machine, policy, memory, most)

    def _memory(self, one: _Candidate, machine: Machine) -> tuple[FsdpPolicy, float, float] | None:
        """What FSDP does, bytes, and the load of Muon's busiest rank; None where it does not fit."""
        key = machine.memory, one
        if key not in self._held:
            self._held[key] = None
            run, room = self._run(one, machine), SPARE * machine.memory
            if not exceeds(run, self._plan, one.degrees, room):
                held, policy = forecast(run, self._plan, one.degrees, machine.memory)
                self._held[key] = policy, sum(held.values()), busiest(run, self._plan, one.degrees)
        return self._held[key]


def _states(config: Config, plan: Plan, d: Degrees) -> float:
    """Bytes that no stage can do without: masters, gradients and one moment in BF16."""
    sizes = (parameters(rows, config=own.model) for own, rows, _ in stage_models(config, plan, d))
    return 10 * max(others / d.cut + experts / (d.expert * d.expert_shard) for others, experts in sizes)


def fewest(config: Config, plan: Plan, machine: Machine) -> int | None:
    """GPUs, the machine's doubled as often as it takes, that a layout fits into; None if it takes too many to count."""
    config = replace(config, recompute=Recompute.full)
    for gpus in (machine.gpus << n for n in range(1, 12)):
        trainer = replace(config.trainer, microbatch_size=1, global_batch_size=gpus)
        for degrees in _degrees(replace(machine, gpus=gpus), config, {}):
            if degrees.replicate == 1 and _states(config, plan, degrees) <= SPARE * machine.memory:
                memory = forecast_memory(replace(config, trainer=trainer), plan, degrees, FsdpPolicy(True, False))
                if sum(memory.values()) <= SPARE * machine.memory:
                    return gpus
    return None


def _speed(c: Cost) -> float:
    """As far as it is told apart: three digits."""
    return float(f"{c.tokens_per_second:.3g}")


def _rank(c: Cost) -> tuple[float, ...]:
    d, order = c.degrees, list(Recompute)
    layout = d.pipeline, d.context, d.tensor, d.expert, d.replicate, c.stages_per_rank
    return *layout, order.index(c.recompute), c.microbatches, c.memory


def _degrees(machine: Machine, config: Config, given: Mapping[str, int]) -> Iterator[Degrees]:
    """Every product that this config can be trained by: stages where nothing refuses them, context groups where both
    heads and positions go round, tensor groups within a node."""

    def sizes(axis: str, of: int) -> list[int]:
        return [n for n in ([given[axis]] if axis in given else _divisors(of)) if of % n == 0]

    heads, node = config.model.num_heads, min(machine.gpus, machine.per_node)
    for pipeline in sizes("pipeline", machine.gpus):
        stage = machine.gpus // pipeline
        for tensor in sizes("tensor", stage):
            if "tensor" not in given and node % tensor:
                continue
            for context in sizes("context", math.gcd(heads, config.trainer.sequence_length, stage // tensor)):
                for replicate in sizes("replicate", stage // (context * tensor)):
                    cut = stage // (replicate * tensor)
                    if given.get("shard", cut // context) != cut // context:
                        continue
                    for expert in sizes("expert", math.gcd(stage, config.model.num_experts)):
                        degrees = Degrees(replicate, cut // context, expert, context, pipeline, tensor)
                        if fits_expert(expert, cut * tensor, stage) and _trains(config, degrees):
                            yield degrees


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, (most or number) + 1) if number % n == 0]


def _trains(config: Config, degrees: Degrees) -> bool:
    """Whether nothing but the size of the batch stands against these degrees."""
    enough = replace(config.trainer, microbatch_size=1, global_batch_size=degrees.stage * degrees.pipeline)
    try:
        check_tensor(config, degrees)
        check_stages(replace(config, trainer=enough), degrees)
    except UserError:
        return False
    return True
