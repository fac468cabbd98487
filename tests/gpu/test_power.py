"""NVML on a real GPU: it is torch's, its numbers are of a GPU at work, and a run has them."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from composed import config_of
from run_lines import metrics

from trainer.health.nvml import Gpu, Unavailable, find
from trainer.health.power import Sampler
from trainer.trainer import Trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu() -> Gpu:
    try:
        return find(torch.device("cuda", 0))
    except Unavailable as error:
        pytest.skip(str(error))


def work(seconds: float) -> None:
    """The GPU multiplies matrices for so long."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()


def test_the_metered_gpu_is_the_one_torch_uses(gpu: Gpu) -> None:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert gpu.sliced or gpu.uuid == f"GPU-{uuid}"
    assert gpu.name in torch.cuda.get_device_name(0) or torch.cuda.get_device_name(0) in gpu.name
    print(gpu.name, gpu.uuid, "limit", gpu.limit_watts, "W, max", gpu.max_sm_mhz, "MHz")


def test_its_numbers_are_of_a_gpu_at_work(gpu: Gpu) -> None:
    s = Sampler(gpu, 0.2)
    rest = gpu.joules()
    s.start()
    work(4.0)
    reading = s.take()
    s.close()
    print(reading, "reasons", hex(gpu.reasons() or 0))
    assert reading.lost == 0
    assert 50 < reading.watts < 1000
    if gpu.limit_watts is not None:
        assert reading.watts < 1.15 * gpu.limit_watts
    assert 15 < reading.celsius < 100
    assert math.isnan(reading.memory_celsius) or 15 < reading.memory_celsius < 110
    assert 200 < reading.sm_mhz <= (gpu.max_sm_mhz or 3000)
    for share in (reading.throttled, reading.power_cap, reading.thermal, reading.hardware):
        assert math.isnan(share) or 0 <= share <= 1
    assert math.isnan(reading.speed) or 0.2 < reading.speed <= 1
    now = gpu.joules()
    if rest is not None and now is not None:
        assert 4 * 50 < now - rest < 8 * 1000


def test_energy_rises_with_the_load(gpu: Gpu, alone: None) -> None:
    spent = []
    for busy in (False, True):
        time.sleep(1.0)
        before = gpu.joules()
        if before is None:
            pytest.skip("no energy counter")
        began = time.perf_counter()
        work(2.0) if busy else time.sleep(2.0)
        after = gpu.joules()
        assert after is not None
        spent.append((after - before) / (time.perf_counter() - began))
    print("watts at rest and at work:", spent)
    assert 20 < spent[0] < spent[1] < 1000


def test_costs_of_readings_are_printed(gpu: Gpu) -> None:
    """Of interest, not a limit: the thread makes these calls, no step waits for them."""
    work(0.5)
    sensors = (gpu.joules, gpu.watts, gpu.celsius, gpu.memory_celsius)
    for call in (*sensors, gpu.sm_mhz, gpu.memory_mhz, gpu.reasons, gpu.ecc_errors):
        began = time.perf_counter()
        values = [call() for _ in range(20)]
        print(f"{call.__name__:16} {(time.perf_counter() - began) / 20 * 1e3:6.2f} ms  {values[-1]}")


def test_a_run_has_them(gpu: Gpu, tmp_path: Path) -> None:
    overrides = [
        *("+recipe=fp8_delayed", "data=text", f"data.path={ROOT / 'src'}", "data.glob='**/*.py'"),
        *("trainer.device=cuda", f"data.cache_dir={tmp_path / 'cache'}", "eval.batches=2"),
        *(f"run.dir={tmp_path / 'runs'}", "run.name=run"),
        *("trainer.max_steps=120", "logging.every=20", "checkpoint.every=0", "compile.enabled=false"),
        *("health.power.seconds=0.1", "health.power.enabled=true", "logging.console.enabled=false"),
    ]
    Trainer(config_of(overrides)).train()
    lines = metrics(tmp_path / "runs" / "run", "gpu/power_watts")
    print(json.dumps({key: value for key, value in lines[-1].items() if key.startswith("gpu/")}, indent=1))
    assert len(lines) >= 4
    for line in lines:
        assert 50 < line["gpu/power_watts"] < 1000
        joules = line["gpu/power_watts"] / line["perf/tokens_per_second"]
        assert line["gpu/joules_per_token"] == pytest.approx(joules)
