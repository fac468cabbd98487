"""What a step costs with given degrees: bytes that cross the links, seconds for them, and for the arithmetic.

One rank and step, P parameters outside the routed experts, Q in them, B microbatches of T tokens:

    gather     2 P (or 2 (P + Q)) bytes, BF16 (`parallel.fp8_all_gather`: half of it for what computes in FP8), times
               (n - 1) / n of n ranks; twice a microbatch if blocks free their
               weights after the forward pass, once a step if memory allows them to stay
    reduce     4 bytes a parameter, FP32, times (n - 1) / n; once a step, or once a microbatch
    replicas   reduced parts are added up over r replicas: 2 x 4 bytes x (r - 1) / r of a part, once a step
    experts    a token goes once to each of the e ranks that holds any of its K experts: with even routing to
               e (1 - (1 - 1/e)^K) of them, one of e being its own. D numbers a MoE block there and back, forward and
               backward: FP8 or BF16 to the experts, BF16 back
    context    H (2 N + R + 2 V) / c + R numbers of BF16 a token and block to each of c - 1 ranks (q, k, v, o, the
               rotated key once), forward and backward, and forward again where attention is computed again

Gathering and reducing run beside the arithmetic, and slow it down: they need memory, multiprocessors and power, too.
Tokens on their way to experts are waited for, and for longer than their bytes take: the host first reads how many there
are, and rows are picked and added up. Both as measured on two and four H200s (docs/benchmarks.md). A group that fits
into a node uses its links, any other one the network of its node, of which each GPU has its share.

The arithmetic takes FLOPs / rate, what is recomputed on top, and once a step Muon's iteration at the same rate. A first
answer, to be replaced by a measurement: rates and bandwidths are given, see `scripts/bench/`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from models.flops import count_parameters, flops_per_token
from precision import Plan
from trainer.config import Config, Recompute
from trainer.forecast.memory import forecast, forecast_memory, travels_in_fp8
from trainer.forecast.muon import muon_size
from trainer.parallel.mesh import Degrees, FsdpPolicy, fits_expert

SPARE = 0.9  # of a GPU's memory: the rest is the allocator's, the libraries', and what ops need while they run
DRAG = 0.5  # of the shorter one's time is added, where messages and arithmetic run at once
TRAVEL = 2.5  # times what their bytes take is what tokens to experts take
AGAIN = {Recompute.none: 0.0, Recompute.selective: 0.04, Recompute.full: 1 / 3}  # of the blocks' arithmetic


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
    """Tokens on their way to experts, and heads between the ranks of a context group."""
    tokens: int

    @property
    def step(self) -> float:
        """Seconds."""
        return max(self.compute, self.hidden) + DRAG * min(self.compute, self.hidden) + self.waiting

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.step


def cost(config: Config, plan: Plan, degrees: Degrees, machine: Machine) -> Cost:
    """The step of a config, as its `trainer`, `recompute` and `parallel` say, with these degrees."""
    m, t, d = config.model, config.trainer, degrees
    microbatches = max(t.global_batch_size // (t.microbatch_size * d.data), 1)
    tokens = t.microbatch_size * t.sequence_length * microbatches // d.context
    per_token = flops_per_token(m, t.sequence_length)
    head = 6.0 * m.vocab_size * m.hidden_size * (1 + m.num_mtp_layers)
    compute = tokens * (per_token + AGAIN[config.recompute] * (per_token - head)) / machine.flops

    compute += muon_size(config, plan, d).flops / machine.flops

    moe_blocks = m.num_layers - m.num_dense_layers + m.num_mtp_layers
    experts = 3.0 * m.hidden_size * m.moe_intermediate_size * m.num_experts * moe_blocks / d.expert
    others = count_parameters(m).total - experts * d.expert
    held, policy = forecast(config, plan, d, machine.memory)
    gathers = 1 if policy.keep_gathered else 2 * microbatches
    reduces = microbatches if policy.reduce_each_microbatch else 1
    hidden = 0.0
    halved, halved_experts = _in_fp8(config, plan, d)
    for parameters, in_fp8, ranks, stride in (
        (others, halved, d.cut, 1),
        (experts, halved_experts, d.expert_shard, d.expert),
    ):
        sent = gathers * (2 * parameters - in_fp8) + 4 * reduces * parameters
        hidden += machine.seconds((ranks - 1) / ranks * sent, ranks, stride)
    for parameters, ranks, stride in (
        (others / d.cut, d.replicate, d.cut),
        (experts / d.expert_shard, d.expert_replicate, d.expert * d.expert_shard),
    ):
        hidden += machine.seconds(8 * (ranks - 1) / ranks * parameters, ranks, stride)

    travel = next((row.format.bytes for row in plan.tensors.values() if row.op == "moe.dispatch"), 2)
    others_held = (d.expert - 1) * (1 - (1 - 1 / d.expert) ** m.num_experts_per_token)
    sent = 2 * tokens * others_held * m.hidden_size * (travel + 2) * moe_blocks
    waiting = TRAVEL * machine.seconds(sent, d.expert)
    exchanged = (m.num_heads * (m.qk_head_dim + m.qk_nope_head_dim + 2 * m.v_head_dim)) / d.context + m.qk_rope_head_dim
    times = 2 if config.recompute is Recompute.none else 3
    sent = times * 2 * tokens * (d.context - 1) * exchanged * (m.num_layers + m.num_mtp_layers)
    waiting += machine.seconds(sent, d.context)
    memory = sum(held.values())
    return Cost(d, config.recompute, t.microbatch_size, microbatches, memory, compute, hidden, waiting, tokens)


def _in_fp8(config: Config, plan: Plan, d: Degrees) -> tuple[float, float]:
    """Parameters that travel in FP8: outside the routed experts, and in those of a rank."""
    sizes = [0.0, 0.0]
    for row in plan.gemms.values():
        if travels_in_fp8(config.parallel.fp8_all_gather, row, d):
            kept = d.expert if row.op == "moe.experts" else 1
            sizes[row.op == "moe.experts"] += row.in_features * row.out_features * row.groups / kept
    return sizes[0], sizes[1]


def layouts(config: Config, plan: Plan, machine: Machine, sequences: int) -> Iterator[Cost]:
    """Every layout of `sequences` sequences a GPU and step that fits."""
    for degrees in _degrees(machine.gpus, config):
        share = sequences * degrees.context  # of a context group
        for microbatch in (n for n in range(1, share + 1) if share % n == 0):
            for recompute in Recompute:
                trainer = replace(
                    config.trainer, microbatch_size=microbatch, global_batch_size=sequences * machine.gpus
                )
                one = cost(replace(config, trainer=trainer, recompute=recompute), plan, degrees, machine)
                if one.memory <= SPARE * machine.memory:
                    yield one


def fewest(config: Config, plan: Plan, machine: Machine) -> int | None:
    """GPUs, the machine's doubled as often as it takes, that a layout fits into; None if it takes too many to count."""
    config = replace(config, recompute=Recompute.full)
    for gpus in (machine.gpus << n for n in range(1, 12)):
        trainer = replace(config.trainer, microbatch_size=1, global_batch_size=gpus)
        for degrees in _degrees(gpus, config):
            if degrees.replicate == 1:
                memory = forecast_memory(replace(config, trainer=trainer), plan, degrees, FsdpPolicy(True, False))
                if sum(memory.values()) <= SPARE * machine.memory:
                    return gpus
    return None


def ranked(found: Iterable[Cost]) -> list[Cost]:
    """The fastest first; of equals the simplest, then that of the fewest microbatches, which the host has less work
    with."""
    return sorted(found, key=_rank)


def _rank(c: Cost) -> tuple[float, ...]:
    order = list(Recompute)
    layout = c.degrees.context, c.degrees.expert, c.degrees.replicate
    return -round(c.tokens_per_second, -2), *layout, order.index(c.recompute), c.microbatches, c.memory


def _degrees(gpus: int, config: Config) -> Iterator[Degrees]:
    """Every product; context groups where both heads and positions go round."""
    round_ = math.gcd(config.model.num_heads, config.trainer.sequence_length, gpus)
    for context in (n for n in range(1, round_ + 1) if round_ % n == 0):
        for replicate in (n for n in range(1, gpus // context + 1) if gpus // context % n == 0):
            cut = gpus // replicate
            for expert in (n for n in range(1, gpus + 1) if config.model.num_experts % n == 0):
                if fits_expert(expert, cut, gpus):
                    yield Degrees(replicate, cut // context, expert, context)
