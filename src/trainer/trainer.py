"""The trainer: one loop, in the order in which things happen.

`Trainer(config)` assembles a run, `train()` runs it, `train_step()` is one step of it:

    1  tokens from the loader, one cursor for the whole run
    2  microbatches: forward, backward, gradients summed in FP32
    3  the verdict: are losses, gradients and every amax of the step finite?
    4  masters, moments, learning rate, router biases and amax histories commit or drop together, on the device
    5  at intervals: metrics, evaluation, a checkpoint

`step` counts attempts: it names checkpoints and drives cadence and `max_steps`. `guard.committed` counts the steps that changed
something and drives the learning rate. The data moves on in either case.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models import Losses
from models.flops import flops_per_token
from models.loss import cross_entropy
from precision import begin_step
from trainer.build import Parts, build
from trainer.config import Config
from trainer.data import bigram_loss, validation_batches
from trainer.metrics import Throughput, copy_scalars, fp8_metrics, load_metrics, peak_memory_gib
from trainer.recovery import TrainingStopped, Verdict
from trainer.signals import StopSignals


@dataclass
class Summary:
    """What a finished run amounts to. Losses in nats per token; memory in GiB."""

    folder: Path
    step: int
    validation_loss: float
    bigram_loss: float
    tokens_per_second: float
    peak_memory_gib: float
    skipped_steps: int


class Trainer:
    """A run, assembled and ready."""

    def __init__(self, config: Config, overrides: list[str] | None = None):
        self.config = config
        self.parts: Parts = build(config, overrides or [])
        self.step = self.parts.run.first_step
        self._verdicts: list[Verdict] = []
        per_token = flops_per_token(config.model, config.trainer.sequence_length)
        self._throughput = Throughput(per_token, self.parts.device)
        self._tokens_per_step = config.trainer.global_batch_size * config.trainer.sequence_length

    def train(self) -> Summary:
        """Run to `max_steps`, or until a signal or too many dropped steps end it. Returns what came of it."""
        config, parts = self.config, self.parts
        validation_loss = None
        with parts.sinks, StopSignals() as stop:
            while self.step < config.trainer.max_steps and not stop.received:
                self.step += 1
                self.train_step(parts.loader.next())
                self._throughput.step(self._tokens_per_step)
                parts.sinks.progress(self.step)
                last = self.step == config.trainer.max_steps or bool(stop.received)
                if last or self.step % config.logging.every == 0:
                    self._log()
                with self._throughput.paused():
                    if self.step == config.trainer.max_steps or _due(self.step, config.eval.every):
                        validation_loss = self.evaluate()
                    if last or _due(self.step, config.checkpoint.every):
                        self._save()
            return self._finish(stop, validation_loss)

    def train_step(self, tokens: Tensor) -> Verdict:
        """One step on tokens [B, S+1]: everything it changes, or nothing."""
        p = self.parts
        begin_step(p.model, p.arena)
        microbatches = tokens.to(p.device).split(self.config.trainer.microbatch_size)
        seen: list[Losses] = []
        for i, microbatch in enumerate(microbatches):
            if p.injector is not None:
                p.injector.before(self.step, i)
            losses = p.model(microbatch)
            total = losses.total if p.injector is None else p.injector.loss(losses.total)
            (total / len(microbatches)).backward()
            seen.append(losses.detached(total))

        norms = p.optimizer.grad_norms()
        norm = norms.norm()
        verdict = p.guard.judge(self.step, torch.stack([s.total for s in seen]), norms)
        p.optimizer.clip(norm)
        lr = p.optimizer.step(verdict.ok, p.guard.committed)
        load = torch.stack([s.load for s in seen]).sum(0)
        p.model.update_router_bias(load, verdict.ok)
        p.arena.commit(verdict.ok)
        p.guard.count(verdict)
        p.optimizer.zero_grad()

        mean = {key: torch.stack([getattr(s, key) for s in seen]).mean() for key in ("total", "lm", "mtp", "balance")}
        self._last = {f"loss/{key}": value for key, value in mean.items()}
        self._last |= {"optim/grad_norm": norm, "optim/lr": lr, **load_metrics(load)}
        self._verdicts.append(verdict)
        if p.device.type == "cpu":  # nothing to wait for: say at once what the host would otherwise learn at the next log
            self._review()
        return verdict

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean language-model loss over the validation windows, nats per token; logged as `loss/validation`."""
        p, config = self.parts, self.config
        size, count = config.trainer.microbatch_size, config.eval.batches or None
        p.model.eval()
        total, weight = 0.0, 0
        for tokens in validation_batches(p.data.validation, config.trainer.sequence_length, size, count):
            tokens = tokens.to(p.device)
            total += float(cross_entropy(p.model.logits(p.model.hidden(tokens[:, :-1])), tokens[:, 1:])) * len(tokens)
            weight += len(tokens)
        p.model.train()
        loss = total / weight
        p.sinks.metrics({"step": self.step, "loss/validation": loss})
        return loss

    def _review(self) -> None:
        """Read the verdicts of the steps since the last review; report dropped ones, stop if there are too many in a row."""
        verdicts, self._verdicts = self._verdicts, []
        dropped = torch.stack([~v.ok for v in verdicts]).tolist() if verdicts else []
        place = None
        for verdict in (v for v, bad in zip(verdicts, dropped, strict=True) if bad):
            place = self.parts.guard.places[int(verdict.place)]
            message = f"step {verdict.step} is not finite, first at {place}; nothing of it was kept"
            module, _, direction = place.partition(" ")
            self.parts.sinks.event("nonfinite", verdict.step, message, module=module, where=direction.strip("()"))
        if any(dropped):
            self.parts.guard.check_progress(self.step, place)

    def _log(self) -> None:
        """One line of metrics, in one copy from the device."""
        p = self.parts
        device = {**self._last, "optim/param_norm": p.optimizer.parameter_norm(), **fp8_metrics(p.arena)}
        values = copy_scalars(device | {"recovery/skipped_steps": p.guard.skipped})
        values["recovery/skipped_steps"] = int(values["recovery/skipped_steps"])
        self._review()
        tokens = {"step": self.step, "tokens": self.step * self._tokens_per_step}
        p.sinks.metrics(tokens | values | self._throughput.read() | {"memory/peak_gib": peak_memory_gib(p.device)})

    def _save(self) -> None:
        self.parts.save(self.step)

    def _finish(self, stop: StopSignals, validation_loss: float | None) -> Summary:
        """Wait for what is still being written; say what came of the run."""
        p = self.parts
        p.checkpointer.wait()
        if stop.received:
            p.sinks.event("signal", self.step, f"stopped by {stop.received} after step {self.step}; saved")
            raise TrainingStopped(
                f"stopped by {stop.received} after step {self.step}, saved; go on with run.name={p.run.path.name} run.resume=auto"
            )
        if validation_loss is None:  # a finished run that was resumed
            validation_loss = self.evaluate()
        summary = Summary(
            p.run.path, self.step, validation_loss, bigram_loss(p.data.train, p.data.validation), self._throughput.average,
            peak_memory_gib(p.device), int(p.guard.skipped),
        )  # fmt: skip
        p.sinks.summary(summary)
        return summary


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
