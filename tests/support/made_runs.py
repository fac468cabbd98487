"""Run folders as the trainer writes them, made up: thousands of steps in a moment, something of everything in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainer.health.dashboard.read import Run

LOOK, SHADOW, EVALUATION = 100, 250, 200
"""Steps between looks inside, shadows and evaluations."""
NAMES = {
    "blocks": [*(f"layers.{i}" for i in range(8)), "mtp.0"],
    "moe": [*(f"layers.{i}.moe" for i in range(1, 8)), "mtp.0.moe"],
    "fp8": [
        f"{block}.{op}:{side}"
        for block in [*(f"layers.{i}" for i in range(8)), "mtp.0"]
        for op in ("attn.q", "attn.kv_b", "attn.o", "moe.shared.gate_up", "moe.experts.gate_up", "moe.experts.down")
        for side in ("input", "weight", "grad")
    ],
}
EXPERTS = 64


def make_run(
    folder: Path, steps: int = 4000, every: int = 2, goal: int | None = None, seed: int = 1, recipe: str = "fp8_delayed"
) -> Path:
    """Write a run of `steps` steps, logged every `every`-th; it was to have `goal` steps. Returns the folder."""
    folder.mkdir(parents=True)
    config = {
        "run": {"name": folder.name},
        "trainer": {"max_steps": goal or steps, "seed": seed, "global_batch_size": 256, "sequence_length": 4096},
        "model": {"num_layers": 8, "hidden_size": 2048, "num_experts": EXPERTS},
        "precision": {"name": recipe},
        "logging": {"every": every},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "overrides.txt").write_text(f"+recipe={recipe}\nmodel=moonlight_16b\nrun.name={folder.name}\n")
    (folder / "environment.json").write_text(json.dumps({"gpus": ["NVIDIA H200"] * 8, "cpus": 64}))
    write(folder / "metrics.jsonl", metrics(steps, every, seed, recipe))
    if recipe.startswith("fp8"):
        write(folder / "tensors.jsonl", tensors(steps, every, seed))
    write(folder / "events.jsonl", events(steps))
    return folder


def write(path: Path, entries: Iterator[dict[str, Any]]) -> None:
    """JSON lines, added to what is there."""
    with path.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def digits(values: np.ndarray) -> list[float]:
    """As in tensors.jsonl: 4 significant digits."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def metrics(steps: int, every: int, seed: int, recipe: str, first: int = 0) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl. A loss that falls, one spike of a single step, a throttled hour."""
    draw = np.random.default_rng(seed)
    worse = 0.004 if recipe.startswith("fp8") else 0.0
    order = np.random.default_rng(7)  # the data are the same for all
    for step in range(first + every, first + steps + 1, every):
        noise = order.normal(0, 0.035) + draw.normal(0, 0.002)
        lm = 1.9 + worse + 9.1 * (1 + step / 25) ** -0.72 + noise
        norm = 0.25 + 6 * (1 + step / 20) ** -0.8 + abs(draw.normal(0, 0.03))
        if step == steps // 2:
            lm, norm = lm + 3.0, 85.0
        hot = 0.62 * steps < step < 0.7 * steps
        rate = (0.82 if hot else 1) * 118_000 * (1.25 if worse else 1) * (1 + draw.normal(0, 0.006))
        watts = 8 * (610 if hot else 690) + draw.normal(0, 25)
        line: dict[str, Any] = {
            "step": step, "tokens": step * 256 * 4096, "loss/total": lm * 1.31, "loss/lm": lm, "loss/mtp": lm * 1.03,
            "loss/balance": 1.2e-4 + abs(draw.normal(0, 1e-5)), "optim/grad_norm": norm,
            "optim/lr": 3e-4 * min(step / 200, 1), "optim/param_norm": 220 + 40 * (1 - np.exp(-step / 2000)),
            "optim/update_ratio": 2e-3 * (1 + step / 100) ** -0.5,
            "moe/load_max_over_mean": 1.3 + 2 * np.exp(-step / 150) + abs(draw.normal(0, 0.05)),
            "moe/load_max_over_mean_worst": 1.8 + 5 * np.exp(-step / 150) + abs(draw.normal(0, 0.2)),
            "moe/entropy": 0.985 - 0.2 * np.exp(-step / 150), "moe/entropy_worst": 0.95 - 0.4 * np.exp(-step / 150),
            "moe/bias_max": 0.05 * (1 - np.exp(-step / 900)), "recovery/skipped_steps": 3 if step > steps // 2 else 0,
            "recovery/spikes": 0, "recovery/rewinds": 0, "data/skipped_shards": 0,
            "perf/tokens_per_second": rate, "perf/step_seconds": 256 * 4096 / rate, "perf/tflops_per_gpu": rate / 290,
            "perf/mfu": rate / 290 / 989, "memory/peak_gib": 96.2, "memory/allocated_gib": 61 + draw.normal(0, 0.1),
            "gpu/power_watts": watts, "gpu/joules_per_token": watts / rate,
            "gpu/joules_per_step": watts / rate * 256 * 4096, "gpu/temperature_c": 61 + 12 * hot + draw.normal(0, 0.8),
            "gpu/memory_temperature_c": 74 + 14 * hot + draw.normal(0, 0.8), "gpu/clock_mhz": 1980 - 400 * hot,
            "gpu/throttled_share": 0.8 if hot else 0.0, "gpu/tokens_lost": 0 if step < 0.62 * steps else 4e6,
        }  # fmt: skip
        if worse:
            line |= {"fp8/scale_max": 2.0**14, "fp8/scale_min": 2.0**3, "fp8/amax_max": 20 + norm}
            if step % LOOK == 0:
                line |= {
                    "fp8/saturated_worst": 1e-5 * draw.random(), "fp8/underflown_worst": 0.04 + 0.01 * draw.random(),
                    "fp8/error_mean": 0.021, "fp8/error_worst": 0.03 + 0.004 * draw.random(),
                    "act/kurtosis_qkv": 4 + step / 800, "act/kurtosis_ffn": 30 + step / 40,
                    "act/kurtosis_block": 6 + step / 500,
                }  # fmt: skip
            if step % SHADOW == 0:
                line |= {
                    "shadow/loss_gap": draw.normal(8e-4, 4e-4),
                    "shadow/cosine_mean": 0.9985,
                    "shadow/cosine_worst": 0.991,
                }
        line["unheard/of"] = step % 7
        yield line
        if step % EVALUATION == 0:
            yield {"step": step, "loss/validation": 1.93 + worse + 9.1 * (1 + step / 25) ** -0.72}


