"""The health of a run, as the trainer uses it: numbers of every logged step, sampled steps, the BF16 shadow.

    due(step)                whether health needs the step to be logged
    before(step, tokens)     runs a shadow if one is due (every `health.shadow_every`): extra passes over some of the
                             step's own tokens, with the weights and scales that the step is about to use
    inside(step, logged)     wraps the step: with every logged line, or every `health.every` steps, casts and
                             activations are sampled as they are made (`precision.observe`)
    collect(load, ok)        the metrics on the device, vectors included, after a step that is logged
    report(step, values)     the same on the host: returns summaries for metrics.jsonl, writes vectors to
                             tensors.jsonl

The trainer copies what `collect` returns to the host in its one transfer. Passes and collectives are the same on all
ranks.

tensors.jsonl has a line {"names": {"fp8": [rows], "blocks": [blocks], "moe": [blocks with experts]}} when a run starts
or resumes, then a line for each logged step, with lists in the order of those names:

    {"step": N, "fp8": {"scale": [...], "amax": [...]}, "blocks": {"max_logit"},
                    "moe": {"load_max_over_mean", "entropy", "bias_max"}}
    sampling adds   "fp8": "saturated", "underflown", "error"; "blocks": "kurtosis_qkv", "kurtosis_ffn",
                    "kurtosis_block", and the same with "_sequence"; "load": [[tokens of each expert], ...]
    shadows add     "shadow": {"cosine": {parameter: number}, "share": {parameter: number}}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.block import MoEBlock
from precision.observe import sampling
from trainer.config.health import HealthConfig
from trainer.health import shadow
from trainer.health.activations import KINDS, BlockKurtosis
from trainer.health.casts import Casts, Rows
from trainer.step.metrics import fp8_metrics

if TYPE_CHECKING:
    from trainer.step.engine import Engine

VECTOR = "tensors/"  # prefix of the keys that go to tensors.jsonl
COUNTS = 0.01  # parameters with a smaller share of the gradient's norm are left out of the worst cosine
DIGITS = 4


class Health:
    """See the module docstring. write: takes an entry of tensors.jsonl. batch: sequences of a step. microbatch:
    sequences of a rank's pass. note: a remark for the user, or None."""

    def __init__(
        self,
        config: HealthConfig,
        engine: Engine,
        write: Callable[[Mapping[str, Any]], None],
        batch: int,
        microbatch: int,
    ):
        self._engine, self._write = engine, write
        self.batch, self.microbatch = batch, microbatch
        self._every, self._shadow_every = config.every, config.shadow_every
        self.note: str | None = None
        if config.every != 0 and engine.plan.served_by("transformer_engine"):  # its modules hide their casts
            self._every = 0
            self.note = "steps are not sampled: Transformer Engine does not expose its casts (health.every)"
        self.rows = Rows(engine.arena)
        blocks = engine.model.iter_blocks()
        moe = [name for name, block in blocks if isinstance(block, MoEBlock)]
        self._names: dict[str, Any] | None = {
            "names": {"fp8": self.rows.names, "blocks": [name for name, _ in blocks], "moe": moe}
        }
        self._parameters = shadow.module_names(engine)
        self._casts, self._kurtosis = Casts(self.rows, engine.device), BlockKurtosis(blocks)
        documents = engine.model.end_of_text is not None
        self._logits = blocks[0][1].attn.raises_logits(engine.device, documents)
        self._sampled = False
        self._seen: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Return whether a step must be logged in any case: it has a shadow, or samples have their own interval."""
        return _due(step, self._every or 0) or _due(step, self._shadow_every)

    def before(self, step: int, tokens: Tensor) -> str | None:
        """Run a shadow if one is due for step `step`, on this rank's tokens [B, S + 1]. It changes nothing of training.

        A shadow may need more memory than a step. If a single process runs out, shadows stop and the message is
        returned. With several ranks the error is raised: the others would wait in the pass's collectives.
        """
        self._seen, self._sampled = {}, False
        if not _due(step, self._shadow_every):
            return None
        try:
            found = shadow.compare(self._engine, tokens[: self.microbatch], self.batch)
        except torch.OutOfMemoryError:
            if self._engine.world.is_distributed:
                raise
            key, self._shadow_every = f"health.shadow_every={self._shadow_every}", 0
            return f"{key}: not enough memory beside training; it is turned off; set health.shadow_every=0"
        self._seen |= {"shadow/loss_gap": found.loss_gap}
        self._seen |= {f"{VECTOR}shadow/cosine": found.cosine, f"{VECTOR}shadow/share": found.share}
        return None

    @contextmanager
    def inside(self, step: int, logged: bool) -> Iterator[None]:
        """Sample the casts and activations of step `step` if it is due. logged: whether the step will be logged."""
        self._sampled = logged if self._every is None else _due(step, self._every)
        if not self._sampled:
            yield
            return
        self._casts.forget()
        self._kurtosis.forget()
        with sampling(self._casts):
            yield

    def collect(self, load: Tensor, ok: Tensor) -> dict[str, Tensor]:
        """Return a step's metrics, on the device. load: [blocks with experts, E]. ok: whether it counted. A
        collective."""
        e, arena = self._engine, self._engine.arena
        if self._sampled:
            self._sampled = False
            self._seen |= {f"{VECTOR}blocks/kurtosis_{kind}": m for kind, m in self._kurtosis.means(e.world).items()}
            if len(self.rows):
                self._seen |= {f"{VECTOR}fp8/{what}": share for what, share in self._casts.shares(e.world).items()}
        norm, update = e.optimizer.norms(ok)
        found = {"optim/param_norm": norm, "optim/update_ratio": update / norm}
        if len(self.rows):
            found |= fp8_metrics(arena)
            found[f"{VECTOR}fp8/scale"] = self.rows.smallest_positive(arena.scale)
            found[f"{VECTOR}fp8/amax"] = self.rows.largest(arena.amax)
        if load.numel():
            found |= {f"{VECTOR}moe/{what}": value for what, value in load_statistics(load).items()}
            if e.model.router_bias:
                found[f"{VECTOR}moe/bias_max"] = torch.stack(e.model.router_bias).abs().amax(1)
            if self._seen:
                found[f"{VECTOR}load"] = load
        if self._logits:
            found[f"{VECTOR}blocks/max_logit"] = arena.max_logits.amax(1)
        found |= self._seen
        self._seen = {}
        return found

    def report(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write the vectors and return the line for metrics.jsonl. values: what `collect` returned, on the host."""
        vectors = {key.removeprefix(VECTOR): value for key, value in values.items() if key.startswith(VECTOR)}
        line = {key: value for key, value in values.items() if not key.startswith(VECTOR)}
        if vectors:
            if self._names is not None:
                self._write(self._names)
                self._names = None
            self._write(self._entry(step, vectors))
        return line | _summaries(vectors)

    def _entry(self, step: int, vectors: Mapping[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = {"step": step}
        for key, value in vectors.items():
            group, _, what = key.partition("/")
            if what and group == "shadow":
                entry.setdefault(group, {})[what] = dict(zip(self._parameters, _rounded(value), strict=True))
            elif what:
                entry.setdefault(group, {})[what] = _rounded(value)
            else:
                entry[group] = [[int(count) for count in block] for block in value]
        return entry


def load_statistics(load: Tensor) -> dict[str, Tensor]:
    """Return load_max_over_mean and the entropy of the shares over ln E (1: even; 0: one of several experts has all),
    FP64 by block. load: [blocks, E], tokens of each expert."""
    count = load.double()
    share = count / count.sum(1, keepdim=True)
    even = math.log(load.shape[1])  # 0: the only expert's share is always 1
    entropy = torch.special.entr(share).sum(1) / even if even else share[:, 0]
    return {"load_max_over_mean": count.amax(1) / count.mean(1), "entropy": entropy}


def _summaries(vectors: Mapping[str, Any]) -> dict[str, float]:
    summaries: dict[str, float] = {}

    def note(key: str, vector: str, of: Callable[[list[float]], float]) -> None:
        numbers = [value for value in vectors.get(vector, ()) if math.isfinite(value)]
        if numbers:
            summaries[key] = of(numbers)

    note("moe/entropy", "moe/entropy", fmean)
    note("moe/entropy_worst", "moe/entropy", min)
    note("moe/bias_max", "moe/bias_max", max)
    note("fp8/saturated_worst", "fp8/saturated", max)
    note("fp8/underflown_worst", "fp8/underflown", max)
    note("fp8/error_mean", "fp8/error", fmean)
    note("fp8/error_worst", "fp8/error", max)
    for kind in KINDS:
        note(f"act/kurtosis_{kind}", f"blocks/kurtosis_{kind}", max)
    note("act/max_logit", "blocks/max_logit", max)
    note("shadow/cosine_mean", "shadow/cosine", fmean)
    pairs = zip(vectors.get("shadow/cosine", ()), vectors.get("shadow/share", ()), strict=True)
    if cosines := [cosine for cosine, share in pairs if share >= COUNTS and math.isfinite(cosine)]:
        summaries["shadow/cosine_worst"] = min(cosines)
    return summaries


def _rounded(values: list[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
