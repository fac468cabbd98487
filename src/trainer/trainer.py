"""The trainer: one loop, in the order in which things happen.

`Trainer(config)` assembles a run, `Trainer.train()` runs it, `train_step()` is one step of it:

    1  tokens from the loader, one cursor for the whole run
    2  microbatches: forward, backward, gradients summed in FP32; each rank has its part of them
    3  the verdict, the same on all ranks: are losses, gradients and every amax of the step finite?
    4  masters, moments, learning rate, router biases and amax histories are committed or skipped together, on the
       device
    5  at intervals: metrics, evaluation, a checkpoint
    6  too many skipped steps in a row: back to a checkpoint, and past the data that they read

`step` counts attempts: it names checkpoints and drives cadence, `max_steps` and the learning rate's decay.
`guard.committed` counts committed steps and drives the warm-up. The data advances in either case. Batch, sequence
length and loss weights are those of the step's phase (`trainer.config.timeline`).
"""

import signal
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.flops import flops_per_token
from precision.errors import RunError
from trainer.build import Run, build
from trainer.config import Config
from trainer.config.paths import as_typed
from trainer.config.timeline import LossWeights, Segment, Timeline, at_peak_memory
from trainer.data import validation_batches
from trainer.forecast.fits import out_of_memory_message
from trainer.forecast.memory import forecast
from trainer.launch.device import pick_device
from trainer.launch.signals import StopSignals
from trainer.launch.world import World
from trainer.parallel.mesh import resolve
from trainer.recovery.diagnosis import BadStep
from trainer.recovery.ladder import SkippedStep
from trainer.sinks import Summary
from trainer.step.evaluation import mean_loss
from trainer.step.guard import TrainingStopped, Verdict
from trainer.step.metrics import Throughput, copy_to_host, memory_metrics, peak_memory_gib
from trainer.step.train_step import StepResult, train_step


