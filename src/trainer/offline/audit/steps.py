"""Runs the observed steps, and compares them with the plan.

Two steps run, so that delayed scales come from a history; the second one is recorded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models import DeepSeek
from precision import GemmRow, Plan, ScalingArena, begin_step
from precision.head import bounds_gradient
from trainer.offline.audit.accumulation import SHORTEST, Probe, probe
from trainer.offline.audit.core import row_of
from trainer.offline.audit.findings import NOTHING, Finding, Observations
from trainer.offline.audit.gemms import CUDA, REFERENCE, GemmRecorder, recorded
from trainer.offline.audit.operations import SCORES, SOFTMAX, STATISTICS, Operations
from trainer.optim.adamw import Optimizer
from trainer.optim.loss_scale import LossScale
from trainer.step.microbatch import loss_factor

GEMM_PARTS = ("input", "weight", "grad", "saved", "output", "scales", "sums")
ARITHMETIC = "optim arithmetic"
UPDATE_ERROR = 2.0**-20
"""Relative error of moments after a first step: some roundings of FP32, far below one of BF16."""


@dataclass(frozen=True)
class Audit:
    """findings: the plan's rows, then what is FP32 in every recipe. probes: how GEMMs of one shape and recipe add up,
    by the name of the first of them. unseen: what cannot be observed, or did not occur."""

    findings: list[Finding]
    probes: dict[str, Probe]
    unseen: list[str]


def audit(
    model: DeepSeek,
    plan: Plan,
    arena: ScalingArena,
    optimizer: Optimizer,
    batches: list[Tensor],
    tokens: int | None = None,
    shortest: int = SHORTEST,
) -> Audit:
    """Train on each of `batches` [B, S+1], and return every row of the plan beside the observation in the last step.

    tokens: of a microbatch in training, for sums over rows; None: those of a batch. shortest: sum of a probe.
    """
    seen, arithmetic = Observations(), Observations()
    ours = [name for name in (REFERENCE, CUDA) if plan.served_by(name)]
    device = arena.amax.device
    loss_scale = LossScale(plan.config.loss_scale, device) if plan.is_fp16 else None
    for step, batch in enumerate(batches):
        seen = _observe_step(model, arena, optimizer, loss_scale, batch, ours)
        if step == 0:
            for state in optimizer.state_dict().values():
                _note_arithmetic(arithmetic, state)
    probes, of_row = _probe_all(plan, tokens or batches[0].numel(), device, shortest)
    for name, probed in of_row.items():
        seen.note(f"{name}/sums", probed.word)
    return Audit(_findings(plan, seen, arithmetic), probes, _not_covered(plan, seen, arithmetic, ours))


def _observe_step(
    model: DeepSeek,
    arena: ScalingArena,
    optimizer: Optimizer,
    loss_scale: LossScale | None,
    batch: Tensor,
    ours: list[str],
) -> Observations:
    """Train on a batch, and return what happened. ours: the backends whose GEMMs are seen."""
    seen, device = Observations(), arena.amax.device
    begin_step(model, arena)
    gemms = GemmRecorder(model, arena, seen)
    factor = loss_factor(model, 1, loss_scale)
    with recorded(gemms, ours), Operations(model, gemms, arena, seen):
        total = model(batch.to(device)).total
        (total if factor is None else total * factor).backward()
    if loss_scale is not None:
        optimizer.unscale(loss_scale.scale)
    for parameter in model.parameters():
        seen.note("optim.master", parameter.dtype)
        for row in ("grad.accumulate", "grad.reduce"):  # one process: nothing to reduce, the sum is the gradient
            seen.note(row, parameter.grad.dtype if parameter.grad is not None else "no gradient")
    arena.commit(arena.finite())
    optimizer.step(arena.finite(), torch.zeros((), device=device))
    for state in optimizer.state_dict().values():
        for key, tensor in state.items():
            if key != "step":
                seen.note("optim.moments", tensor.dtype)
    optimizer.zero_grad()
    return seen


def _findings(plan: Plan, seen: Observations, arithmetic: Observations) -> list[Finding]:
    """Return each row of the plan beside what was seen of it, then what is FP32 in every recipe."""
    found = [Finding(name, _planned(row), _seen_at(seen, name)) for name, row in plan.gemms.items()]
    found += [Finding(name, row.format.name, seen.at(name)) for name, row in plan.tensors.items()]
    for core in plan.cores.values():
        for product, left, right, in_pass in core.products if core.recipe.is_fp8 else ():
            row = row_of(core.name, product, in_pass)
            found.append(Finding(row, f"{left} x {right}", seen.at(row)))
    beside = [row for row in seen.rows() if row.endswith((SCORES, SOFTMAX, STATISTICS))]
    found += [Finding(row, "fp32", seen.at(row)) for row in beside]
    return found + [Finding(row, "fp32", arithmetic.at(row)) for row in arithmetic.rows()]


def _probe_all(
    plan: Plan, tokens: int, device: torch.device, shortest: int
) -> tuple[dict[str, Probe], dict[str, Probe]]:
    """Probe what `cuda` serves, once for equal shapes and recipes. Return probes by first row, and by each row."""
    made: dict[tuple, Probe] = {}
    first: dict[str, Probe] = {}
    of_row: dict[str, Probe] = {}
    for name, row in plan.gemms.items():
        if row.recipe.backend != CUDA:
            continue
        kind = row.op == "moe.experts", row.groups, row.rows_per_token, repr(row.recipe)
        shape = *kind, row.in_features, row.out_features
        if shape not in made:
            first[name] = made[shape] = probe(row, tokens, device, shortest)
        of_row[name] = made[shape]
    return first, of_row


def _note_arithmetic(seen: Observations, state: dict[str, Tensor]) -> None:
    """Check the moments of a first step: m = (1 - b1) g and v = (1 - b2) g^2, so v / m^2 is one number, whatever the
    clipping of g, within FP32's precision. Squares near the end of FP32's range are skipped."""
    if "exp_avg" not in state:
        return
    m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
    counts = v > 1e-30
    if state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32 and bool(counts.any()):
        low, high = (v[counts] / m[counts].square()).aminmax()
        seen.note(ARITHMETIC, "fp32" if bool(high - low <= UPDATE_ERROR * low) else "less than fp32")


def _not_covered(plan: Plan, seen: Observations, arithmetic: Observations, ours: list[str]) -> list[str]:
    """Return what the findings do not cover, one item a line."""
    lines = ["the reduction of gradients between ranks: one process runs, and grad.reduce is what its own sums are in"]
    if CUDA in ours:
        lines += [
            "registers: SwiGLU, the gradients of norms and attention, and the cast itself happen inside kernels, of "
            "which inputs and results are seen; tests and the self-test compare them with plain PyTorch",
            "graphs: the blocks ran uncompiled, without CUDA graphs; compiled, the same kernels are called, and what "
            "Inductor fuses around them is not seen",
            "sums of a run's own operands: the probe's are coherent, through the same kernels",
        ]
        if any(core.recipe.backend == CUDA and core.recipe.is_fp8 for core in plan.cores.values()):
            lines.append(
                "sums over a head's features (q k^T, dO v^T): attention's kernels leave these short sums in the FP8 "
                "tensor cores, of 14 bits; the softmax is compared within that"
            )
        if not any(row.endswith(SOFTMAX) for row in seen.rows()):
            lines.append("the softmax: the attention operator that ran returns no log-sum-exp")
    theirs = sum(row.recipe.backend not in (REFERENCE, CUDA) for row in plan.gemms.values())
    if theirs:
        lines.append(f"{theirs} GEMMs that Transformer Engine's modules compute, from their casts to their sums")
    if not arithmetic.rows():
        lines.append(f"the optimizer's arithmetic: moments are {seen.at('optim.moments')}")
    never = [name for name in plan.gemms if NOTHING in _seen_at(seen, name) and not theirs]
    return lines + ([f"GEMMs of which a part was not met: {', '.join(never)}"] if never else [])


def _planned(row: GemmRow) -> str:
    """Return a GEMM's row of the plan in the words of the audit."""
    recipe, scales = row.recipe, "none"
    if recipe.is_fp8:
        scales = recipe.scaling.granularity.value
        scales += (", from history" if recipe.delayed else ", from itself") if scales == "tensor" else ""
        scales += "+tensor, from itself" if row.op == "lm_head" and bounds_gradient(recipe) else ""  # dz
    parts = recipe.input, recipe.input, recipe.grad, recipe.saved, recipe.output, scales, recipe.accumulation.value
    return "  ".join(f"{part} {value}" for part, value in zip(GEMM_PARTS, parts, strict=True))


def _seen_at(seen: Observations, name: str) -> str:
    return "  ".join(f"{part} {seen.at(f'{name}/{part}')}" for part in GEMM_PARTS)
