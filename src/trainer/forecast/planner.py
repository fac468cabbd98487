"""The planner: the fastest of all layouts of a config that fit into some GPUs, as a table and a command.

It is what scripts/plan_parallelism.py prints. `trainer.forecast.cost` has the arithmetic, `trainer.forecast.search` the
search.
"""

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import islice, product

import torch

from models import DeepSeek
from precision import Plan
from precision.errors import UserError
from precision.hardware import Gpu
from trainer.config import Config, Dispatch, GpuChoice, Recompute
from trainer.config.health import check_shadow
from trainer.config.timeline import Timeline, at_peak_memory
from trainer.files import script
from trainer.forecast.check_values import check_sizes
from trainer.forecast.cost import RATES, Cost, Machine
from trainer.forecast.gpus import KNOWN
from trainer.forecast.memory import GIB
from trainer.forecast.search import Search, fewest
from trainer.forecast.stages import EAGER, in_a_v, stages_line
from trainer.parallel.mesh import Degrees

AXES = [field.name for field in fields(Degrees)]
PER_RANK = "stages_per_rank"
NEEDS_NODES = Dispatch.symmetric, Dispatch.two_hops
DEGREES = ("parallel", *(f"parallel.{axis}" for axis in (*AXES, PER_RANK)), "parallel.stages")
LENGTH, UNSAID = 4096, 128  # tokens of a sequence if only configs/train.yaml sets it, and its value there
SEQUENCES, UNSAID_BATCH = 8, 16  # of a GPU and step if only configs/train.yaml sets the batch, and its value there
SHORT = 128  # tokens of a sequence with which activations take little


