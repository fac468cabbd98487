"""The search for the fastest layouts: degrees, stages, microbatches and recomputation that fit into a machine.

The search is best first. Degrees have an upper bound of their speed: no bubble, no recomputation. Each layout of these
degrees has one, too: its speed if memory allowed FSDP's fewest messages. The search always takes the largest bound. It
replaces degrees by their layouts, and forecasts the memory of a layout; one that fits gets its speed. A speed above all
remaining bounds is the fastest of all, so the search needs few memory forecasts. Memory does not depend on bandwidths:
machines that differ only in bandwidths share the forecasts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, groupby, product

from precision import Plan
from precision.errors import UserError
from trainer.config import Config, Recompute
from trainer.config.timeline import each_shape
from trainer.forecast.cost import SPARE, Cost, Machine, timed
from trainer.forecast.memory import exceeds, forecast, forecast_memory, parameters
from trainer.forecast.muon import busiest
from trainer.forecast.preflight import check_fp8_all_gather, check_fsdp_policy
from trainer.forecast.stages import forms_whole_rounds, in_a_v, stage_models
from trainer.parallel.mesh import Degrees, FsdpPolicy, fits_expert

FEWEST = FsdpPolicy(reduce_each_microbatch=False, keep_gathered=True)
STAGES = (1, 2, 4)  # a rank
AGAIN = {Recompute.none: [Recompute.selective], Recompute.selective: [Recompute.full], Recompute.full: []}
"""The next choice, which needs less memory and is no faster."""


@dataclass(frozen=True)
class _Candidate:
    """A layout: sequences of a step, degrees, recomputation, microbatch, stages per rank."""

    batch: int
    degrees: Degrees
    recompute: Recompute
    size: int
    per_rank: int


@dataclass(frozen=True)
class _Fitting:
    """A layout that fits, with its FSDP policy and bytes."""

    layout: _Candidate
    policy: FsdpPolicy
    memory: float


class Search:
    """The search for layouts of a config. `given` fixes sizes of axes and stages per rank. run: with phases, of which
    config is the one that takes most memory; its layouts can train all of them."""

    def __init__(self, config: Config, plan: Plan, given: Mapping[str, int] | None = None, run: Config | None = None):
        self._plan, self._given = plan, dict(given or {})
        phases = [each.trainer for _, each in each_shape(run)] if run is not None else []
        self._lengths = sorted({t.sequence_length for t in [config.trainer, *phases]})
        batches = {t.global_batch_size for t in phases}
        self._batches = sorted(batches) if len(batches) > 1 else []
        self._per_rank = self._given.pop("stages_per_rank", 2 if in_a_v(config.parallel) else None)
        parallel = replace(config.parallel, stages_per_rank=self._per_rank or config.parallel.stages_per_rank)
        self._config = replace(config, parallel=parallel)
        self._held: dict[tuple[float, _Candidate], tuple[FsdpPolicy, float] | None] = {}

    def fastest_first(self, machine: Machine, batches: Sequence[int]) -> Iterator[Cost]:
        """Yield the fastest layout that fits, of each choice of degrees, with one of these numbers of sequences per
        step. Ties by simplicity, then by the fewest microbatches, which load the host least."""
        done: set[Degrees] = set()
        for _, equals in groupby(self._in_order(machine, batches, done), key=lambda c: f"{c.tokens_per_second:.3g}"):
            for one in sorted(equals, key=_rank):
                if one.degrees not in done:
                    done.add(one.degrees)
                    yield one

    def refusal(self, machine: Machine, batches: Sequence[int]) -> str | None:
        """Return why there is no layout, whatever memory it may take: the trainer's reason against the simplest
        degrees, or "" if it has none; None if there is a layout."""
        refused: list[str] = []
        found = list(_degrees(machine, self._config, self._plan, self._given, self._lengths, refused))
        if any(any(self._candidates(degrees, batch)) for degrees, batch in product(found, batches)):
            return None
        return refused[0] if refused and not found else ""

    def _in_order(self, machine: Machine, batches: Sequence[int], done: set[Degrees]) -> Iterator[Cost]:
        """Yield layouts that fit, the fastest first. done: degrees to skip, which the caller may extend."""
        queue: list[tuple[float, int, tuple[Degrees, int] | _Candidate | _Fitting | Cost]] = []
        too_large: dict[_Candidate, int] = {}  # the smallest microbatch that does not fit, of layouts that differ in it
        number = count()

        def push(speed: float, what: tuple[Degrees, int] | _Candidate | _Fitting | Cost) -> None:
            heappush(queue, (-speed, next(number), what))

        for degrees in self._degrees(machine):
            for batch in batches:
                if sizes := self._sizes(degrees, batch):
                    one = _Candidate(batch, degrees, Recompute.none, sizes[-1], self._per_rank or 1)
                    bound = self._timed(one, machine)
                    push(bound.tokens / (bound.step - bound.idle), (degrees, batch))
        while queue:
            _, _, one = heappop(queue)
            if isinstance(one, tuple):
                for each in self._candidates(*one) if one[0] not in done else ():
                    push(self._timed(each, machine).tokens_per_second, each)
                continue
            if (one.layout if isinstance(one, _Fitting) else one).degrees in done:
                continue
            if isinstance(one, _Fitting):  # Muon's owners take longest to find: only now
                found = self._timed(one.layout, machine, one.policy, one.memory, self._busiest(one.layout))
                push(found.tokens_per_second, found)
                continue
            if isinstance(one, Cost):
                yield one
                continue
            for recompute in AGAIN[one.recompute]:
                slower = replace(one, recompute=recompute)
                push(self._timed(slower, machine).tokens_per_second, slower)
            kind = replace(one, size=0)
            several = one.size * one.degrees.data < one.batch
            if several and one.size > too_large.get(kind, one.size):
                continue
            if (fits := self._memory(one, machine)) is not None:
                push(self._timed(one, machine, *fits).tokens_per_second, _Fitting(one, *fits))
            elif several:  # larger ones need more; a single one frees activations as it makes gradients
                too_large[kind] = min(one.size, too_large.get(kind, one.size))

    def _degrees(self, machine: Machine) -> Iterator[Degrees]:
        for degrees in _degrees(machine, self._config, self._plan, self._given, self._lengths):
            if _states(self._config, self._plan, degrees) <= SPARE * machine.memory:
                yield degrees

    def _candidates(self, degrees: Degrees, batch: int) -> Iterator[_Candidate]:
        """Yield the layouts without recomputation. Microbatches of a context group are skipped if a smaller group
        computes the same pieces with fewer messages."""
        shares = self._shares(degrees, batch)
        for size in self._sizes(degrees, batch):
            if math.gcd(size, degrees.context) == 1:
                for per_rank in self._stages(degrees, [share // size for share in shares]):
                    yield _Candidate(batch, degrees, Recompute.none, size, per_rank)

    def _shares(self, degrees: Degrees, batch: int) -> list[int]:
        """Return the sequences of a group with the same ones, in each phase; none if these degrees cannot train such a
        batch."""
        batches = self._batches or [batch]
        shares = [each // degrees.data for each in batches]
        fits = all(each % degrees.data == 0 for each in batches) and min(shares) >= degrees.pipeline
        return shares if fits else []

    def _sizes(self, degrees: Degrees, batch: int) -> list[int]:
        """Return the sizes of microbatches."""
        shares = self._shares(degrees, batch)
        return _divisors(math.gcd(*shares), min(shares) // degrees.pipeline) if shares else []

    def _stages(self, degrees: Degrees, microbatches: Sequence[int]) -> Iterator[int]:
        """Yield numbers of stages per rank. microbatches: of each phase."""
        p, blocks, parallel = degrees.pipeline, self._config.model.num_layers, self._config.parallel
        whole = in_a_v(parallel) or all(forms_whole_rounds(m, p) for m in microbatches)
        for v in (self._per_rank,) if self._per_rank else STAGES:
            if v == 1 or (p > 1 and p * v <= blocks + 1 and whole):
                yield v

    def _run(self, one: _Candidate) -> Config:
        trainer = replace(self._config.trainer, microbatch_size=one.size, global_batch_size=one.batch)
        parallel = replace(self._config.parallel, stages_per_rank=one.per_rank)
        return replace(self._config, trainer=trainer, recompute=one.recompute, parallel=parallel)

    def _timed(
        self, one: _Candidate, machine: Machine, policy: FsdpPolicy = FEWEST, memory: float = 0.0, most: float = 1.0
    ) -> Cost:
        return timed(self._run(one), self._plan, one.degrees, machine, policy, memory, most)

    def _memory(self, one: _Candidate, machine: Machine) -> tuple[FsdpPolicy, float] | None:
        """Return the FSDP policy and the bytes; None if the layout does not fit."""
        key = machine.memory, one
        if key not in self._held:
            self._held[key] = None
            run, room = self._run(one), SPARE * machine.memory
            if not exceeds(run, self._plan, one.degrees, room):
                held, policy = forecast(run, self._plan, one.degrees, machine.memory)
                self._held[key] = policy, sum(held.values())
        return self._held[key]

    def _busiest(self, one: _Candidate) -> float:
        return busiest(self._run(one), self._plan, one.degrees)


def _states(config: Config, plan: Plan, d: Degrees) -> float:
    """Return the bytes that every stage needs at least: masters, gradients and one moment in BF16."""
    sizes = (parameters(rows, config=own.model) for own, rows, _ in stage_models(config, plan, d))
    return 10 * max(others / d.cut + experts / (d.expert * d.expert_shard) for others, experts in sizes)


def fewest(config: Config, plan: Plan, machine: Machine) -> int | None:
    """Return the number of GPUs (the machine's, doubled repeatedly) that fill their nodes and that a layout fits into;
    None if 2^11 times are too few."""
    config = replace(config, recompute=Recompute.full)
    for gpus in (machine.gpus << n for n in range(1, 12)):
        if gpus > machine.per_node and gpus % machine.per_node:
            continue
        trainer = replace(config.trainer, microbatch_size=1, global_batch_size=gpus)
        for degrees in _degrees(replace(machine, gpus=gpus), config, plan, {}, [config.trainer.sequence_length]):
            if degrees.replicate == 1 and _states(config, plan, degrees) <= SPARE * machine.memory:
                memory = forecast_memory(replace(config, trainer=trainer), plan, degrees, FsdpPolicy(True, False))
                if sum(memory.values()) <= SPARE * machine.memory:
                    return gpus
    return None


def _rank(c: Cost) -> tuple[float, ...]:
    d, order = c.degrees, list(Recompute)
    layout = d.pipeline, d.context, d.tensor, d.expert, d.replicate, c.stages_per_rank
    return *layout, order.index(c.recompute), c.microbatches, c.memory


def _degrees(
    machine: Machine,
    config: Config,
    plan: Plan,
    given: Mapping[str, int],
    lengths: Sequence[int],
    refused: list[str] | None = None,
) -> Iterator[Degrees]:
    """Yield every combination that can train this config: stages if nothing refuses them, context groups that divide
    both heads and positions, tensor groups within a node. lengths: of sequences, in all phases; refused: gets the
    trainer's reasons against others."""

    def sizes(axis: str, of: int) -> list[int]:
        return [n for n in ([given[axis]] if axis in given else _divisors(of)) if of % n == 0]

    heads, node = config.model.num_heads, min(machine.gpus, machine.per_node)
    for pipeline in sizes("pipeline", machine.gpus):
        stage = machine.gpus // pipeline
        for tensor in sizes("tensor", stage):
            if "tensor" not in given and node % tensor:
                continue
            for context in sizes("context", math.gcd(heads, *lengths, stage // tensor)):
                for replicate in sizes("replicate", stage // (context * tensor)):
                    cut = stage // (replicate * tensor)
                    if given.get("shard", cut // context) != cut // context:
                        continue
                    for expert in sizes("expert", math.gcd(stage, config.model.num_experts)):
                        degrees = Degrees(replicate, cut // context, expert, context, pipeline, tensor)
                        dispatch = config.parallel.dispatch
                        if not (fits_expert(expert, cut * tensor, stage) and machine.carries(dispatch, expert)):
                            continue
                        if (why := _refusal(config, plan, degrees, lengths)) is None:
                            yield degrees
                        elif refused is not None:
                            refused.append(why)


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, (most or number) + 1) if number % n == 0]


def _refusal(config: Config, plan: Plan, degrees: Degrees, lengths: Sequence[int]) -> str | None:
    """Return why the config cannot train with these degrees, apart from its batch size; None if it can."""
    enough = replace(config.trainer, microbatch_size=1, global_batch_size=degrees.stage * degrees.pipeline)
    try:
        for length in lengths:
            check_fsdp_policy(replace(config, trainer=replace(enough, sequence_length=length)), degrees)
        check_fp8_all_gather(config, plan, degrees)
    except UserError as error:
        return str(error)
    return None