class Trainer:
    """A run, assembled and ready."""

    def __init__(self, config: Config, overrides: list[str] | None = None, world: World | None = None):
        self.run: Run = build(config, overrides or [], world or World(pick_device(config.trainer.device)))
        self.config = self.run.config
        self.step = self.run.folder.first_step
        self._verdicts: list[tuple[Verdict, np.ndarray]] = []  # with the windows of each step
        self._latest: StepResult | None = None
        self._timeline = Timeline(self.config.trainer)
        self._now: tuple[Segment, LossWeights] | None = None
        self._throughput = Throughput(0.0, self.run.world.device)

    def train(self) -> Summary:
        """Run to `max_steps`, or until a signal or too many skipped steps end it. Returns the result."""
        config, run, error = self.config, self.run, None
        validation_loss, timeline, max_steps = None, self._timeline, self._timeline.steps
        try:
            run.power.start(self.step, lambda: self._throughput.is_paused)
            with StopSignals(run.world) as stop:
                while self.step < max_steps and not stop.received:
                    self.step += 1
                    run.world.rank_group.step = self.step
                    self._enter()
                    if run.ladder.begins(self.step):
                        run.apply_rewinds(self.step)
                    run.profiler.begin(self.step)
                    with run.stragglers.waits_for_data():
                        tokens = run.loader.next(*run.engine.data_share)
                    first = run.world.rank_group.phase("in its first step, which compiles")
                    with first if self._latest is None else nullcontext():
                        self._step(tokens)
                    stop.agree()
                    self._throughput.step(timeline.at(self.step).tokens)
                    run.sinks.progress(self.step)
                    last = self.step == max_steps or stop.received is not None
                    if last or self._is_logged(self.step):
                        self._log()
                    saves = last or timeline.due(self.step, config.checkpoint.every)
                    evaluates = self.step < max_steps and timeline.due(self.step, config.eval.every)
                    takes_time = saves or evaluates or run.ladder.exhausted or run.profiler.writes_after(self.step)
                    with self._throughput.paused(wait=takes_time):
                        run.profiler.end(self.step)
                        if saves or evaluates or run.ladder.exhausted:
                            self._review()  # of this step, too, where those before it exhausted the ladder
                        if run.ladder.exhausted:
                            self.step = run.rewind(self.step)
                            continue
                        if evaluates:
                            self.evaluate(at_end=False, stop=stop)
                        last |= stop.received is not None
                        if last or (saves and not run.ladder.streak):  # in a streak nothing has changed
                            self._save()
                        if self.step == max_steps and not stop.received:  # it takes long: save the training first
                            validation_loss = self.evaluate(at_end=True, stop=stop)
                return self._finish(stop, validation_loss)
        except torch.OutOfMemoryError as raised:
            error = self._out_of_memory()
            run.world.rank_group.announce(error)
            raise error from raised
        except BaseException as raised:
            error = raised
            run.world.rank_group.announce(raised)
            raise
        finally:
            run.close(error)

    def _enter(self) -> None:
        """Set shape and loss weights before a step, if they differ from the step before."""
        shape, run = self._timeline.at(self.step), self.run
        now = shape, self._timeline.weights(self.step)
        if now != self._now:
            self._review()  # of steps with the shape, and the scales, before
        run.engine.adapt(self._timeline, self.step)
        if now == self._now:
            return
        run.engine.enter(now[1], self._now is not None)
        if self._now is not None and self._now[0] != shape:
            run.alerts.another_shape()
        run.health.batch, run.health.microbatch = shape.batch, shape.microbatch
        run.diagnosis.microbatch_size, run.ladder.batch = shape.microbatch, shape.batch
        self._throughput.flops_per_token = flops_per_token(self.config.model, shape.length) / run.world.size
        self._now = now

    def _step(self, tokens: Tensor) -> None:
        engine = self.run.engine
        if engine.injector is not None:
            engine.injector.data(self.run.loader.served)
        if (trouble := self.run.health.before(self.step, tokens)) is not None:
            self.run.sinks.event("alert", self.step, trouble, rule="memory_full")
        with self.run.health.inside(self.step, self._is_logged(self.step)):
            result = train_step(engine, self.step, tokens, self._timeline.at(self.step).microbatch)
        self._latest = result
        self._verdicts.append((result.verdict, self.run.loader.served))
        if engine.device.type == "cpu":  # nothing to wait for: report now what a GPU's host learns at the next log
            self._review()

    def _is_logged(self, step: int) -> bool:
        """Return whether a step is logged, as far as is known before it; the last one after a signal is, too."""
        at_an_end = step in (1, self._timeline.steps)
        return at_an_end or self._timeline.due(step, self.config.logging.every) or self.run.health.due(step)

    def _save(self) -> None:
        with self.run.world.rank_group.phase("copying a checkpoint"):
            self.run.save(self.step)

    @torch.no_grad()
    def evaluate(self, at_end: bool, stop: StopSignals) -> float:
        """Return the mean language-model loss over validation windows, nats per token; logged as `loss/validation`.

        at_end: over `eval.at_end` of them, else over `eval.batches` microbatches, spread evenly over the files. stop:
        signals. After one, the step is saved first, since a job may be killed before a long evaluation ends; at the end
        of a run it is saved already, and the signal is reported.
        """
        r, e = self.run, self.run.engine
        shape = self._timeline.at(max(self.step, 1))
        size, length, some = shape.microbatch, shape.length, self.config.eval.batches
        most = self.config.eval.at_end if at_end else some and some * size
        windows = r.data.validation.num_windows(length)
        count = windows if most is None else min(windows, most)

        if stop.received:
            self._save()

        def seen(done: int) -> None:
            r.sinks.activity(f"evaluating {done:,}/{count:,}")
            if not at_end and not stop.received:
                stop.agree()
                if stop.received:
                    self._save()
            elif at_end and (name := stop.new_signal()) is not None:
                state = "all steps are trained, and the last evaluation continues; a second signal ends it"
                r.sinks.event("signal", self.step, f"{name}: {state}", finishes=True)

        batches = validation_batches(r.data.validation, length, size, most)
        loss = mean_loss(e.model, batches, size, e.world, seen)
        e.microbatch.release()
        r.sinks.metrics({"step": self.step, "loss/validation": loss})
        return loss

    def _review(self) -> None:
        """Read the verdicts of the steps since the last review, report skipped ones, and pass them to the ladder."""
        verdicts, self._verdicts = self._verdicts, []
        flags = torch.stack([~verdict.ok for verdict, _ in verdicts]).tolist() if verdicts else []
        self._make_room([verdict for verdict, _ in verdicts])
        skipped = [pair for pair, bad in zip(verdicts, flags, strict=True) if bad]
        reports = iter(self.run.diagnosis.report(skipped) if skipped else [])
        for (verdict, windows), is_bad in zip(verdicts, flags, strict=True):
            if not is_bad:
                self.run.ladder.note(None)
                continue
            bad = next(reports)
            kind, line, what = self._reason(verdict, bad)
            if kind in ("nonfinite", "spike"):  # the others have a remedy of their own
                self.run.ladder.note(SkippedStep(verdict.step, int(windows.min()), int(windows.max()) + 1, bad.place))
            self.run.sinks.event(kind, verdict.step, line, **what)

    def _reason(self, verdict: Verdict, bad: BadStep) -> tuple[str, str, dict[str, Any]]:
        """Return kind, line and fields of the event that reports a skipped step."""
        guard, slots = self.run.engine.guard, self.run.engine.model.slots
        if (overflow := guard.overflow(verdict, bad.place)) is not None:
            return "loss_scale", overflow.line, bad.what | overflow.what
        if slots is not None and (crowded := guard.crowded(verdict, slots.capacity)) is not None:
            return "dispatch", crowded.line, crowded.what
        if (spike := guard.spike(verdict)) is not None:
            return "spike", "; ".join([spike.line, *bad.details]), bad.what | spike.what
        return "nonfinite", bad.line(verdict.step), bad.what

    def _make_room(self, verdicts: list[Verdict]) -> None:
        """Adapt the room for tokens on their way to experts to the steps since the last review, alike on all ranks."""
        slots, fills = self.run.engine.model.slots, [v.fill for v in verdicts if v.fill is not None]
        if slots is not None and fills:
            slots.fit(float(torch.stack(fills).max()))

    def _log(self) -> None:
        """Log one line of metrics, in one copy from the device."""
        r, e = self.run, self.run.engine
        latest = self._latest
        assert latest is not None
        device = latest.metrics | r.health.collect(latest.load, latest.verdict.ok)
        skips = {"recovery/skipped_steps": e.guard.skipped, "recovery/spikes": e.guard.spiked}
        if e.loss_scale is not None:
            skips["recovery/loss_scale_skips"] = e.guard.overflowed
        r.stragglers.launch()
        values = r.health.report(self.step, copy_to_host(device | skips))
        values |= {key: int(values[key]) for key in skips} | {"recovery/rewinds": len(r.ladder.rewinds)}
        self._review()
        tokens = {"step": self.step, "tokens": self._timeline.tokens(self.step)}
        tokens["data/skipped_shards"] = len(r.data.left_out)
        rates = self._throughput.read()
        rates |= r.power.read(self.step, *self._throughput.latest)
        rates |= r.stragglers.read(self._throughput.latest[1], r.power.readings)
        line = tokens | values | rates | memory_metrics(e.device)
        r.sinks.metrics(line)
        for alert in r.alerts.check(line):
            r.sinks.event("alert", self.step, alert.message, **alert.what())

    def _out_of_memory(self) -> RunError:
        """Return the error for a full GPU: what fills it, against the forecast."""
        e = self.run.engine
        degrees = resolve(self.config.parallel, self.run.world.size)
        total = torch.cuda.get_device_properties(e.device).total_memory
        expected, _ = forecast(at_peak_memory(self.config), e.plan, degrees, float(total))
        return RunError(out_of_memory_message(expected, torch.cuda.max_memory_allocated(e.device), total))

    def _finish(self, stop: StopSignals, validation_loss: float | None) -> Summary:
        """Wait for pending writes, and report the run's result."""
        r = self.run
        lost = r.finish_saving(self.step)
        if stop.received:
            ending = f"stopped by {stop.received} after step {self.step}"
            r.sinks.event("signal", self.step, f"{ending}; {'not ' if lost else ''}saved")
            if lost:
                raise TrainingStopped(f"{ending}, not saved: {lost}")
            raise TrainingStopped(
                f"{ending}, saved; resume with {as_typed('run.resume', str(r.folder.path.absolute()))}",
                exit_code=128 + signal.Signals[stop.received],
            )
        if validation_loss is None:  # a finished run that was resumed
            validation_loss = self.evaluate(at_end=True, stop=stop)
        summary = Summary(
            folder=r.folder.path,
            step=self.step,
            validation_loss=validation_loss,
            bigram_loss=r.data.bigram_loss,
            tokens_per_second=self._throughput.median,
            peak_memory_gib=peak_memory_gib(r.engine.device),
            skipped_steps=int(r.engine.guard.skipped),
        )
        r.sinks.summary(summary)
        if lost:
            raise TrainingStopped(f"training has finished, but its end is not saved: {lost}")
        return summary
