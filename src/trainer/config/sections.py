"""The dataclasses of a config: name, type and meaning of each key, one docstring line under each field.

They hold no values: those are in `configs/*.yaml`, so that there is one place to read and change them. The sections
`model` and `precision` belong to the packages that use them. Checks across keys are in
`trainer.forecast.check_values` and `preflight`.
"""

from dataclasses import dataclass, field
from enum import Enum

from models.config import ModelConfig
from precision.config import PrecisionConfig
from trainer.config.data import DataConfig
from trainer.config.health import HealthConfig
from trainer.config.phases import Length, PhaseConfig, Span
from trainer.config.recovery import RecoveryConfig
from trainer.config.schema import Dispatch, PipelineSchedule, Recompute, Switch


class Device(Enum):
    """Device to train on; `auto` takes a GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class GpuChoice(Enum):
    """GPU of a dry run's forecast, available anywhere; `auto` is this machine's."""

    auto = "auto"
    h200 = "h200"
    h100 = "h100"
    a100 = "a100"
    rtx4090 = "rtx4090"


class Moments(Enum):
    """Format of AdamW's first and second moments, and of Muon's momentum."""

    fp32 = "fp32"
    bf16 = "bf16"


class OptimizerName(Enum):
    """Optimizer of the hidden matrices; AdamW updates everything else."""

    adamw = "adamw"
    muon = "muon"


class Coefficients(Enum):
    """Polynomials of Newton-Schulz: the same in each step, with two converging last ones, or one for each step."""

    quintic = "quintic"
    deepseek_v4 = "deepseek_v4"
    polar_express = "polar_express"


class Iteration(Enum):
    """Format of the Newton-Schulz iteration."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Schedule(Enum):
    """Decay of the learning rate after the constant part: on a line (warm-up, stable, decay), on half a cosine, or by
    the run's phases."""

    wsd = "wsd"
    cosine = "cosine"
    phases = "phases"


class InjectPlace(Enum):
    """Place of `debug.inject`'s fault."""

    loss = "loss"
    gradient = "gradient"
    activation = "activation"
    weight = "weight"


@dataclass
class RunConfig:
    """The run's name and starting point."""

    name: str | None
    """Name of the run and of its folder; null: the date and time."""
    dir: str
    """Folder of all runs."""
    resume: str
    """never: an existing run is an error; auto: resume from its newest valid checkpoint, or start; or the path of a run
    or of one of its checkpoints. A resumed run has its own settings, which the command line changes."""
    init_from: str | None
    """Start from the weights of this run or checkpoint; null: random weights."""


@dataclass
class TrainerConfig:
    """The loop."""

    max_steps: int | None
    """Steps of the whole run, resumed or not; skipped steps count. null: trainer.max_tokens is its length."""
    seed: int
    """Seed of the weights and of the order of the data."""
    global_batch_size: int
    """Sequences in one step."""
    microbatch_size: int
    """Sequences in one forward and backward pass; divides global_batch_size. Smaller takes less memory."""
    sequence_length: int
    """Tokens in one sequence."""
    device: Device
    """auto, cpu or cuda."""
    max_tokens: Length | None = None
    """Length of the whole run: tokens (10B) or epochs ('3 epochs'); with max_steps, too, the run ends with the first of
    them. On the command line either replaces the other."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """Parts of the run with different settings: batch, sequence length, learning rate, loss weights. Empty: the same
    from start to end."""
    document_masking: bool = False
    """Attention stays within a document, even if several are packed into a sequence; false: a token attends to
    everything before it in its sequence."""


@dataclass
class MuonConfig:
    """Muon's update of a matrix."""

    momentum: float
    """Decay of the sum of gradients."""
    nesterov: bool
    """Orthogonalise the gradient plus the decayed momentum; else the momentum."""
    coefficients: Coefficients
    """Newton-Schulz method: quintic (Moonlight), deepseek_v4 (eight steps of it, two that converge) or
    polar_express."""
    steps: int | None
    """Steps of Newton-Schulz; null: as published, 5, 10 and 8."""
    iteration: Iteration
    """Format of the Newton-Schulz iteration: bf16, fp16 or fp32."""
    scale: float
    """RMS of an update's entries, before the learning rate; with 0.2, AdamW's in practice, AdamW's rates carry over."""
    router: bool
    """Muon also updates routers, with weight decay; else AdamW does, without."""


