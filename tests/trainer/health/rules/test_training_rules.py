"""Rules about training: each fires on its fault, once and in good words; none does on a healthy run, made up with
trends, noise and mishaps as real ones have them."""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from precision.config import Granularity, Method, ScalingConfig
from trainer.config.health import TO_BF16, AlertsConfig
from trainer.health.alerts import Alert, Alerts
from trainer.health.rules import RULES, training_rules
from trainer.health.rules.resources import MemoryGrowth, ThroughputDrop
from trainer.health.rules.tensors import Saturated, Underflown

DEFAULTS = Path(__file__).parents[4] / "configs" / "health" / "default.yaml"
NAMES = {
    "fp8": ["layers.0.ffn.down", "layers.3.attn.o", "layers.3.attn.o:grad", "layers.3.moe.experts.down:grad"],
    "blocks": ["layers.0", "layers.3"],
    "moe": ["layers.3"],
}
Line = tuple[dict[str, Any], dict[str, Any]]
"""A line of metrics.jsonl and its line of tensors.jsonl."""
Change = Callable[[int, dict[str, Any], dict[str, Any]], None]


def a_healthy_line(step: int, draw: random.Random) -> Line:
    """Step `step` of a run of 20,000 steps: a power law, warm-up, a router that settles, an outlier now and then."""
    noise = draw.gauss
    settling = math.exp(-step / 40)
    outlier = 3.0 if draw.random() < 0.005 else 1.0
    metrics: dict[str, Any] = {
        "step": step,
        "loss/lm": 1.8 + 8 * (step + 10) ** -0.3 + noise(0, 0.04),
        "optim/grad_norm": (0.4 + 2 * math.exp(-step / 500)) * math.exp(noise(0, 0.15)) * outlier,
        "perf/tokens_per_second": 1e5 * (0.2 if step == 1 else 0.45 if step % 500 == 0 else 1 + noise(0, 0.03)),
        "perf/step_seconds": 1.3,
        "memory/peak_gib": 70.0,
        "memory/allocator_retries": 3 + step // 1000,  # an evaluation's
        "memory/allocated_gib": 40.0 + (step > 1000) * 3 + noise(0, 0.1),
    }
    # gradients shrink by 32 over the run; delayed scaling drops with an outlier, and comes back when it is forgotten
    drift = [0.0, 0.0, *2 * [5 * min(step / 4000, 1)]]
    scale = [2.0 ** round(d + 6 - (step % 700 < 100) * 2 + noise(0, 0.4)) for d in drift]
    fp8: dict[str, Any] = {"scale": scale, "amax": [448 / s for s in scale]}
    moe = {
        "load_max_over_mean": [2.2 + 9 * settling + noise(0, 0.2)],
        "entropy": [0.95 - 0.5 * settling + noise(0, 0.005)],
    }
    inside: dict[str, Any] = {"step": step, "fp8": fp8, "moe": moe}
    if step % 100 == 0:
        fp8["saturated"] = [10 ** noise(-5.5, 0.5) for _ in scale]
        fp8["underflown"] = [0.08 * math.exp(noise(0, 0.3)) for _ in scale]
        for kind, power in (("qkv", 0.3), ("ffn", 0.5), ("block", 0.7)):
            grown = [3 + 0.2 * step**power * math.exp(noise(0, 0.05)) for _ in NAMES["blocks"]]
            inside.setdefault("blocks", {})[f"kurtosis_{kind}"] = grown
        metrics["shadow/loss_gap"] = noise(0.001, 0.002)
        metrics["shadow/cosine_worst"] = 0.97 + noise(0, 0.005)
        inside["shadow"] = {"cosine": {"layers.0.ffn.down": 0.99, "layers.3.attn.o": metrics["shadow/cosine_worst"]}}
    return metrics, inside


def a_run(steps: int, change: Change | None = None, every: int = 10, seed: int = 1, first: int = 1) -> Iterator[Line]:
    """Lines of a healthy run, with a change made to each."""
    draw = random.Random(seed)
    for step in [first, *range(first - first % every + every, steps + 1, every)]:
        metrics, inside = a_healthy_line(step, draw)
        if change is not None:
            change(step, metrics, inside)
        yield metrics, inside


