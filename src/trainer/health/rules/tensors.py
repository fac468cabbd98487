"""Rules about tensors.jsonl: scales and casts of FP8 tensors, logits and kurtosis of blocks, load of experts."""

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from precision.config import Granularity, Method, ScalingConfig
from trainer.health.alerts import Alert, Entry, Rule, in_fp8


class _ScaleJump(Rule):
    """A tensor's scale leaves, within `RECENT` lines and by a factor, its range in the lines before.

    The reference is a range, not a median: after delayed scaling forgets an outlier, the scale returns to where it was.
    """

    LINES, RECENT, FEWEST = 50, 5, 20
    falls: bool
    does: str
    advice: str

    def __init__(self, times: float):
        self._times = times
        self._past: list[tuple[int, np.ndarray]] = []

    def another_precision(self) -> None:
        """Forget all scales: a format's largest value is a factor of them."""
        self._past = []

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        rows, amaxes = _rows(tensors, "fp8", "scale"), _rows(tensors, "fp8", "amax")
        if not rows:
            return None
        # logarithms, mirrored for a rise: a wrong scale is always far below the least
        sign = 1.0 if self.falls else -1.0
        now = np.array([sign * math.log2(scale) if scale > 0 else math.nan for scale in rows.values()])
        self._past = [(at, row) for at, row in self._past if at < step and len(row) == len(now)]
        self._past = [*self._past, (step, now)][-self.LINES - self.RECENT :]
        before = self._past[: -self.RECENT]
        if len(before) < self.FEWEST - self.RECENT:
            return None
        since = before[-1][0]
        past = np.array([row for _, row in before])
        known = np.isfinite(past).sum(0) >= self.FEWEST - self.RECENT
        least = np.where(np.isfinite(past), past, np.inf).min(0)
        fell = np.where(known & np.isfinite(now), least - now, -np.inf)
        names = list(rows)
        worst = [(names[i], 2.0 ** float(fell[i])) for i in np.argsort(-fell) if fell[i] > math.log2(self._times)]
        return [
            self._alert(step, step - since, name, times, rows[name], amaxes.get(name, math.nan))
            for name, times in worst
        ]

    def _alert(self, step: int, steps: int, name: str, times: float, scale: float, amax: float) -> Alert:
        message = (
            f"scale of {name} {self.does} {times:.3g}-fold in {steps} steps (scale {scale:.3g}, amax {amax:.3g}): "
            f"{self.advice}, or keep this tensor in BF16 (precision.rules.exceptions)"
        )
        return Alert(self.name, step, message, times, self._times, tensor=name)


class ScaleDrop(_ScaleJump):
    """The amax explodes."""

    name, falls, does = "scale_drop", True, "fell"
    advice = "NaN may follow; lower optim.lr"


class ScaleRise(_ScaleJump):
    """The amax collapses."""

    name, falls, does = "scale_rise", False, "rose"
    advice = "its values collapse and may underflow; look at its block's gradients"


class _Twice(Rule):
    """A tensor or block is above the threshold in two consecutive sampled steps, of which the first is after `SETTLED`
    steps."""

    SETTLED = 0
    group: str
    key: str

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._before: set[str] = set()

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        rows = _rows(tensors, self.group, self.key)
        if not rows:
            return None
        found = {name: value for name, value in rows.items() if value > self._threshold}
        again = self._before & found.keys()
        self._before = set(found) if step > self.SETTLED else set()
        return [self._alert(step, name, found[name]) for name in sorted(again, key=lambda name: -found[name])]

    def _alert(self, step: int, name: str, value: float) -> Alert:
        raise NotImplementedError