@dataclass
class OptimConfig:
    """The optimizer and its learning rate."""

    lr: float
    """Peak learning rate."""
    betas: list[float]
    """Decay of the first and second moment."""
    eps: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Decoupled weight decay, times the learning rate; none for norms, embedding and AdamW's routers."""
    clip: float | None
    """Largest global gradient norm; null: no clipping."""
    moments: Moments
    """Format of both moments and of Muon's momentum: as the precision table says, unless it is set here."""
    schedule: Schedule
    """Shape of the decay: wsd (straight line), cosine, or phases (as in trainer.phases)."""
    warmup_steps: Span
    """Part of the run in which the learning rate rises from 0 to lr: steps, tokens (10B) or a share (0.02). Committed
    steps count."""
    decay_fraction: float
    """Last part of the run in which it falls, as a share of its steps; 1.0: from the end of the warm-up on."""
    min_lr_ratio: float
    """Learning rate at the end, as a share of lr."""
    name: OptimizerName = OptimizerName.adamw
    """adamw: for everything; muon: for the hidden matrices, and AdamW for embedding, head and norms."""
    muon: MuonConfig | None = None
    """Muon's settings (optim=muon_wsd, optim=muon_cosine); adamw does not read them."""
    qk_clip: float | None = None
    """Limit of a head's attention logits: after a step that exceeds it, the head's q and k weights are scaled down
    (QK-clip, Kimi K2: 100); null: off."""


@dataclass
class EvalConfig:
    """Evaluation on the validation files; there is always one at the end."""

    every: Span
    """Steps between evaluations, or tokens, or a share of the run; 0: only at the end."""
    batches: int | None
    """Microbatches of validation windows in one evaluation, spread over all files; null: every window."""
    at_end: int | None = 2000
    """Validation windows in the evaluation at the end of the run, spread over all files; null: every window."""
    sample: int = 48
    """Tokens of text to sample at the end of a single-process run, with trainer.seed; 0: none."""


@dataclass
class CheckpointConfig:
    """Checkpoints."""

    every: Span
    """Steps between checkpoints, or tokens, or a share of the run; 0: only at the end. A signal saves, too."""
    keep: int
    """Number of newest checkpoints to keep on disk; 0: all."""


@dataclass
class ConsoleConfig:
    """Output on the terminal."""

    enabled: bool
    """Progress and metrics: a live line on a terminal, plain lines elsewhere."""


@dataclass
class TensorboardConfig:
    """TensorBoard event files in the run folder."""

    enabled: bool
    """Write event files."""


class WandbMode(Enum):
    """Where W&B data goes; `auto` is online with an API key and offline without."""

    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass
class WandbConfig:
    """Weights & Biases."""

    enabled: bool
    """Log to Weights & Biases."""
    project: str
    """Project of the run."""
    entity: str | None
    """Team or user; null: the account's default."""
    mode: WandbMode
    """auto, online or offline (a folder to `wandb sync` later)."""


@dataclass
class LoggingConfig:
    """Sinks of metrics. `metrics.jsonl` and `events.jsonl` are always written."""

    every: Span
    """Steps between lines of metrics, or tokens, or a share of the run."""
    console: ConsoleConfig
    """The terminal."""
    tensorboard: TensorboardConfig
    """TensorBoard."""
    wandb: WandbConfig
    """Weights & Biases."""


@dataclass
class CompileConfig:
    """torch.compile."""

    enabled: Switch
    """Compile each kind of block once; auto: on a GPU, but not with FP8 before sm_89: torch cannot store E4M3 there."""


