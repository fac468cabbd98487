"""The cost of a step with given degrees: bytes that cross the links, seconds for them, and for the arithmetic.

For one rank and step, P parameters outside the routed experts, Q in them, B microbatches of T tokens:

    gather     2 P (or 2 (P + Q)) bytes, BF16 (`parallel.fp8_all_gather`: half of it for FP8 weights), times (n - 1) / n
               of n ranks; twice a microbatch if blocks free their weights after the forward pass, once a step if memory
               allows them to stay
    reduce     4 bytes a parameter, FP32, times (n - 1) / n; once a step, or once a microbatch
    replicas   reduced parts are added up over r replicas: 2 x 4 bytes x (r - 1) / r of a part, once a step
    whole      weights that a tensor group of t does not split: 2 x 4 bytes x (t - 1) / t of a part, once a step
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
rows are picked and added up. Both factors were measured on two and four H200s (docs/benchmarks.md). With
`parallel.dispatch=symmetric` the host reads nothing: the factor is that of one layer on two H100s, without the overlap
with shared experts. A group that fits into a node uses the node's links. Any other group uses the node's network,
shared by its GPUs. In an expert group on several nodes, tokens to ranks of the same node use its links meanwhile; with
`parallel.dispatch=two_hops` one row goes to each node, then rows to its ranks. The wait beyond the bytes costs the same
as in a node.

With p stages a rank has 1 / p of the arithmetic and of the waiting, on average. It gathers and reduces as much as the
stage that has most. Ranks wait for messages between stages, and for other stages (`stages.idle_share` of the step).

The arithmetic takes FLOPs / rate, plus recomputation, plus Muon's iteration once a step at the same rate. It takes at
least the host's time to launch a block's kernels for each microbatch; one process, which records them in a CUDA graph,
needs a fixed time a step and the kernels' own least time. Rates and bandwidths are given. The result is a first
estimate, to be replaced by a measurement (`scripts/bench/`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from models.flops import arriving, flops_per_token
from precision import Plan
from trainer.config import Config, Dispatch, Recompute, Switch
from trainer.forecast.expert_messages import PER_NODE, dispatch_of
from trainer.forecast.memory import forecast, is_gathered_in_fp8, parameters
from trainer.forecast.muon import busiest, muon_size
from trainer.forecast.plan_cache import cached_per_plan
from trainer.forecast.stages import blocks_of_stages, idle_share, stage_models
from trainer.forecast.tensor import cut_parameters, parts, tensor_bytes
from trainer.parallel.mesh import Degrees, FsdpPolicy

SPARE = 0.9  # usable share of a GPU's memory: the rest is for the allocator, libraries and temporaries of ops
DRAG = 0.5  # share of the shorter time that is added where messages and arithmetic overlap
TRAVEL = 2.5  # time for tokens to experts over the time for their bytes
SYMMETRIC = 1.2  # as TRAVEL, with parallel.dispatch=symmetric: 1.1 (FP8), 1.2 (BF16) of a layer (docs/benchmarks.md)
HOST = 0.0185  # seconds of Python a block and microbatch, both passes: 2.0 s for 27 blocks and 4 (docs/benchmarks.md)
ALONE = 0.009  # as HOST, of one process without CUDA graphs (docs/benchmarks.md: small models)
STEP, GRAPHED = 0.0045, 0.0004  # seconds a step, and a block and microbatch, with them (the same)
AGAIN = {
    Recompute.none: 0.0,
    Recompute.selective: 0.04,
    Recompute.full: 1 / 3,
}  # recomputed share of the blocks' arithmetic


NODE_LINK, NETWORK = 350e9, 45e9
"""Bytes a second of one H200 in each direction within a node and between nodes."""
PCIE = 64e9
"""Bytes a second in each direction of PCIe 5.0 with 16 lanes: links that are no faster do not share memory."""
RATES = {False: 469.0, True: 611.0}
"""TFLOP/s of one H200 in a training step, in BF16 and FP8 (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Machine:
    """gpus: total number; per_node: in a node; memory: bytes of one GPU; flops: per second and GPU in a training step;
    node_link, network: bytes a second of one GPU in each direction, within a node and between nodes. Nodes and links
    are those of H200s by default."""

    gpus: int
    per_node: int = PER_NODE
    memory: float = 0.0
    flops: float = 1.0
    node_link: float = NODE_LINK
    network: float = NETWORK

    def seconds(self, sent: float, ranks: int, stride: int = 1) -> float:
        """Return the time to send `sent` bytes in a group of `ranks` ranks that are `stride` apart."""
        inside = min(self.gpus, self.per_node) % (ranks * stride) == 0  # else some groups have ranks on two nodes
        return sent / (self.node_link if inside else self.network)

    def dispatch_seconds(self, sent: float, ranks: int, travel: float = TRAVEL) -> float:
        """Return the time that an expert group waits if each rank sends `sent` bytes to each other rank of it. travel:
        this time within a node over that for the bytes."""
        near = ranks // self.nodes(ranks)
        within, between = (near - 1) * sent / self.node_link, (ranks - near) * sent / self.network
        return max(within, between) + (travel - 1) * (ranks - 1) * sent / self.node_link

    def two_hops_seconds(self, to_node: float, to_rank: float, ranks: int) -> float:
        """Return the same in two hops, of bytes from each rank to each node, and for each rank."""
        nodes = self.nodes(ranks)
        between, within = (nodes - 1) * to_node, (ranks - nodes) * to_rank
        return between / self.network + within / self.node_link + (TRAVEL - 1) * (between + within) / self.node_link

    def nodes(self, ranks: int) -> int:
        """Return over how many nodes a group of neighbouring ranks is spread."""
        return ranks // math.gcd(ranks, min(self.gpus, self.per_node))

    def carries(self, dispatch: Dispatch, ranks: int) -> bool:
        """Return whether tokens can travel like this in groups of `ranks` experts' ranks; a run refuses the others."""
        nodes, node = self.nodes(ranks), min(self.gpus, self.per_node)
        if dispatch is Dispatch.two_hops:
            return ranks == 1 or (nodes > 1 and nodes * node == ranks)
        return dispatch is not Dispatch.symmetric or ranks == 1 or (nodes == 1 and self.node_link > PCIE)


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
    held, policy = forecast(config, plan, degrees, machine.memory)
    return timed(config, plan, degrees, machine, policy, sum(held.values()), busiest(config, plan, degrees))


def timed(
    config: Config,
    plan: Plan,
    degrees: Degrees,
    machine: Machine,
    policy: FsdpPolicy,
    memory: float = 0.0,
    busiest: float = 1.0,
) -> Cost:
    """Return `cost` for an FSDP policy, its memory, and the load of Muon's busiest rank over the mean."""
    t, d = config.trainer, degrees
    microbatches = max(t.global_batch_size // (t.microbatch_size * d.data), 1)
    passed = t.microbatch_size * t.sequence_length * microbatches // d.sequence  # tokens through a rank's stage
    tokens = passed / d.pipeline
    counts = tuple(blocks_of_stages(config, plan, d.pipeline))
    stages = _of_stages(plan, d, config.parallel.fp8_all_gather, counts, config=config)
    hidden = max(_shared(numbers, d, machine, policy, microbatches) for numbers in stages)
    forwards = 1 if config.recompute is Recompute.none else 2
    beside, waited = (machine.seconds(tokens * sent, d.tensor) for sent in tensor_bytes(plan, d, forwards))
    return Cost(
        degrees=d,
        recompute=config.recompute,
        microbatch=t.microbatch_size,
        microbatches=microbatches,
        memory=memory,
        compute=_compute(config, plan, d, machine, tokens, microbatches)
        + muon_size(config, plan, d).flops * busiest / machine.flops,
        hidden=hidden + beside,
        waiting=_experts(config, plan, d, machine, tokens)
        + _context(config, d, machine, tokens, forwards)
        + waited
        + _between_stages(config, plan, d, machine, passed),
        tokens=tokens,
        bubble=idle_share(config, plan, d),
        stages_per_rank=config.parallel.stages_per_rank if d.pipeline > 1 else 1,
    )


def _compute(config: Config, plan: Plan, d: Degrees, machine: Machine, tokens: float, microbatches: int) -> float:
    """Return the seconds of the arithmetic of a rank's share of the tokens, or of its launches if these take longer."""
    m = config.model
    per_token = flops_per_token(m, config.trainer.sequence_length)
    head = 6.0 * m.vocab_size * m.hidden_size * (1 + m.num_mtp_layers)
    passes = microbatches * (m.num_layers + m.num_mtp_layers) / d.pipeline  # of blocks
    if d.world > 1:
        launched = HOST * passes
    else:
        launched = ALONE * passes if config.cuda_graph is Switch.false else STEP + GRAPHED * passes
    return max(tokens * (per_token + AGAIN[config.recompute] * (per_token - head)) / machine.flops, launched)


def _experts(config: Config, plan: Plan, d: Degrees, machine: Machine, tokens: float) -> float:
    """Return the seconds in which a rank waits for tokens on their way to experts."""
    m = config.model
    width = next((row.format.bytes for row in plan.tensors.values() if row.op == "moe.dispatch"), 2)
    row = 2 * tokens * m.hidden_size * (width + 2) * m.num_moe_blocks
    to_each = row * arriving(m, d.expert) / d.expert
    dispatch = dispatch_of(config, d, machine.per_node if machine.carries(Dispatch.symmetric, d.expert) else 1)
    if dispatch is Dispatch.two_hops:
        nodes = machine.nodes(d.expert)
        return machine.two_hops_seconds(row * arriving(m, nodes) / nodes, to_each, d.expert)
    return machine.dispatch_seconds(to_each, d.expert, SYMMETRIC if dispatch is Dispatch.symmetric else TRAVEL)


def _context(config: Config, d: Degrees, machine: Machine, tokens: float, forwards: int) -> float:
    """Return the seconds in which a rank waits for the heads of its context group."""
    m = config.model
    exchanged = (m.num_heads * (m.qk_head_dim + m.qk_nope_head_dim + 2 * m.v_head_dim)) / d.context + m.qk_rope_head_dim
    sent = (forwards + 1) * 2 * tokens * (d.context - 1) * exchanged * (m.num_layers + m.num_mtp_layers)
    return machine.seconds(sent, d.context, d.tensor)


def _between_stages(config: Config, plan: Plan, d: Degrees, machine: Machine, passed: float) -> float:
    """Return the seconds in which a rank waits for messages from other stages. passed: tokens through its own."""
    if d.pipeline == 1:
        return 0.0
    m = config.model
    streams = (2 if m.num_mtp_layers else 1) * config.parallel.stages_per_rank
    sent = 2 * passed * streams * m.hidden_size * plan.tensors["residual"].format.bytes
    return machine.seconds(sent, d.pipeline, d.stage)


class _Shared(NamedTuple):
    """Numbers of parameters of a rank's stages, all and those gathered in FP8: outside the routed experts, and in
    them. whole: those of `others` that a tensor group does not split."""

    others: float
    experts: float
    halved: float
    halved_experts: float
    whole: float


def _shared(numbers: _Shared, d: Degrees, machine: Machine, policy: FsdpPolicy, microbatches: int) -> float:
    """Return the seconds in which a rank of a stage gathers and reduces sharded weights."""
    others, experts, halved, halved_experts, whole = numbers
    gathers = 1 if policy.keep_gathered else 2 * microbatches
    reduces = microbatches if policy.reduce_each_microbatch else 1
    # without expert parallelism experts' weights are cut and replicated as all others: see `mesh.build_mesh`
    apart, replicas = (d.tensor, d.replicate) if d.expert == 1 else (d.expert, d.expert_replicate)
    seconds = 0.0
    for number, in_fp8, ranks, stride in (
        (others, halved, d.cut, d.tensor),
        (experts, halved_experts, d.expert_shard, apart),
    ):
        sent = gathers * (2 * number - in_fp8) + 4 * reduces * number
        seconds += machine.seconds((ranks - 1) / ranks * sent, ranks, stride)
    for number, ranks, stride in (
        (others / d.cut, d.replicate, d.cut * d.tensor),
        (experts / d.expert_shard, replicas, apart * d.expert_shard),
        ((whole + (experts if d.expert == 1 else 0.0)) / d.cut, d.tensor, 1),
    ):
        seconds += machine.seconds(8 * (ranks - 1) / ranks * number, ranks, stride)
    return seconds


@cached_per_plan
def _of_stages(plan: Plan, d: Degrees, choice: Switch, counts: tuple[int, ...], config: Config) -> list[_Shared]:
    """Return the numbers of each kind of rank: ranks differ by their stages. counts: blocks of each stage."""
    found = []
    for own, rows, _ in stage_models(config, plan, d):
        others, experts = parameters(rows, config=own.model)
        split = cut_parameters(rows, own.model) if d.tensor > 1 else 0.0
        whole = others - split
        found.append(_Shared(whole + split / d.tensor, experts / d.expert, *_in_fp8(rows, d, choice), whole))
    return found


def _in_fp8(plan: Plan, d: Degrees, choice: Switch) -> tuple[float, float]:
    """Return the number of parameters gathered in FP8: outside the routed experts, and in those of a rank."""
    sizes = [0.0, 0.0]
    for row in plan.gemms.values() if d.pipeline == 1 else ():  # with stages none does
        if is_gathered_in_fp8(choice, row, d):
            sizes[row.op == "moe.experts"] += row.num_weights / parts(row, d)
    return sizes[0], sizes[1]