def degrees_given(words: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Split a command line into words without degrees, and the degrees. Raises UserError for an invalid degree."""
    given = dict(_given(word) for word in words if word.lstrip("+").partition("=")[0] in DEGREES)
    return [word for word in words if word.partition("=")[0] not in DEGREES], given


def planned(
    config: Config, options: Namespace, given: Mapping[str, int], words: Sequence[str], of_a_run: bool = False
) -> str:
    """Return the table and the command. options: of the script. given: fixed degrees. words: those that made the
    config. of_a_run: from the settings of a run, whose batch and sequences stay.

    Raises UserError if nothing fits.
    """
    rest, named = list(words), {word.partition("=")[0] for word in words}
    length = min(LENGTH, config.model.max_position_embeddings)
    if not of_a_run and config.trainer.sequence_length == UNSAID and "trainer.sequence_length" not in named:
        config = replace(config, trainer=replace(config.trainer, sequence_length=length))
        rest.append(f"trainer.sequence_length={length}")
    check_sizes(config)
    run, config = config, _planned_shape(config, options)
    target = KNOWN[GpuChoice.h200 if config.gpu is GpuChoice.auto else config.gpu]
    if options.tflops is None and target is not KNOWN[GpuChoice.h200]:
        fix = f"measure it with python {script('scripts/bench/step.py')}, and give --tflops"
        raise UserError(f"gpu={config.gpu.value}: a step was measured on an H200 only; {fix}")
    plan = _plan(config, target.gpu)
    fp8 = any(row.recipe.is_fp8 for row in plan.gemms.values())
    check_shadow(config.health, plan.has_fp8, plan.served_by("transformer_engine"))
    memory, flops = options.memory * GIB if options.memory else target.memory, 1e12 * (options.tflops or RATES[fp8])
    machines = [
        Machine(gpus, options.per_node, memory, flops, 1e9 * link, 1e9 * network)
        for gpus, link, network in product(options.gpus, options.node_link, options.network)
    ]

    search, batch = Search(config, plan, given, run), config.trainer.global_batch_size
    is_given = of_a_run or batch != UNSAID_BATCH or "trainer.global_batch_size" in named
    is_given = (is_given and not options.sequences) or _sets(run, "global_batch_size")

    def batches(machine: Machine) -> list[int]:
        return [batch] if is_given else [machine.gpus * each for each in options.sequences or [SEQUENCES]]

    def fastest(machine: Machine, rows: int) -> list[Cost]:
        return list(islice(search.fastest_first(machine, batches(machine)), rows))

    if len(machines) > 1:
        lines = [compared([(machine, next(iter(fastest(machine, 1)), None)) for machine in machines])]
        return "\n\n".join([*lines, *_of_phases(run, config), *([EAGER] if in_a_v(config.parallel) else [])])
    machine, best = machines[0], fastest(machines[0], options.rows)
    if not best:
        if (why := search.refusal(machine, batches(machine))) is None:
            why = _too_large(config, plan, given, run, machine, batches(machine))
        elif not why:
            why = f"no layout can train this; leave out {_asked(config, given, batch if is_given else None)}"
        else:
            why = f"no layout can train this; {why}"
        raise UserError(f"--gpus={machine.gpus}: {why}")
    first, lines = best[0], [table(best)]
    if first.degrees.pipeline > 1:
        lines.append(stages_line(_as_run(config, first), plan, first.degrees))
    lines += _of_phases(run, _as_run(config, first))
    return "\n\n".join([*lines, command(first, machine.gpus, options.per_node, rest, run)])


def _asked(config: Config, given: Mapping[str, int], batch: int | None) -> str:
    """Return what the command line asks of layouts, as typed. batch: None if it asks for none."""
    asked = {f"parallel.{axis}": size for axis, size in given.items()}
    asked |= {"parallel.schedule": "zbv"} if in_a_v(config.parallel) else {}
    asked |= {"parallel.dispatch": how.value} if (how := config.parallel.dispatch) in NEEDS_NODES else {}
    asked |= {} if batch is None else {"trainer.global_batch_size": batch}
    some = "some of " if len(asked) > 1 else ""
    return some + " ".join(f"{key}={value}" for key, value in asked.items())


def _too_large(
    config: Config, plan: Plan, given: Mapping[str, int], run: Config, machine: Machine, batches: Sequence[int]
) -> str:
    """Return that no layout fits, and what would."""
    enough = fewest(config, plan, machine)
    more = f"take more GPUs ({enough} would do)" if enough else "take GPUs with more (no number of these is enough)"
    free = f"leave out {' '.join(f'parallel.{axis}={size}' for axis, size in given.items())}, " if given else ""
    short = replace(config, trainer=replace(config.trainer, sequence_length=SHORT))
    helps = any(Search(short, plan, given, run).fastest_first(machine, batches))
    shorter = ", or a shorter trainer.sequence_length" if helps else ""
    return f"no layout fits into {machine.memory / GIB:g} GiB a GPU; {free}{more}{shorter}"


def _given(word: str) -> tuple[str, int]:
    """parallel.expert=8 -> expert, 8."""
    axis, _, size = word.removeprefix("parallel.").partition("=")
    if axis not in (*AXES, PER_RANK) or not size.isdecimal() or int(size) < 1:
        raise UserError(f"{word}: the planner chooses the degrees; leave it out, or set an axis to 1 or more")
    return axis, int(size)


def _sets(config: Config, size: str) -> bool:
    """Return whether a phase of the run sets this size."""
    return any(getattr(phase, size) is not None for phase in config.trainer.phases)


def _planned_shape(config: Config, options: Namespace) -> Config:
    """Return the run to plan: of several phases the steps that take most memory with one microbatch. Its
    `parallel.stages` belong to its own layout."""
    if _sets(config, "microbatch_size"):
        why = "a phase sets microbatch_size, and the planner chooses one for all"
        raise UserError(f"trainer.phases: {why}; leave it out, or plan each phase without trainer.phases")
    if _sets(config, "global_batch_size") and options.sequences:
        raise UserError("--sequences: a phase of trainer.phases sets the batch; leave one of them out")
    return at_peak_memory(replace(config, parallel=replace(config.parallel, stages=None)))


def _of_phases(run: Config, planned: Config) -> list[str]:
    """Return a line on the phases of a run, if its steps differ. planned: those that the plan is for."""
    t, several = planned.trainer, len(Timeline(run.trainer).segments) > 1
    steps = f"the steps that take most memory, {t.global_batch_size} sequences of {t.sequence_length} tokens"
    return [f"trainer.phases: planned for {steps}, among layouts that can train all"] if several else []


def _as_run(config: Config, c: Cost) -> Config:
    """Return the config with the batch and the stages of a layout."""
    size = c.microbatch * c.microbatches * c.degrees.data
    trainer = replace(config.trainer, microbatch_size=c.microbatch, global_batch_size=size)
    return replace(config, trainer=trainer, parallel=replace(config.parallel, stages_per_rank=c.stages_per_rank))


def _plan(config: Config, gpu: Gpu | None) -> Plan:
    """Return the precision plan on such GPUs."""
    config.model.validate()
    plan = Plan(config.precision, config.model.num_layers, gpu)
    with torch.device("meta"):
        DeepSeek(config.model, plan)
    return plan


HEAD = (
    " ".join(f"{axis:>{max(len(axis), 6)}}" for axis in AXES)
    + f" {PER_RANK} {'microbatch':>10} {'recompute':>9} {'GiB':>6} {'compute ms':>10} {'gather+reduce':>13} "
    f"{'exchange':>10} {'bubble':>6} {'exposed':>7} {'tokens/s/GPU':>12}"
)


def table(costs: list[Cost]) -> str:
    """Format layouts, one per line."""
    return "\n".join([HEAD, *map(line, costs)])


def compared(found: list[tuple[Machine, Cost | None]]) -> str:
    """Format machines, one per line, each with its layout."""
    lines = [f"{'GPUs':>5} {'node GB/s':>9} {'network GB/s':>12} {HEAD}"]
    for m, c in found:
        fits = "does not fit" if c is None else line(c)
        lines.append(f"{m.gpus:5} {m.node_link / 1e9:9g} {m.network / 1e9:12g} {fits}")
    return "\n".join(lines)


def line(c: Cost) -> str:
    """Format a layout in the columns of `HEAD`."""
    degrees = " ".join(f"{getattr(c.degrees, axis):{max(len(axis), 6)}}" for axis in AXES)
    return (
        f"{degrees} {c.stages_per_rank:{len(PER_RANK)}} {c.microbatch:10} {c.recompute.value:>9} {c.memory / GIB:6.1f} "
        f"{1e3 * c.compute:10.1f} {1e3 * c.hidden:13.1f} {1e3 * c.waiting:10.1f} {c.bubble:6.1%} {c.exposed:7.1%} "
        f"{c.tokens_per_second:12,.0f}"
    )


def command(c: Cost, gpus: int, per_node: int, rest: list[str], config: Config) -> str:
    """Return the command line of a layout. It replaces the degrees, stages and recompute of `config`."""
    nodes = gpus // per_node
    start = f"torchrun --nproc_per_node={min(gpus, per_node)}"
    if nodes > 1:
        start = f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    if gpus == 1:
        start = "python"
    batch = {"trainer.microbatch_size": c.microbatch}
    if not _sets(config, "global_batch_size"):
        batch["trainer.global_batch_size"] = c.microbatch * c.microbatches * c.degrees.data
    own = {*batch, "recompute", "dry_run", "gpu"}
    kept = [shlex.quote(word) for word in rest if word.partition("=")[0] not in own]
    d = c.degrees
    layout = {**asdict(d), PER_RANK: c.stages_per_rank}
    degrees = [
        f"parallel.{axis}={size}" for axis, size in layout.items() if (size, getattr(config.parallel, axis)) != (1, 1)
    ]
    degrees += [] if config.parallel.stages is None else ["parallel.stages=null"]
    none = c.recompute is config.recompute is Recompute.none
    again = [] if none else [f"recompute={c.recompute.value}"]
    sizes = [f"{key}={size}" for key, size in batch.items()]
    return " ".join([start, script("train.py"), *kept, *degrees, *sizes, *again])