@dataclass
class ParallelConfig:
    """Degrees of parallelism; a run has replicate x shard x context x tensor x pipeline processes."""

    replicate: int
    """Groups of ranks that each hold the whole model (HSDP); -1: as many as the other degrees leave."""
    shard: int
    """Ranks that weights, gradients and optimizer are sharded over (FSDP2); -1: as many as the other degrees leave."""
    expert: int
    """Ranks, of those above, that whole experts are spread over (expert parallelism); -1: all of them."""
    timeout: float
    """Seconds that a rank waits in a collective operation for the others before the run ends and names the missing
    ranks. The first step compiles within this time."""
    reduce_each_microbatch: Switch
    """true: gradients are reduced and sharded after each microbatch, which takes least memory; false: once a step, with
    the fewest messages; auto: once a step if a whole set of FP32 gradients fits."""
    fp8_all_gather: Switch
    """true: FP8 weights are quantised before they are gathered, in half the bytes, if their scales allow it; false:
    gathered in BF16 and quantised after; auto: true if the `cuda` backend computes in FP8. The numbers are the same."""
    reshard_after_forward: Switch
    """true: a block's gathered weights are freed after its forward pass and gathered again for its backward pass;
    false: they stay until the step's last backward pass; auto: false if a GPU has room for all of them."""
    dispatch: Dispatch = Dispatch.auto
    """How tokens travel to experts on other ranks. all_to_all: exact numbers of rows, which the host waits for in each
    layer; two_hops: once to each node, then within it, for experts on several nodes; slots: a fixed number of rows, and
    no host waits; symmetric: as slots, but rows in use only, written into the memory of other GPUs of the node over
    NVLink; auto: symmetric where that is possible, else all_to_all. The numbers are the same, but with two_hops sums
    over nodes are rounded."""
    dispatch_capacity: float = 1.25
    """Room for tokens in slots over that for even routing, 1 or more. A step that needs more is skipped; the room
    grows."""
    context: int = 1
    """Ranks that each sequence is cut over; divides trainer.sequence_length and model.num_heads."""
    tensor: int = 1
    """Neighbouring ranks that attention heads, embedding and head are cut over, and each sequence, too; divides
    model.num_heads, model.vocab_size and trainer.sequence_length."""
    pipeline: int = 1
    """Ranks that microbatches pass through, each with its own blocks."""
    stages_per_rank: int = 1
    """Stages of neighbouring blocks per rank. 1: one forward, one backward (1F1B); more: interleaved, so that ranks
    wait less, and send that many times as much."""
    schedule: PipelineSchedule = PipelineSchedule.interleaved
    """interleaved: as above; zbv: two stages per rank, assigned in a V, and gradients of weights fill the time in which
    ranks would wait (zero bubble)."""
    stages: list[int] | None = None
    """Blocks of each stage, such as [14, 13]; null: balanced for the slowest stage. The last one also has the head and
    multi-token prediction."""


@dataclass
class ProfileConfig:
    """A window of steps to record: where the time goes, and on a GPU the memory."""

    steps: list[int] | None
    """First and last step of the window, such as [10, 12]; null: none. The files go to the run's folder profile/."""
    memory: bool
    """On a GPU also record memory allocations: a snapshot for https://pytorch.org/memory_viz."""


@dataclass
class InjectConfig:
    """An injected fault."""

    step: int
    """The step of the fault, or the first of several."""
    where: InjectPlace
    """loss, gradient, activation or weight (the compute weight)."""
    value: float
    """nan or inf; or a spike, a number above 1: it multiplies the loss; elsewhere it replaces one element."""
    steps: int = 1
    """Number of consecutive steps with the fault."""
    windows: list[int] | None = None
    """[BEGIN, END): only in steps that read one of these windows of the run's stream; null: in any. After a rewind
    steps come again, and windows that were left out do not."""


@dataclass
class DebugConfig:
    """Tools for testing the trainer itself."""

    inject: InjectConfig | None
    """A fault, such as {step: 3, where: gradient, value: nan}, optionally with steps and windows; null: none."""


@dataclass
class Config:
    """All settings of a run."""

    run: RunConfig
    """Its name and starting point."""
    trainer: TrainerConfig
    """The loop: steps, batch, sequence, device."""
    model: ModelConfig
    """The model."""
    precision: PrecisionConfig
    """Number formats of all operations."""
    data: DataConfig
    """The text."""
    optim: OptimConfig
    """Optimizer and learning rate."""
    eval: EvalConfig
    """Evaluation."""
    checkpoint: CheckpointConfig
    """Checkpoints."""
    logging: LoggingConfig
    """Sinks."""
    recovery: RecoveryConfig
    """Reactions to bad steps."""
    health: HealthConfig
    """Metrics beside the loss, and alerts."""
    parallel: ParallelConfig
    """Degrees of parallelism."""
    compile: CompileConfig
    """torch.compile."""
    recompute: Recompute
    """none; selective: attention without its core, and BF16 experts' rows, are recomputed; full: only the blocks'
    inputs are saved, the least memory and a third more work."""
    cuda_graph: Switch
    """Record a microbatch's forward and backward pass once as a CUDA graph and launch it as a whole, without waiting
    for Python. Only on one GPU, and not on the transformer_engine backend. auto: if these hold and the forecast leaves
    half of the GPU's memory free."""
    profile: ProfileConfig
    """A window of steps to profile."""
    debug: DebugConfig
    """Tools for tests."""
    dry_run: bool
    """Print the precision plan, parameters, FLOPs and memory of the run, and stop."""
    gpu: GpuChoice = GpuChoice.auto
    """With dry_run, and for scripts/plan_parallelism.py: the GPU to forecast for, h200, h100, a100 (80 GB) or rtx4090;
    auto: this machine's."""
    force_memory: bool = False
    """Start a run even if its forecast exceeds the memory of the GPU, or of the host."""
