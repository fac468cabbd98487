"""Rules about curves: gradient norm, loss, and their difference from the BF16 shadow."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from trainer.config.health import TO_BF16
from trainer.health.alerts import Alert, Entry, History, Rule, in_fp8, number


class GradNormSpike(Rule):
    """The gradient norm is above `times` the median of the last lines, and far outside their spread."""

    name = "grad_norm_spike"
    LINES, FEWEST, DEVIATIONS = 100, 20, 6.0

    def __init__(self, times: float):
        self._times, self._norms = times, History(self.LINES)

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        norm = number(metrics, "optim/grad_norm")
        if norm is None or norm <= 0:
            return None
        before = self._norms.before(step)
        self._norms.add(step, norm)
        if len(before) < self.FEWEST:
            return None
        middle = median(before)
        spread = 1.4826 * median(abs(math.log(n / middle)) for n in before)
        if norm <= self._times * middle or math.log(norm / middle) <= self.DEVIATIONS * spread:
            return []
        message = (
            f"gradient norm {norm:.3g} is {norm / middle:.3g} times its median over the last {len(before)} lines; "
            "a single spike is clipped (optim.clip); if it recurs, lower optim.lr and check the data of the step"
        )
        return [Alert(self.name, step, message, norm, self._times * middle)]


class LossPlateau(Rule):
    """Over the last `steps`, neither the loss nor the gradient norm is lower in the later half than in the earlier
    half.

    Lower is the median; after an alert, by three standard errors of the difference of the medians. A loss that follows
    a power law falls ever more slowly, and the noise between batches is far larger: the window is therefore at least
    half of the run and `FEWEST` lines, so that healthy progress exceeds the noise at any time.
    """

    name = "loss_plateau"
    LINES, FEWEST, SHARE, EACH = 1000, 100, 0.5, 10

    def __init__(self, steps: float):
        self._steps, self._losses, self._norms = steps, History(self.LINES), History(self.LINES)
        self._kept = 0
        self._errors = 0.0  # standard errors that count as a fall; more after an alert, until a clear fall

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        loss, norm = number(metrics, "loss/lm"), number(metrics, "optim/grad_norm")
        if loss is None or norm is None or norm <= 0:
            return None
        window = max(self._steps, self.SHARE * step)
        if not self._is_due(step, window):
            return None
        self._losses.add(step, loss)
        self._norms.add(step, math.log(norm))
        self._kept += 1
        if self._kept % self.EACH:
            return None
        steps = self._losses.steps
        if len(steps) < self.FEWEST or steps[0] > step - 0.98 * window:
            return None
        window = max(window, step - steps[-self.FEWEST])
        inside = sum(at >= step - window for at in steps)
        loss_fell, loss_error = _fall(self._losses.values[-inside:])
        norm_fell, norm_error = _fall(self._norms.values[-inside:])
        if loss_fell > self._errors * loss_error or norm_fell > self._errors * norm_error:
            self._errors = 0.0
            return []
        self._errors = 3.0
        message = (
            f"loss {loss:.4f} has not fallen in {window:.0f} steps (later half against earlier: {-loss_fell:+.4f}), "
            f"nor has the gradient norm ({100 * math.expm1(-norm_fell):+.1f} %): learning has stopped. "
            f"Look at kurtosis{in_fp8(metrics, ' and the BF16 shadow')}; then lower optim.lr, or end the run"
        )
        return [Alert(self.name, step, message, window, self._steps)]

    def _is_due(self, step: int, window: float) -> bool:
        """Return whether to keep this line. Evenly spread lines let the history span more than a window."""
        last = self._losses.last
        return last is None or step <= last[0] or step - last[0] >= window / (0.8 * self.LINES)


class LossRise(Rule):
    """For three consecutive lines the loss is this many nats above its lowest value, a median of three lines.

    The rule needs almost no past, so it also covers a run that fails from its first steps.
    """

    name = "loss_rise"
    LINES = 3

    def __init__(self, nats: float):
        self._nats, self._losses, self._lowest = nats, History(self.LINES), History(1000)

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        loss = number(metrics, "loss/lm")
        if loss is None:
            return None
        self._losses.add(step, loss)
        last = self._losses.values
        self._lowest.forget(step)
        before = self._lowest.last
        lowest = median(last) if before is None else min(median(last), before[1])
        self._lowest.add(step, lowest)
        if len(last) < self.LINES or min(last) <= lowest + self._nats:
            return []
        message = (
            f"loss {loss:.4f} is {loss - lowest:.2g} nats above its lowest, {lowest:.4f}: training diverges; "
            "go back to a checkpoint with a lower optim.lr (run.resume=PATH)"
        ) + in_fp8(metrics, f", or in BF16 ({TO_BF16})")
        return [Alert(self.name, step, message, loss, lowest + self._nats)]


class _Shadow(Rule):
    """A rule that needs two shadows in a row: one microbatch may be odd."""

    above: bool

    def __init__(self, threshold: float):
        self._threshold, self._past = threshold, History(2)

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        value = self._value(metrics)
        if value is None:
            return None
        self._past.add(step, value)
        at, past = self._threshold, self._past.values
        if len(past) < 2 or not all(value > at if self.above else value < at for value in past):
            return []
        return [self._alert(step, value, metrics, tensors)]

    def _value(self, metrics: Entry) -> float | None:
        raise NotImplementedError

    def _alert(self, step: int, value: float, metrics: Entry, tensors: Entry | None) -> Alert:
        raise NotImplementedError


class ShadowLossGap(_Shadow):
    """The loss in FP8 is above the loss in BF16 by this share of it. Being below is harmless."""

    name, above = "shadow_loss_gap", True

    def _value(self, metrics: Entry) -> float | None:
        gap, loss = number(metrics, "shadow/loss_gap"), number(metrics, "loss/lm")
        return None if gap is None or loss is None or loss <= 0 else gap / loss

    def _alert(self, step: int, value: float, metrics: Entry, tensors: Entry | None) -> Alert:
        message = (
            f"loss is {metrics['shadow/loss_gap']:.3g} nats above BF16's from the same weights, "
            f"{100 * value:.2g} % of it (health.alerts.{self.name}={self._threshold:g}): FP8 costs accuracy; "
            "look at the casts' errors in tensors.jsonl, or resume in BF16 "
            f"({TO_BF16} run.resume=auto)"
        )
        return Alert(self.name, step, message, value, self._threshold)


class ShadowCosine(_Shadow):
    """The gradient of some module deviates from its direction in BF16."""

    name, above = "shadow_cosine", False

    def _value(self, metrics: Entry) -> float | None:
        return number(metrics, "shadow/cosine_worst")

    def _alert(self, step: int, value: float, metrics: Entry, tensors: Entry | None) -> Alert:
        module = None
        if tensors is not None and "shadow" in tensors:
            cosines = {name: c for name, c in tensors["shadow"].get("cosine", {}).items() if c is not None}
            module = min(cosines, key=lambda name: abs(cosines[name] - value), default=None)
        message = (
            f"cosine of the gradient of {module or 'a module'} to BF16's is {value:.3g} "
            f"(health.alerts.{self.name}={self._threshold:g}): FP8 changes the direction of descent; "
            "keep that module in BF16 (precision.rules.exceptions)"
        )
        return Alert(self.name, step, message, value, self._threshold, block=module)


def _fall(values: Sequence[float]) -> tuple[float, float]:
    """Return by how much the median of the later half is below that of the earlier, and its standard error."""
    halves = np.array_split(np.array(values), 2)
    middles = [np.median(half) for half in halves]
    spreads = [1.4826 * np.median(np.abs(half - middle)) for half, middle in zip(halves, middles, strict=True)]
    # the standard error of a median is sqrt(pi / 2) times a mean's
    error = math.sqrt(math.pi / 2 * sum(s * s / len(half) for s, half in zip(spreads, halves, strict=True)))
    return float(middles[0] - middles[1]), error