class _CastShare(_Twice):
    """A cast loses a share of a tensor's elements. A run's first steps do not count: scales have no history yet and
    values move fast. scaling: of the run's plan, if known."""

    SETTLED = 100
    group = "fp8"
    does: str
    reason: str
    recipe: str

    def __init__(self, share: float, scaling: ScalingConfig | None = None):
        super().__init__(share)
        self._scaling = scaling

    def _helps(self, name: str) -> bool:
        """Return whether `recipe` has scales for a tensor that the run does not have."""
        raise NotImplementedError

    def _alert(self, step: int, name: str, share: float) -> Alert:
        other = f"{self.recipe}, or " if self._helps(name) else ""
        message = (
            f"{100 * share:.3g} % of {name} {self.does} (health.alerts.{self.name}={self._threshold:g}); "
            f"{self.reason}: {other}keep this tensor in BF16 (precision.rules.exceptions)"
        )
        return Alert(self.name, step, message, share, self._threshold, tensor=name)


class Saturated(_CastShare):
    """Elements are clipped at the format's largest value: the scale lags behind the amax."""

    name = key = "saturated"
    does = "is clipped in its cast to FP8"
    reason, recipe = "its amax grows faster than its scale follows", "use current scaling (+recipe=fp8_jit)"

    def _helps(self, name: str) -> bool:
        return self._scaling is None or self._scaling.method is Method.delayed


class Underflown(_CastShare):
    """Elements become zero: a few large values hold the scale down."""

    name = key = "underflown"
    does = "becomes zero in its cast to FP8"
    reason, recipe = "a few large values hold its scale down", "use finer scales (+recipe=fp8_block)"

    def _helps(self, name: str) -> bool:
        coarse = self._scaling is None or self._scaling.granularity is not Granularity.block
        return coarse and ".attn.core" not in name  # one scale a tensor in every recipe


class MaxLogit(_Twice):
    """Attention logits grow, as queries and keys do without a norm."""

    name, group, key = "max_logit", "blocks", "max_logit"

    def _alert(self, step: int, name: str, top: float) -> Alert:
        message = (
            f"the largest attention logit of {name} is {top:.4g} "
            f"(health.alerts.max_logit={self._threshold:g}): q and k grow without bound, and attention collapses onto "
            "single tokens; set optim.qk_clip=100, or lower optim.lr"
        )
        return Alert(self.name, step, message, top, self._threshold, block=name)


class Kurtosis(Rule):
    """FOG's signal (arXiv 2505.20524): kurtosis that grows faster than linearly over steps, long before the loss shows
    it.

    A power law log k = p log step + c is fitted by least squares to the last 8, 16, 32, ... samples within the later
    half of the run: short fits detect what has just begun, long ones what is slow. Wrong: p exceeds the threshold by
    three of its standard errors, k grew by half over the fit, and k is far from that of a Gaussian, 3. The first
    samples do not count: kurtosis rises fast while a model starts to learn. At most one sample every 100 steps counts.
    """

    name = "kurtosis_power"
    WHERE: ClassVar = {
        "kurtosis_qkv": "the QKV output",
        "kurtosis_ffn": "the FFN's second linear's input",
        "kurtosis_block": "the block output",
    }
    MOST_KEPT, FEWEST, FIRST, GREW, HIGH = 128, 8, 16, 1.5, 6.0
    APART = 100

    def __init__(self, power: float):
        self._power = power
        self._past: list[tuple[int, list[float]]] = []
        self._seen, self._last = 0, -self.APART

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        if self._last <= step < self._last + self.APART:
            return None
        rows = {
            f"{block}:{kind}": value for kind in self.WHERE for block, value in _rows(tensors, "blocks", kind).items()
        }
        if not rows:
            return None
        names, now = list(rows), list(rows.values())
        self._last = step
        self._seen += 1
        if self._seen <= self.FIRST:
            return None
        self._past = [(at, row) for at, row in self._past if at < step and len(row) == len(now)]
        self._past.append((step, now))
        if len(self._past) > self.MOST_KEPT:  # keep every other one of the older half
            half = self.MOST_KEPT // 2
            self._past = self._past[:half:2] + self._past[half:]
        within = [(at, row) for at, row in self._past if at >= step / 2]
        found: dict[int, tuple[float, float, int]] = {}
        count = self.FEWEST
        while count <= len(within):
            steps, values = zip(*within[-count:], strict=True)
            for i, power, grew in self._grows(np.array(steps, float), np.array(values, float)):
                found.setdefault(i, (power, grew, steps[0]))
            count *= 2
        worst = sorted(found, key=lambda i: -now[i])
        return [self._alert(step, metrics, names[i], now[i], *found[i]) for i in worst]

    def _grows(self, steps: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, float, float]]:
        """Yield (column, power, growth) for the columns of values [samples, columns] that are wrong."""
        values = np.where(values > 0, values, np.nan)
        x = np.log(steps) - np.log(steps).mean()
        y = np.log(values)
        y = y - y.mean(0)
        sxx = (x * x).sum()
        power = x @ y / sxx
        rest = y - x[:, None] * power
        error = np.sqrt((rest * rest).sum(0) / (len(x) - 2) / sxx)
        grew = np.exp(power * (x[-1] - x[0]))
        wrong = (power - 3 * error > self._power) & (grew > self.GREW) & (np.median(values[-3:], 0) > self.HIGH)
        for i in np.flatnonzero(wrong):  # excludes columns with a NaN
            yield int(i), float(power[i]), float(grew[i])

    def _alert(self, step: int, metrics: Entry, name: str, now: float, power: float, grew: float, since: int) -> Alert:
        block, _, kind = name.partition(":")
        message = (
            f"kurtosis of {self.WHERE[kind]} of {block} is {now:.3g}: it grew {grew:.3g}-fold since step {since}, "
            f"as step^{power:.2g}, faster than linearly: outliers are forming, and divergence follows; "
            f"lower optim.lr{in_fp8(metrics, ', or resume in BF16 from an earlier checkpoint')} (docs/health.md)"
        )
        return Alert(self.name, step, message, power, self._power, block=name)


