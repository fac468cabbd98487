"""What a step costs with given degrees: bytes that cross the links, seconds for them, and for the arithmetic.

One rank and step, P parameters outside the routed experts, Q in them, B microbatches of T tokens:

    gather     2 P (or 2 (P + Q)) bytes, BF16 (`parallel.fp8_all_gather`: half of it for what computes in FP8), times
               (n - 1) / n of n ranks; twice a microbatch if blocks free their
               weights after the forward pass, once a step if memory allows them to stay
    reduce     4 bytes a parameter, FP32, times (n - 1) / n; once a step, or once a microbatch
    replicas   reduced parts are added up over r replicas: 2 x 4 bytes x (r - 1) / r of a part, once a step
    experts    a token goes once to each of the e ranks that holds any of its K experts: with even routing to
               e (1 - (1 - 1/e)^K) of them, one of e being its own (fewer where the router chooses from groups of
               experts: `arriving`). D numbers a MoE block there and back, forward and backward: FP8 or BF16 to the
               experts, BF16 back
    stages     D numbers of the residual stream (with MTP 2 D) a token to the next stage, and as many back, for each
               stage of a rank
    context    H (2 N + R + 2 V) / c + R numbers of BF16 a token and block to each of c - 1 ranks (q, k, v, o, the
               rotated key once), forward and backward, and forward again where attention is computed again
    tensor     latents (or x) there in BF16, o's sums back, of a token and block to each of t - 1 ranks; backward the
               gradients of latents in FP32. o's are waited for, the others run beside GEMMs

Gathering and reducing run beside the arithmetic, and slow it down: they need memory, multiprocessors and power, too.
Tokens on their way to experts are waited for, and for longer than their bytes take: the host first reads how many there
are, and rows are picked and added up. Both as measured on two and four H200s (docs/benchmarks.md). A group that fits
into a node uses its links, any other one the network of its node, of which each GPU has its share. In an expert group
on several nodes, tokens to ranks of the same node take its links meanwhile; what is waited for beyond the bytes costs
what it does in a node.

With p stages a rank has 1 / p of the arithmetic and of the waiting, on average; what its stage gathers and reduces are
those of the stage that has most of it. Messages between stages are waited for. On top comes the time in which it waits
for other stages, whose share of the step is `stages.idle_share`.

The arithmetic takes FLOPs / rate, what is recomputed on top, and once a step Muon's iteration at the same rate; where
ranks share a model, no less than the host needs to launch a block's kernels for each microbatch. A first
answer, to be replaced by a measurement: rates and bandwidths are given, see `scripts/bench/`.
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

SPARE = 0.9  # of a GPU's memory: the rest is the allocator's, the libraries', and what ops need while they run
DRAG = 0.5  # of the shorter one's time is added, where messages and arithmetic run at once
NEAR = 0.9  # of the fastest layout's speed: what cannot come so near is not looked at further
TRAVEL = 2.5  # times what their bytes take is what tokens to experts take
HOST = 0.0185  # seconds of Python a block and microbatch, both ways: 2.0 s for 27 blocks and 4 (docs/benchmarks.md)
AGAIN = {Recompute.none: 0.0, Recompute.selective: 0.04, Recompute.full: 1 / 3}  # of the blocks' arithmetic


NODE_LINK, NETWORK, PER_NODE = 350e9, 45e9, 8
"""Bytes a second of one H200 in either direction, within a node and between nodes; GPUs of a node."""
RATES = {False: 469.0, True: 611.0}
"""TFLOP/s of one H200 in a training step, in BF16 and FP8 (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Machine:
    """gpus: in all; per_node: in a node; memory: bytes of one GPU; flops: a second, in a training step, of one GPU;
    node_link, network: bytes a second of one GPU in either direction, within a node and between nodes."""

    gpus: int
    per_node: int
    memory: float
    flops: float
    node_link: float
    network: float

    def seconds(self, sent: float, ranks: int, stride: int = 1) -> float:
        """Time to send so many bytes in a group of `ranks` ranks that are `stride` apart."""
        inside = min(self.gpus, self.per_node) % (ranks * stride) == 0  # else some groups have ranks on two nodes
        return sent / (self.node_link if inside else self.network)

    def dispatch_seconds(self, sent: float, ranks: int) -> float:
        """Time that an expert group waits, where each rank sends so many bytes to each other one of the group."""
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
    """Gathering and reducing, which run beside the arithmetic."""
    waiting: float
    """Tokens on their way to experts, heads between the ranks of a context group, and streams between stages."""
    tokens: float
    """A GPU's share of the step's."""
    bubble: float
    """Waiting for other stages, as a share of what a rank does in a step and this."""
    stages_per_rank: int = 1

    @property
    def step(self) -> float:
        """Seconds."""
        return self.compute + self.waiting + self.idle + self._beyond

    @property
    def idle(self) -> float:
        """Seconds of it in which ranks wait for other stages."""
        return (self.compute + self.waiting) * self.bubble / (1 - self.bubble)

    @property
    def exposed(self) -> float:
        """Share of a step that messages take beyond the arithmetic."""
        return (self._beyond + self.waiting) / self.step

    @property
    def _beyond(self) -> float:
        return max(self.hidden - self.compute, 0.0) + DRAG * min(self.compute, self.hidden)

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.step


def cost(config: Config, plan: Plan, degrees: Degrees, machine: Machine) -> Cost:
    """The step of a config, as its `trainer`, `recompute` and `parallel` say, with these degrees."""
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
    """Seconds for which a rank of a stage gathers and reduces what others have parts of. config, plan: the stage's."""
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
    """Parameters that travel in FP8: outside the routed experts, and in those of a rank."""
    sizes = [0.0, 0.0]
    for row in plan.gemms.values():
        if travels_in_fp8(choice, row, d):
            kept = d.expert if row.op == "moe.experts" else 1
            sizes[row.op == "moe.experts"] += row.in_features * row.out_features * row.groups / kept
    return sizes[0], sizes[1]


def layouts(
    config: Config, plan: Plan, machine: Machine, sequences: int, given: Mapping[str, int] | None = None
) -> Iterator[Cost]:
    """Layouts of `sequences` sequences a GPU and step that fit, with the sizes of axes (and stages a rank) that are
    `given`; tensor groups only so. Of a context group's microbatches those that no smaller group computes the same
    pieces of, with fewer messages. Several stages a rank where that may come near the fastest so far."""
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
    """A layout with 1, 2 and 4 stages a rank, or as many as `given`, as long as it fits."""
    p, m = degrees.pipeline, microbatches_of(config, degrees)
    for v in (given,) if given else (1, 2, 4):
        if v > 1 and (p == 1 or p * v > config.model.num_layers + 1 or not goes_round(m, p)):
            return
        one = cost(replace(config, parallel=replace(config.parallel, stages_per_rank=v)), plan, degrees, machine)
        if one.memory > SPARE * machine.memory:
            return
        yield one


def _states(config: Config, plan: Plan, d: Degrees) -> float:
    """Bytes that no stage can do without: masters, gradients and one moment in BF16."""
    sizes = (parameters(rows, config=own.model) for own, rows, _ in stage_models(config, plan, d))
    return 10 * max(others / d.cut + experts / (d.expert * d.expert_shard) for others, experts in sizes)


def fewest(config: Config, plan: Plan, machine: Machine) -> int | None:
    """GPUs, the machine's doubled as often as it takes, that a layout fits into; None if it takes too many to count."""
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
    """The fastest first; of equals the simplest, then that of the fewest microbatches, which the host has less work
    with."""
    return sorted(found, key=_rank)


def _rank(c: Cost) -> tuple[float, ...]:
    d, order = c.degrees, list(Recompute)
    layout = d.pipeline, d.context, d.tensor, d.expert, d.replicate, c.stages_per_rank
    return -float(f"{c.tokens_per_second:.3g}"), *layout, order.index(c.recompute), c.microbatches, c.memory


def _degrees(gpus: int, config: Config, tensor: int = 1) -> Iterator[Degrees]:
    """Every product with so large tensor groups that this config can be trained by: stages where nothing refuses them,
    context groups where both heads and positions go round."""
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
    """Whether nothing but the size of the batch stands against these degrees."""
    if degrees.context > 1 and config.optim.name is OptimizerName.muon:
        return False
    enough = replace(config.trainer, microbatch_size=1, global_batch_size=degrees.stage * degrees.pipeline)
    try:
        check_tensor(config, degrees)
        check_stages(replace(config, trainer=enough), degrees)
    except UserError:
        return False
    return True