def tensors(steps: int, every: int, seed: int, first: int = 0) -> Iterator[dict[str, Any]]:
    """Lines of tensors.jsonl. One tensor's scale falls at the spike, another one's drifts."""
    draw = np.random.default_rng(seed)
    fp8, blocks, moe = (len(NAMES[key]) for key in ("fp8", "blocks", "moe"))
    base = draw.normal(0, 2.5, fp8)
    load = draw.gamma(12, 1, (moe, EXPERTS))
    yield {"names": NAMES}
    for step in range(first + every, first + steps + 1, every):
        amax = 2 ** (base + 1.5 * np.exp(-step / 300) + draw.normal(0, 0.15, fp8))
        if abs(step - steps // 2) < 8:
            amax[40:43] *= 60
        amax[77] *= 2 ** (3 * step / steps)
        line: dict[str, Any] = {
            "step": step,
            "fp8": {"scale": digits(2.0 ** np.floor(np.log2(448 / amax))), "amax": digits(amax)},
            "moe": {
                "load_max_over_mean": digits(1.3 + 3 * np.exp(-step / 150) + np.abs(draw.normal(0, 0.1, moe))),
                "entropy": digits(0.985 - 0.3 * np.exp(-step / 150) - np.abs(draw.normal(0, 0.003, moe))),
                "bias_max": digits(np.linspace(0.02, 0.05, moe) * (1 - np.exp(-step / 900))),
            },
        }
        if step % LOOK == 0:
            share = np.where(draw.random(fp8) < 0.9, 0.0, 1e-5 * draw.random(fp8))
            line["fp8"] |= {
                "saturated": digits(share),
                "underflown": digits(0.04 * draw.random(fp8)),
                "error": digits(0.02 + 0.01 * draw.random(fp8)),
            }
            growth = np.linspace(1, 2, blocks)
            line["blocks"] = {
                "kurtosis_qkv": digits(3 + growth * step / 900), "kurtosis_ffn": digits(20 + growth**3 * step / 90),
                "kurtosis_block": [None, *digits(5 + growth[1:] * step / 600)],
            }  # fmt: skip
            line["load"] = np.round(load * 4096 * (1 + 0.1 * draw.random((moe, EXPERTS)))).astype(int).tolist()
        if step % SHADOW == 0:
            line["shadow"] = {"cosine": {name: float(f"{1 - 0.01 * draw.random():.4g}") for name in NAMES["blocks"]}}
        yield line


def events(steps: int) -> Iterator[dict[str, Any]]:
    """Lines of events.jsonl: one of each kind, and many checkpoints."""
    middle, hot = steps // 2, int(0.62 * steps)
    place = {"module": "layers.2.attn.o"}
    skipped = f"step {middle - 3} is not finite, first at layers.2.attn.o (backward); it is skipped"
    norm = {"rule": "grad_norm_spike", "value": 85, "threshold": 2.7}
    fell = {"rule": "scale_drop", "tensor": "layers.4.attn.kv_b:grad"}
    found: list[tuple[int, str, str, dict[str, Any]]] = [
        (step, "checkpoint", f"saved step_{step:08d} (31.2 GiB in 9.4 s; training waited 0.21 s)", {})
        for step in range(500, steps, 500)
    ]
    found += [
        (middle - 3, "nonfinite", skipped, place),
        (middle, "spike", "grad norm 85 is 312 times the median of the last 200 steps; step skipped", {"value": 85}),
        (middle, "alert", "grad norm 85 against a limit of 2.7: replay the step", norm),
        (middle + 4, "rollback", f"back to step {middle - 200}, over the data that broke it", {}),
        (middle + 5, "resume", f"resumed from step_{middle:08d}", {}),
        (hot, "throttle", "GPU 3 runs at 1580 of 1980 MHz: thermal slowdown", {"rank": 3}),
        (hot + 40, "alert", "scale of layers.4.attn.kv_b:grad fell 64 times in 10 steps", fell),
        (int(0.8 * steps), "data", "shard 17 is damaged: skipped", {}),
        (int(0.9 * steps), "unheard_of", "<img src=x onerror=alert(1)> is text", {}),
    ]
    for minute, (step, kind, message, what) in enumerate(sorted(found, key=lambda event: event[0])):
        time = f"2026-11-21T{10 + minute // 60:02}:{minute % 60:02}:00.000+00:00"
        yield {"time": time, "step": step, "kind": kind, "message": message, **what}


def continue_run(folder: Path, first: int, steps: int) -> None:
    """Write to a run's files what `steps` more steps after `first` bring."""
    write(folder / "metrics.jsonl", metrics(steps, 2, 1, "fp8_delayed", first))
    write(folder / "tensors.jsonl", tensors(steps, 2, 1, first))


def opened(folder: Path) -> Run:
    """A run as read so far."""
    run = Run(folder)
    run.poll()
    return run