class _Experts(Rule):
    """A block is wrong for `LINES` consecutive lines and at least `STEPS` steps. First steps do not count: a router has
    to settle."""

    LINES, STEPS, SETTLED = 10, 100, 200
    key: str
    above: bool
    words: str

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._wrong: dict[str, tuple[int, int]] = {}  # by block: consecutive lines, and the step of the first

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        rows = _rows(tensors, "moe", self.key)
        if step <= self.SETTLED or not rows:
            return None
        before, self._wrong, found = self._wrong, {}, []
        for name, value in rows.items():
            if not (value > self._threshold if self.above else value < self._threshold):
                continue
            lines, since = before.get(name, (0, step))
            lines, since = (lines, since) if since <= step else (0, step)  # the run was rewound
            self._wrong[name] = lines + 1, since
            if lines + 1 >= self.LINES and step - since >= self.STEPS:
                found.append(self._alert(step, name, value, step - since))
        return sorted(found, key=lambda alert: alert.value, reverse=self.above)

    def _alert(self, step: int, name: str, value: float, steps: int) -> Alert:
        message = (
            f"{self.words.format(name, value)} for {steps} steps "
            f"(health.alerts.{self.name}={self._threshold:g}): few experts learn; start a new run from its weights "
            "(run.init_from) with a higher model.balance_loss_weight or, with sigmoid scoring, "
            "model.router_bias_update_rate"
        )
        return Alert(self.name, step, message, value, self._threshold, block=name)


class ExpertLoad(_Experts):
    """One expert gets most tokens."""

    name, key, above = "expert_load", "load_max_over_mean", True
    words = "the fullest expert of {} gets {:.3g} times the mean,"


class ExpertEntropy(_Experts):
    """Many experts get almost no tokens."""

    name, key, above = "expert_entropy", "entropy", False
    words = "entropy of the experts' load of {} is {:.3g} of an even one's"


def _rows(tensors: Entry | None, group: str, key: str) -> dict[str, float]:
    """Return the values of one statistic in an entry of tensors.jsonl by name, None as NaN; {} without it."""
    if tensors is None:
        return {}
    names, values = tensors["names"].get(group, []), tensors.get(group, {}).get(key) or []
    if len(names) != len(values):
        return {}
    return {name: math.nan if value is None else float(value) for name, value in zip(names, values, strict=True)}
