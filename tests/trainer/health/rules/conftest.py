"""A long healthy run, made up: trends, noise and mishaps as real ones have them; and what the rules say of a run."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config.health import AlertsConfig
from trainer.health.alerts import Alert, Alerts
from trainer.health.rules import training_rules

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


@pytest.fixture(name="a_run")
def _a_run() -> Callable[..., Iterator[Line]]:
    return a_run


@pytest.fixture(name="alerts_with")
def _alerts_with() -> Callable[..., Alerts]:
    return alerts_with


@pytest.fixture(name="raised")
def _raised() -> Callable[..., list[Alert]]:
    return raised
