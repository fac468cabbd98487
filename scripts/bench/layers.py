"""Layers to measure: ours built from a recipe's own plan, and Transformer Engine's beside them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from frame import CONFIGS, composed
from measure import Timing, say
from omegaconf import OmegaConf
from torch import nn

from precision import AttentionCore, Plan, PrecisionConfig, ScalingArena, begin_step, bind, gemm_layers
from precision.backends.availability import te_missing, te_refusal
from precision.config import Accumulation, BackendChoice, Granularity, Precision
from precision.errors import UserError
from precision.hardware import detect

OURS = ("bf16", "fp8_delayed", "fp8_jit", "fp8_block")
FAST = " fast"
TE = {"bf16": "te_bf16", "fp8_delayed": "te_delayed", "fp8_jit": "te_current", "fp8_block": "te_block"}


def add_arguments(parser: argparse.ArgumentParser, others: tuple[str, ...]) -> None:
    """Add the options for variants, backend and the table of rates."""
    known = (*others, *OURS, *TE.values())
    parser.add_argument(
        "--variants", nargs="+", choices=known, default=list(known), metavar="NAME", help=f"some of {', '.join(known)}"
    )
    add_accumulation(parser)
    choices = [choice.value for choice in BackendChoice if choice is not BackendChoice.auto]
    parser.add_argument("--backend", choices=choices, help="ours (default: cuda on a GPU, else reference)")
    parser.add_argument("--table", action="store_true", help="print entries for src/precision/rates")


def check_table(options: argparse.Namespace) -> None:
    """Raise UserError if the table of rates is wanted where its backend does not serve."""
    backend = backend_of(options.backend)
    if options.table and backend != "cuda":
        raise UserError(f"--table: the table of rates is of the cuda backend, and {backend} serves here; leave it out")


def add_accumulation(parser: argparse.ArgumentParser) -> None:
    """Add the option for the accumulation of our FP8 products."""
    choices = [choice.value for choice in Accumulation]
    text = "of FP8 products, ours (default: fp32); both: side by side"
    parser.add_argument("--accumulation", nargs="+", choices=choices, default=["fp32"], help=text)


def summed(recipe: str, accumulations: list[str]) -> list[tuple[str, str]]:
    """Return name and accumulation of each variant of a recipe: BF16 and blocks support only FP32 sums."""
    config = config_of(recipe)
    if recipe == "bf16" or config.scaling.granularity is Granularity.block:
        return [(recipe, "fp32")]
    return [(recipe + FAST if each == "fast" else recipe, each) for each in dict.fromkeys(accumulations)]


def backend_of(choice: str | None) -> str:
    """Return the backend of our layers here, unless the command line names another."""
    return choice or ("cuda" if torch.cuda.is_available() else "reference")


def config_of(recipe: str) -> PrecisionConfig:
    """Return the precision section of a recipe."""
    schema, values = OmegaConf.structured(PrecisionConfig), OmegaConf.load(CONFIGS / "precision" / f"{recipe}.yaml")
    config = OmegaConf.to_object(OmegaConf.merge(schema, values))
    assert isinstance(config, PrecisionConfig)
    return config


def rated(timings: Mapping[str, Timing]) -> dict[tuple[str, str], dict[str, float]]:
    """Return entries of the table of rates: by scaling and accumulation, milliseconds of BF16, ours and, with the
    default accumulation, Transformer Engine's. They are sustained times if measured, else short ones."""

    def times(name: str) -> float | None:
        timing = timings.get(name)
        return None if timing is None else 1e3 * (timing.sustained or timing.short)

    out = {}
    for recipe in OURS[1:]:
        scaling = config_of(recipe).scaling
        for name, accumulation in summed(recipe, ["fp32", "fast"]):
            theirs = None if te_refusal(scaling) or accumulation == "fast" else times(TE[recipe])
            if (ours := times(name)) is None and theirs is None:
                continue
            found = {"bf16": times("bf16"), "cuda": ours, "transformer_engine": theirs}
            kind = f"{scaling.method.value}/{scaling.granularity.value}"
            out[kind, accumulation] = {run: ms for run, ms in found.items() if ms is not None}
    return out


