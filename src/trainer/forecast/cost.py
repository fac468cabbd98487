"""The cost of a step with given degrees: bytes that cross the links, seconds for them, and for the arithmetic.

For one rank and step, P parameters outside the routed experts, Q in them, B microbatches of T tokens:

    gather     2 P (or 2 (P + Q)) bytes, BF16 (`parallel.fp8_all_gather`: half of it for FP8 weights), times (n - 1) / n
               of n ranks; twice a microbatch if blocks free their weights after the forward pass, once a step if memory
               allows them to stay
    reduce     4 bytes a parameter, FP32, times (n - 1) / n; once a step, or once a microbatch
    replicas   reduced parts are added up over r replicas: 2 x 4 bytes x (r - 1) / r of a part, once a step
    experts    a token goes once to each of the e ranks that holds any of its K experts: with even routing to
               e (1 - (1 - 1/e)^K) of them, one of e being its own (fewer where the router chooses from groups of
               experts: `arriving`). D numbers a MoE block there and back, forward and backward: FP8 or BF16 to the
               experts, BF16 back
    stages     D numbers of the residual stream (with MTP 2 D) a token to the next stage, and as many back, for each
               stage of a rank
    context    H (2 N + R + 2 V) / c + R numbers of BF16 a token and block to each of c - 1 ranks (q, k, v, o, the
               rotated key once), forward and backward, and forward again where attention is recomputed
    tensor     latents (or x) in BF16, and the sums of o in return, of a token and block to each of t - 1 ranks;
               backward the gradients of latents in FP32. Ranks wait for o; the rest overlaps with GEMMs

Gathering and reducing overlap with the arithmetic and slow it down: they also need memory, multiprocessors and power.
Ranks wait for tokens on their way to experts, and longer than the bytes take: the host first reads their number, and
rows are picked and added up. Both factors were measured on two and four H200s (docs/benchmarks.md). A group that fits
into a node uses the node's links. Any other group uses the node's network, shared by its GPUs. In an expert group on
several nodes, tokens to ranks of the same node use its links meanwhile; the wait beyond the bytes costs the same as in
a node.

With p stages a rank has 1 / p of the arithmetic and of the waiting, on average. It gathers and reduces as much as the
stage that has most. Ranks wait for messages between stages, and for other stages (`stages.idle_share` of the step).

The arithmetic takes FLOPs / rate, plus recomputation, plus Muon's iteration once a step at the same rate. If ranks
share a model, it takes at least the host's time to launch a block's kernels for each microbatch. Rates and bandwidths
are given. The result is a first estimate, to be replaced by a measurement (`scripts/bench/`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from models.flops import arriving, flops_per_token
from precision import Plan
from precision.errors import UserError
from trainer.config import Config, OptimizerName, Recompute, Switch
from trainer.forecast.memory import forecast, forecast_memory, parameters, travels_in_fp8
from trainer.forecast.muon import muon_size
from trainer.forecast.once import once
from trainer.forecast.stages import check_stages, goes_round, idle_share, microbatches_of, stage_models
from trainer.forecast.tensor import check_tensor, tensor_bytes
from trainer.parallel.mesh import Degrees, FsdpPolicy, fits_expert

SPARE = 0.9  # usable share of a GPU's memory: the rest is for the allocator, libraries and temporaries of ops
DRAG = 0.5  # share of the shorter time that is added where messages and arithmetic overlap
NEAR = 0.9  # of the fastest layout's speed: layouts that cannot reach it are not examined further
TRAVEL = 2.5  # time for tokens to experts over the time for their bytes
HOST = 0.0185  # seconds of Python a block and microbatch, both passes: 2.0 s for 27 blocks and 4 (docs/benchmarks.md)
AGAIN = {
    Recompute.none: 0.0,
    Recompute.selective: 0.04,
    Recompute.full: 1 / 3,
}  # recomputed share of the blocks' arithmetic


NODE_LINK, NETWORK, PER_NODE = 350e9, 45e9, 8
"""Bytes a second of one H200 in each direction within a node and between nodes; GPUs of a node."""
RATES = {False: 469.0, True: 611.0}
"""TFLOP/s of one H200 in a training step, in BF16 and FP8 (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Machine:
    """gpus: total number; per_node: in a node; memory: bytes of one GPU; flops: per second and GPU in a training step;
    node_link, network: bytes a second of one GPU in each direction, within a node and between nodes."""

    gpus: int
    per_node: int
    memory: float
    flops: float
    node_link: float
    network: float

    def seconds(self, sent: float, ranks: int, stride: int = 1) -> float:
        """Return the time to send `sent` bytes in a group of `ranks` ranks that are `stride` apart."""
        inside = min(self.gpus, self.per_node) % (ranks * stride) == 0  # else some groups have ranks on two nodes
        return sent / (self.node_link if inside else self.network)

    def dispatch_seconds(self, sent: float, ranks: int) -> float:
        """Return the time that an expert group waits if each rank sends `sent` bytes to each other rank of it."""
        near = math.gcd(ranks, min(self.gpus, self.per_node))  # ranks of a group that are in one node
        within, between = (near - 1) * sent / self.node_link, (ranks - near) * sent / self.network
        return max(within, between) + (TRAVEL - 1) * (ranks - 1) * sent / self.node_link


@dataclass(frozen=True)
class Cost:
    """A layout and its step, in seconds and bytes of one rank."""

    degrees: Degrees
    recompute: Recompute
    microbatch: int
    microbatches: int
    memory: float
    compute: float
    hidden: float
    """Gathering and reducing, which overlap with the arithmetic."""
    waiting: float
    """Waiting for tokens on their way to experts, heads of a context group, and streams between stages."""
    tokens: float
    """Tokens of a step per GPU."""
    bubble: float
    """Waiting for other stages, as a share of a rank's total time."""
    stages_per_rank: int = 1

    @property
    def step(self) -> float:
        """Duration of the step in seconds."""
        return self.compute + self.waiting + self.idle + self._beyond

    @property
    def idle(self) -> float:
        """Seconds of the step in which ranks wait for other stages."""
        return (self.compute + self.waiting) * self.bubble / (1 - self.bubble)

    @property
    def exposed(self) -> float:
        """Share of the step's time that is communication beyond the arithmetic."""
        return (self._beyond + self.waiting) / self.step

    @property
    def _beyond(self) -> float:
        return max(self.hidden - self.compute, 0.0) + DRAG * min(self.compute, self.hidden)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens / self.step


def cost(config: Config, plan: Plan, degrees: Degrees, machine: Machine) -> Cost:
    """Return the cost of a config's step with these degrees, from its `trainer`, `recompute` and `parallel`."""
    m, t, d = config.model, config.trainer, degrees
    microbatches = max(t.global_batch_size // (t.microbatch_size * d.data), 1)
    passed = t.microbatch_size * t.sequence_length * microbatches // d.sequence  # tokens through a rank's stage
    tokens = passed / d.pipeline
    per_token = flops_per_token(m, t.sequence_length)
    head = 6.0 * m.vocab_size * m.hidden_size * (1 + m.num_mtp_layers)
    compute = tokens * (per_token + AGAIN[config.recompute] * (per_token - head)) / machine.flops
    if d.world > 1:
        compute = max(compute, HOST * microbatches * (m.num_layers + m.num_mtp_layers) / d.pipeline)
    compute += muon_size(config, plan, d).flops / machine.flops

    held, policy = forecast(config, plan, d, machine.memory)
    hidden = max(_shared(own, rows, d, machine, policy, microbatches) for own, rows, _ in stage_models(config, plan, d))
    travel = next((row.format.bytes for row in plan.tensors.values() if row.op == "moe.dispatch"), 2)
    to_each = arriving(m, d.expert) / d.expert
    waiting = machine.dispatch_seconds(2 * tokens * to_each * m.hidden_size * (travel + 2) * m.num_moe_blocks, d.expert)
    exchanged = (m.num_heads * (m.qk_head_dim + m.qk_nope_head_dim + 2 * m.v_head_dim)) / d.context + m.qk_rope_head_dim
    times = 2 if config.recompute is Recompute.none else 3
    sent = times * 2 * tokens * (d.context - 1) * exchanged * (m.num_layers + m.num_mtp_layers)
    waiting += machine.seconds(sent, d.context, d.tensor)
    beside, waited = (machine.seconds(tokens * sent, d.tensor) for sent in tensor_bytes(plan, d, times - 1))
    hidden, waiting = hidden + beside, waiting + waited
    if d.pipeline > 1:
        streams = (2 if m.num_mtp_layers else 1) * config.parallel.stages_per_rank
        sent = 2 * passed * streams * m.hidden_size * plan.tensors["residual"].format.bytes
        waiting += machine.seconds(sent, d.pipeline, d.stage)
    bubble = idle_share(config, plan, d)
    return Cost(
        d,
        config.recompute,
        t.microbatch_size,
        microbatches,
        sum(held.values()),
        compute,
        hidden,
        waiting,
        tokens,
        bubble,
        config.parallel.stages_per_rank if d.pipeline > 1 else 1,
    )


def _shared(config: Config, plan: Plan, d: Degrees, machine: Machine, policy: FsdpPolicy, microbatches: int) -> float:
    """Return the seconds in which a rank of a stage gathers and reduces sharded weights. config, plan: of the stage."""
    others, experts = parameters(plan, config=config.model)
    experts /= d.expert
    gathers = 1 if policy.keep_gathered else 2 * microbatches
    reduces = microbatches if policy.reduce_each_microbatch else 1
    halved, halved_experts = _in_fp8(plan, d, config.parallel.fp8_all_gather)
    seconds = 0.0
    for number, in_fp8, ranks, stride in (
        (others, halved, d.cut, 1),
        (experts, halved_experts, d.expert_shard, d.expert),
    ):
        sent = gathers * (2 * number - in_fp8) + 4 * reduces * number
        seconds += machine.seconds((ranks - 1) / ranks * sent, ranks, stride)
    for number, ranks, stride in (
        (others / d.cut, d.replicate, d.cut),
        (experts / d.expert_shard, d.expert_replicate, d.expert * d.expert_shard),
    ):
        seconds += machine.seconds(8 * (ranks - 1) / ranks * number, ranks, stride)
    return seconds


@once
def _in_fp8(plan: Plan, d: Degrees, choice: Switch) -> tuple[float, float]:
    """Return the number of parameters gathered in FP8: outside the routed experts, and in those of a rank."""
    sizes = [0.0, 0.0]
    for row in plan.gemms.values():
        if travels_in_fp8(choice, row, d):
            kept = d.expert if row.op == "moe.experts" else 1
            sizes[row.op == "moe.experts"] += row.in_features * row.out_features * row.groups / kept
    return sizes[0], sizes[1]


def layouts(
    config: Config, plan: Plan, machine: Machine, sequences: int, given: Mapping[str, int] | None = None
) -> Iterator[Cost]:
    """Yield layouts of `sequences` sequences per GPU and step that fit. `given` fixes sizes of axes and stages a rank;
    only it brings tensor groups. Microbatches of a context group are skipped if a smaller group computes the same
    pieces with fewer messages. Several stages a rank are tried if they may come near the fastest layout so far."""
    t, given = replace(config.trainer, global_batch_size=sequences * machine.gpus), dict(given or {})
    per_rank, fastest = given.pop("stages_per_rank", None), 0.0
    for degrees in _degrees(machine.gpus, config, given.pop("tensor", 1)):
        if any(getattr(degrees, axis) != size for axis, size in given.items()):
            continue
        share = t.global_batch_size // degrees.data  # of a context group
        if _states(config, plan, degrees) > SPARE * machine.memory:
            continue
        sizes = [n for n in range(1, share // degrees.pipeline + 1) if share % n == 0]
        for recompute in Recompute:
            for size in sizes:
                if math.gcd(size, degrees.context) > 1:
                    continue
                run = replace(config, trainer=replace(t, microbatch_size=size), recompute=recompute)
                found = _with_stages(run, plan, degrees, machine, per_rank)
                one = next(found, None)
                if one is None and degrees.pipeline > 1:
                    break  # larger ones need more
                while one is not None:
                    yield one
                    fastest = max(fastest, one.tokens_per_second)
                    near = one.tokens / (one.step - one.idle) >= NEAR * fastest
                    one = next(found, None) if near else None


def _with_stages(config: Config, plan: Plan, degrees: Degrees, machine: Machine, given: int | None) -> Iterator[Cost]:
    """Yield a layout with 1, 2 and 4 stages a rank, or `given` stages, as long as it fits."""
    p, m = degrees.pipeline, microbatches_of(config, degrees)
    for v in (given,) if given else (1, 2, 4):
        if v > 1 and (p == 1 or p * v > config.model.num_layers + 1 or not goes_round(m, p)):
            return
        one = cost(replace(config, parallel=replace(config.parallel, stages_per_rank=v)), plan, degrees, machine)
        if one.memory > SPARE * machine.memory:
            return
        yield one


def _states(config: Config, plan: Plan, d: Degrees) -> float:
    """Return the bytes that every stage needs at least: masters, gradients and one moment in BF16."""
    sizes = (parameters(rows, config=own.model) for own, rows, _ in stage_models(config, plan, d))
    return 10 * max(others / d.cut + experts / (d.expert * d.expert_shard) for others, experts in sizes)


def fewest(config: Config, plan: Plan, machine: Machine) -> int | None:
    """Return the number of GPUs, the machine's doubled repeatedly, that a layout fits into; None if 2^11 times do not
    do."""
    config = replace(config, recompute=Recompute.full)
    for gpus in (machine.gpus << n for n in range(1, 12)):
        trainer = replace(config.trainer, microbatch_size=1, global_batch_size=gpus)
        for degrees in _degrees(gpus, config):
            if degrees.replicate == 1 and _states(config, plan, degrees) <= SPARE * machine.memory:
                memory = forecast_memory(replace(config, trainer=trainer), plan, degrees, FsdpPolicy(True, False))
                if sum(memory.values()) <= SPARE * machine.memory:
                    return gpus
    return None


def ranked(found: Iterable[Cost]) -> list[Cost]:
    """Sort the fastest first; ties by simplicity, then by the fewest microbatches, which load the host least."""
    return sorted(found, key=_rank)


def _rank(c: Cost) -> tuple[float, ...]:
    d, order = c.degrees, list(Recompute)
    layout = d.pipeline, d.context, d.tensor, d.expert, d.replicate, c.stages_per_rank
    return -float(f"{c.tokens_per_second:.3g}"), *layout, order.index(c.recompute), c.microbatches, c.memory


def _degrees(gpus: int, config: Config, tensor: int = 1) -> Iterator[Degrees]:
    """Yield every combination with tensor groups of this size that can train this config: stages if nothing refuses
    them, context groups that divide both heads and positions."""
    for pipeline in _divisors(gpus):
        stage = gpus // pipeline
        if stage % tensor:
            continue
        for context in _divisors(math.gcd(config.model.num_heads, config.trainer.sequence_length, stage // tensor)):
            for replicate in _divisors(stage // (context * tensor)):
                cut = stage // (replicate * tensor)
                for expert in _divisors(math.gcd(stage, config.model.num_experts)):
                    degrees = Degrees(replicate, cut // context, expert, context, pipeline, tensor)
                    if fits_expert(expert, cut * tensor, stage) and _trains(config, degrees):
                        yield degrees


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _trains(config: Config, degrees: Degrees) -> bool:
    """Return whether the config can train with these degrees, apart from its batch size."""
    if degrees.context > 1 and config.optim.name is OptimizerName.muon:
        return False
    enough = replace(config.trainer, microbatch_size=1, global_batch_size=degrees.stage * degrees.pipeline)
    try:
        check_tensor(config, degrees)
        check_stages(replace(config, trainer=enough), degrees)
    except UserError:
        return False
    return True