def alerts_with(**thresholds: Any) -> Alerts:
    """The default rules, but for these thresholds, on a GPU of 80 GiB."""
    section = yaml.safe_load(DEFAULTS.read_text())["alerts"]
    config = AlertsConfig(**{**section, **thresholds})
    alerts = Alerts(training_rules(config, 80.0), config.repeat)
    alerts.tensors({"names": NAMES})
    return alerts


def raised(lines: Iterable[Line], alerts: Alerts | None = None) -> list[Alert]:
    """What the rules say of these lines."""
    alerts = alerts or alerts_with()
    said: list[Alert] = []
    for metrics, inside in lines:
        alerts.tensors(inside)
        said += alerts.check(metrics)
    return said


Metrics = dict[str, Any]
FROM = 4000
"""The step at which things go wrong."""


@pytest.mark.parametrize(("steps", "every"), [(1500, 1), (20_000, 10), (40_000, 50)])
def test_none_fires_on_a_healthy_run(steps: int, every: int) -> None:
    """However many lines the medians are of."""
    assert raised(a_run(steps, every=every)) == []


def spike(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step == FROM:
        metrics["optim/grad_norm"] *= 12


def plateau(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step > FROM:
        metrics["loss/lm"] += 8 * FROM**-0.3 - 8 * (step + 10) ** -0.3
        metrics["optim/grad_norm"] *= 1 + (step - FROM) / 5000


def rise(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        metrics["loss/lm"] += 0.02 * (step - FROM)


def scale(times_a_line: float) -> Callable:
    def change(step: int, metrics: Metrics, inside: Metrics) -> None:
        if step > FROM:
            inside["fp8"]["scale"][2] *= times_a_line ** ((step - FROM) / 10)
            inside["fp8"]["amax"][2] = 448 / inside["fp8"]["scale"][2]

    return change


def share(key: str, value: float) -> Callable:
    def change(step: int, metrics: Metrics, inside: Metrics) -> None:
        if step >= FROM and key in inside["fp8"]:
            inside["fp8"][key][1] = value

    return change


def kurtosis(power: float) -> Callable:
    """From FROM on the FFN's grows as a power of the steps."""

    def change(step: int, metrics: Metrics, inside: Metrics) -> None:
        if step >= FROM and "blocks" in inside:
            inside["blocks"]["kurtosis_ffn"][1] *= (step / FROM) ** power

    return change


def logits(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        inside.setdefault("blocks", {})["max_logit"] = [90.0, 300.0]


def gap(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM and "shadow/loss_gap" in metrics:
        metrics["shadow/loss_gap"] = 0.05


def cosine(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM and "shadow" in inside:
        metrics["shadow/cosine_worst"] = inside["shadow"]["cosine"]["layers.3.attn.o"] = 0.5


def load(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        inside["moe"]["load_max_over_mean"][0] = 20.0


def entropy(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        inside["moe"]["entropy"][0] = 0.4


def slow(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        metrics["perf/tokens_per_second"] *= 0.5


def leak(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        metrics["memory/allocated_gib"] += 40 * (step - FROM) / 20_000


def full(step: int, metrics: Metrics, inside: Metrics) -> None:
    if step >= FROM:
        metrics["memory/peak_gib"] = 79.0


def pieces(step: int, metrics: Metrics, inside: Metrics) -> None:
    metrics["memory/allocator_retries"] += 0.5 * max(step - FROM, 0)


CASES: list[tuple[str, Callable, int, str, str | None]] = [
    ("grad_norm_spike", spike, 0, r"gradient norm .* times its median over the last 100 lines", None),
    ("loss_plateau", plateau, 3500, r"has not fallen in 3\d\d\d steps .* nor has the gradient norm", None),
    ("loss_rise", rise, 100, r"nats above its lowest.*lower optim\.lr", None),
    ("scale_drop", scale(0.25), 40, r"fell \d+-fold in \d+ steps \(scale .*, amax .*\): NaN may", NAMED := "o:grad"),
    ("scale_rise", scale(4.0), 40, r"rose \d+-fold in \d+ steps .*may underflow", NAMED),
    ("saturated", share("saturated", 0.02), 0, r"2 % of layers\.3\.attn\.o is clipped .*fp8_jit", "attn.o"),
    ("underflown", share("underflown", 0.9), 0, r"90 % of layers\.3\.attn\.o becomes zero .*fp8_block", "attn.o"),
    ("kurtosis_power", kurtosis(6.0), 1000, r"FFN.* of layers\.3 is .* grew .*-fold since step", "layers.3:"),
    ("max_logit", logits, 20, r"logit of layers\.3 is 300 .*optim\.qk_clip=100", "layers.3"),
    ("shadow_loss_gap", gap, 100, r"0\.05 nats above BF16's .* 2(\.\d)? % of it.*bf16 health.shadow_every=0", None),
    ("shadow_cosine", cosine, 100, r"layers\.3\.attn\.o to BF16's is 0\.5", "attn.o"),
    ("expert_load", load, 90, r"fullest expert of layers\.3 gets 20 times the mean.*run\.init_from", "layers.3"),
    ("expert_entropy", entropy, 90, r"load of layers\.3 is 0\.4 of an even one's.*run\.init_from", "layers.3"),
    ("throughput_drop", slow, 40, r"(49|5\d) % of the usual \d+,\d+, for \d+ seconds", None),
    ("memory_growth", leak, 2700, r"grew from 4\d\.\d\d to 4\d\.\d\d GiB .* full in about [\d,]+ steps", None),
    ("memory_full", full, 0, r"79\.0 of the GPU's 80\.0 GiB", None),
    ("allocator_retries", pieces, 40, r"fragmented: 0\.5 times a step .*recompute=selective", None),
]


@pytest.mark.parametrize(("rule", "fault", "within", "says", "about"), CASES, ids=[case[0] for case in CASES])
def test_each_fires_on_its_fault(rule: str, fault: Callable, within: int, says: str, about: str | None) -> None:
    said: list[Alert] = raised(a_run(FROM + within + 100, fault))
    assert [alert.rule for alert in said] == [rule]
    (first,) = said
    assert first.step >= FROM
    assert "\n" not in first.message and len(first.message) < 400
    assert re.search(says, first.message), first.message
    assert (about or "") in (first.tensor or first.block or "")
    assert first.what()["rule"] == rule and math.isfinite(first.value)


def test_another_speed_with_another_batch_is_no_drop() -> None:
    for is_told in (False, True):
        rule, said = ThroughputDrop(0.7), []
        for step in range(100, 4000, 100):
            if step == 2000 and is_told:
                rule.another_shape()
            rate = 1000.0 if step < 2000 else 500.0
            said += rule.check(step, {"perf/tokens_per_second": rate, "perf/step_seconds": 1.0}, None) or []
        assert bool(said) is not is_told


@pytest.mark.parametrize(("fault", "within"), [(plateau, 3500), (rise, 100), (kurtosis(6.0), 1000)])
def test_a_run_without_fp8_is_not_sent_to_bf16(fault: Callable, within: int) -> None:
    lines = list(a_run(FROM + within + 100, fault))
    (alert,), (in_fp8,) = raised(lines), raised((line | {"fp8/amax_max": 1.0}, inside) for line, inside in lines)
    assert "BF16" not in alert.message and "BF16" in in_fp8.message
    assert "recipe=bf16" not in in_fp8.message or TO_BF16 in in_fp8.message


@pytest.mark.parametrize("card_gib", [80.0, None])
def test_a_memory_snapshot_is_advised_where_there_is_one(card_gib: float | None) -> None:
    rule = MemoryGrowth(0.1, card_gib)
    said = [
        alert for metrics, _ in a_run(FROM + 2800, leak) for alert in rule.check(metrics["step"], metrics, None) or []
    ]
    assert said and ("snapshot" in said[0].message) == (card_gib is not None)


def test_each_is_off_without_a_threshold() -> None:
    names = {rule.name for rule in RULES}
    for name in names:
        assert {rule.name for rule in alerts_with(**{name: None})._rules} == names - {name}


def test_healthy_growth_of_kurtosis_is_sub_linear() -> None:
    def grows(power: float) -> list[str]:
        def change(step: int, metrics: Metrics, inside: Metrics) -> None:
            for row in inside.get("blocks", {}).values():
                row[:] = [3 + 10 * (step / 1000) ** power * (1 + 0.02 * math.sin(step)) for _ in row]

        return [alert.rule for alert in raised(a_run(10_000, change))]

    assert grows(0.5) == grows(0.8) == []
    assert set(grows(2.0)) == {"kurtosis_power"}


def test_kurtosis_is_judged_by_sampled_steps_that_are_apart() -> None:
    """A bump of some lines is no trend, whatever the interval of lines."""
    alerts, said = alerts_with(), []
    for step in range(10, 6000, 10):
        bump = 20.0 + max(0, 60 - abs(step - 4000))  # 120 steps wide
        alerts.tensors({"step": step, "blocks": {"kurtosis_qkv": [bump, bump]}})
        said += alerts.check({"step": step})
    assert said == []


def test_missing_metrics_raise_no_alert() -> None:
    """Keys that are missing, and what is there instead of numbers."""
    metrics = [
        *("loss/lm", "optim/grad_norm", "perf/step_seconds", "perf/tokens_per_second", "memory/peak_gib"),
        *("memory/allocated_gib", "memory/allocator_retries", "shadow/loss_gap", "shadow/cosine_worst"),
    ]
    nothing = {"scale": [None, math.nan, 0.0, 1.0], "amax": None, "saturated": [None] * 4, "underflown": [math.nan] * 4}
    for value in (None, math.nan, math.inf, "?"):
        lines = [({"step": i, **dict.fromkeys(metrics, value)}, {"step": i, "fp8": nothing}) for i in range(1, 300)]
        assert raised(lines) == []
    assert raised(({"step": i}, {"step": i, "blocks": {"kurtosis_qkv": [None, 4.0]}}) for i in range(1, 300)) == []


def test_a_loss_has_risen_when_three_lines_in_a_row_are_high() -> None:
    alerts = alerts_with(loss_rise=1.0)
    losses = enumerate([2.0, 2.0, 2.0, 4.0, 4.0, 2.0, 4.0, 4.0, 4.0], start=1)
    assert [a.step for step, loss in losses for a in alerts.check({"step": step, "loss/lm": loss})] == [9]


def test_experts_are_judged_by_block() -> None:
    """Two blocks that take turns are healthy. Two that stay wrong are one alert, whichever is the worse."""

    def said(loads: Callable[[int], list[float]]) -> list[Alert]:
        alerts = alerts_with()
        alerts.tensors({"names": {"moe": ["layers.1", "layers.2"]}})
        found = []
        for step in range(210, 600, 10):
            alerts.tensors({"step": step, "moe": {"load_max_over_mean": loads(step // 10 % 20)}})
            found += alerts.check({"step": step})
        return found

    assert said(lambda line: [20.0, 2.0] if line < 10 else [2.0, 20.0]) == []
    (alert,) = said(lambda line: [20.0, 10.0] if line < 10 else [10.0, 20.0])
    assert (alert.step, alert.block) == (310, "layers.2") and "for 100 steps" in alert.message


def test_a_spike_that_is_seen_does_not_hide_the_next() -> None:
    def twice(step: int, metrics: Metrics, inside: Metrics) -> None:
        if step in (2000, 2200):
            metrics["optim/grad_norm"] *= 12

    assert [alert.step for alert in raised(a_run(2500, twice))] == [2000, 2200]


def test_a_rewind_forgets_what_was_later() -> None:
    """The steps that are run again are judged by those before them, and what goes wrong again is news."""
    alerts = alerts_with()
    assert [a.rule for a in raised(a_run(FROM + 150, rise), alerts)] == ["loss_rise"]
    again = list(a_run(FROM + 150, rise, first=FROM - 500))
    assert [a.rule for a in raised(again, alerts)] == ["loss_rise"]


@pytest.mark.parametrize(("rule", "other"), [(Saturated, "fp8_jit"), (Underflown, "fp8_block")])
def test_a_cast_is_not_advised_the_scales_that_it_has(rule: type[Saturated | Underflown], other: str) -> None:
    has = ScalingConfig(method=Method.current, granularity=Granularity.block)
    for scaling, says in ((ScalingConfig(), True), (None, True), (has, False)):
        made, inside = rule(0.01, scaling), {"names": {"fp8": ["a"]}, "fp8": {rule.key: [0.5]}}
        _, (alert,) = (made.check(step, {}, inside) or [] for step in (110, 120))
        assert (other in alert.message) == says and "keep this tensor in BF16" in alert.message


def test_attention_is_not_advised_scales_that_it_cannot_have() -> None:
    rule, name = Underflown(0.01, ScalingConfig()), "layers.3.attn.core.scores:grad"
    inside = {"names": {"fp8": [name, "layers.3.attn.o:grad"]}, "fp8": {"underflown": [0.4, 0.3]}}
    rule.check(110, {}, inside)
    core, linear = rule.check(120, {}, inside) or []
    assert name in core.message and "keep this tensor in BF16" in core.message
    assert "fp8_block" in linear.message and "fp8_block" not in core.message