def plan_of(
    recipe: str,
    device: torch.device,
    tokens: int,
    backend: str | None = None,
    accumulation: str = "fp32",
    num_layers: int = 1,
) -> Plan:
    """Return an empty plan of a recipe."""
    config = config_of(recipe)
    config.accumulation = Accumulation(accumulation)
    config.backend = BackendChoice(backend_of(backend))
    return Plan(config, num_layers, detect(device), tokens)


def core_in_fp8(heads: int, d_qk: int, d_v: int, device: str) -> tuple[AttentionCore, ScalingArena]:
    """Return an attention core of normed queries and keys with all its products in FP8, and its arena."""
    config = PrecisionConfig()
    table = config.table
    table.grad.accumulate = table.grad.reduce = table.optim.master = table.optim.moments = Precision.fp32
    table.attn.core = Precision.fp8
    plan = Plan(config, 1, detect(device))
    core = AttentionCore(plan.core("layers.0.attn.core", heads, d_qk, d_v, d_qk**0.5))
    return core, ScalingArena(core.slots(), config.scaling, plan.delayed, device)


def ready(module: nn.Module, plan: Plan, device: torch.device) -> tuple[nn.Module, ScalingArena]:
    """Return the module on the device, weights drawn, bound to an arena."""
    module.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for layer in gemm_layers(module):
            layer.weight.normal_(0.0, 0.02, generator=generator)
    arena = bind(module, plan, device)
    begin_step(module, arena)
    return module, arena


def settle(module: nn.Module, arena: ScalingArena) -> None:
    """Commit a first forward and backward: delayed scales then come from a history, as in training."""
    arena.commit(torch.ones((), dtype=torch.bool, device=arena.amax.device))
    begin_step(module, arena)


def plan_of_model(model: str) -> Plan:
    """Return the plan of a model of configs/model, with FP8."""
    from trainer.forecast.preflight import check

    return check(composed(["+recipe=fp8_delayed", f"model={model}"]))


class TransformerEngine:
    """Transformer Engine, if installed."""

    def __init__(self) -> None:
        self.pytorch: Any = importlib.import_module("transformer_engine.pytorch")
        recipe: Any = importlib.import_module("transformer_engine.common.recipe")
        self._promoted = recipe.MMParams(use_split_accumulator=True)
        self._recipes = {
            "te_delayed": recipe.DelayedScaling,
            "te_current": recipe.Float8CurrentScaling,
            "te_block": recipe.Float8BlockScaling,
        }

    def autocast(self, variant: str, promoted: bool = False) -> Any:
        """Return the context of a variant's forward; te_bf16: without FP8. promoted: all three GEMMs promote their sums
        to FP32, as ours do; by default it leaves the forward product's to the tensor cores, except for blocks."""
        make = self._recipes.get(variant)
        recipe = make() if make else None
        if promoted and recipe is not None:
            for gemm in ("fprop", "dgrad", "wgrad"):  # its modules query any recipe for these
                setattr(recipe, f"fp8_gemm_{gemm}", self._promoted)
        return self.pytorch.autocast(enabled=make is not None, recipe=recipe)

    def attention_in_fp8(self) -> Any:
        """Return the context in which an attention core runs in FP8."""
        return self.pytorch.autocast(enabled=True, recipe=self._recipes["te_delayed"](fp8_dpa=True))


def transformer_engine(variants: list[str]) -> TransformerEngine | None:
    """Return Transformer Engine for the variants that need it; None, with a line about it, if it is missing."""
    wanted = [name for name in variants if name in TE.values() or name.startswith("te")]
    if not wanted:
        return None
    problem = "it needs a GPU and there is none" if not torch.cuda.is_available() else te_missing()
    if problem is not None:
        say(f"{', '.join(wanted)}: left out: {problem}")
        return None
    return TransformerEngine()
