"""NVML through its real package, over a library that stands in for the driver's: which GPU, what it says, what it
refuses."""

import contextlib
import ctypes
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
import torch

from trainer.health import nvml as ours
from trainer.health.nvml import GpuLost, Unavailable, find, find_by

UUID, OTHER = "0a1b2c3d-1111-2222-3333-444455556666", "ffffffff-1111-2222-3333-444455556666"
BUS = "00000000:1b:00.0"


def test_a_gpu_is_found_by_its_uuid_whatever_its_number(nvml) -> None:
    nvml.add(f"GPU-{OTHER}")
    nvml.add(f"GPU-{UUID}").set(temperature=77)
    for spelled in (UUID, f"GPU-{UUID}"):
        gpu = find_by(spelled)
        assert (gpu.uuid, gpu.name, gpu.celsius(), gpu.sliced) == (f"GPU-{UUID}", "NVIDIA H200", 77, False)


def test_a_gpu_is_found_by_its_address_or_if_it_is_alone(nvml) -> None:
    nvml.add(f"GPU-{OTHER}")
    assert find_by(UUID).uuid == find_by("").uuid == f"GPU-{OTHER}"
    nvml.add("GPU-of another spelling", BUS)
    assert find_by(UUID, BUS).uuid == "GPU-of another spelling"
    with pytest.raises(Unavailable, match=f"no GPU with the UUID {UUID}; compare `nvidia-smi -L`"):
        find_by(UUID)


def test_a_slice_is_metered_by_the_whole(nvml) -> None:
    nvml.add(f"GPU-{OTHER}").set(power=650_000)
    nvml.add(f"MIG-{UUID}", slice_of=0)
    gpu = find_by(UUID)
    assert gpu.sliced and gpu.uuid == f"GPU-{OTHER}" and gpu.watts() == 650


def test_readings_of_a_gpu(nvml) -> None:
    nvml.add(f"GPU-{UUID}").set(energy=2**40 + 500, reasons=0x44, ecc=2, memory_temperature=85, sm_clock=1400)
    gpu = find_by(UUID)
    assert gpu.joules() == (2**40 + 500) / 1e3  # 64 bits arrive whole
    assert (gpu.watts(), gpu.limit_watts) == (500, 700)
    assert (gpu.celsius(), gpu.memory_celsius()) == (60, 85)
    assert (gpu.sm_mhz(), gpu.memory_mhz(), gpu.max_sm_mhz) == (1400, 3201, 1980)
    assert gpu.reasons() == ours.POWER_CAP | 0x40 and gpu.ecc_errors() == 2


def test_a_refused_reading_is_not_asked_again_and_the_rest_continues(nvml) -> None:
    fake = nvml.add(f"GPU-{UUID}")
    fake.refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, "energy", "memory_temperature", "reasons", "ecc", "limit")
    fake.refuse(pynvml.NVML_ERROR_NO_PERMISSION, "sm_clock")
    gpu = find_by(UUID)
    before = nvml.calls("energy")
    for _ in range(3):
        refused = (gpu.joules(), gpu.memory_celsius(), gpu.reasons(), gpu.ecc_errors(), gpu.sm_mhz(), gpu.limit_watts)
        assert refused == (None,) * 6
        assert (gpu.watts(), gpu.celsius(), gpu.memory_mhz()) == (500, 60, 3201)
    assert nvml.calls("energy") == before + 1


def test_a_passing_trouble_is_asked_again(nvml) -> None:
    fake = nvml.add(f"GPU-{UUID}")
    gpu = find_by(UUID)
    fake.refuse(pynvml.NVML_ERROR_TIMEOUT, "power")
    assert gpu.watts() is None
    fake.refuse(0, "power")
    assert gpu.watts() == 500


def test_a_board_without_the_sensor(nvml) -> None:
    nvml.add(f"GPU-{UUID}").set(memory_temperature=0)
    assert find_by(UUID).memory_celsius() is None


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_lost_gpu_is_reported(nvml, error: int) -> None:
    fake = nvml.add(f"GPU-{UUID}")
    gpu = find_by(UUID)
    fake.refuse(error)
    for ask in (gpu.joules, gpu.watts, gpu.celsius, gpu.sm_mhz, gpu.reasons, gpu.ecc_errors):
        with pytest.raises(GpuLost):
            ask()


def test_a_driver_that_is_not_there(nvml) -> None:
    nvml.fail_init(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(Unavailable, match=r"NVML cannot be used \(Driver Not Loaded\); is NVIDIA's driver installed"):
        find_by(UUID)


def test_a_library_that_is_not_there() -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has the library")
    with pytest.raises(Unavailable, match=r"NVML Shared Library Not Found"):
        find(torch.device("cpu"))


def test_reasons_are_as_nvml_numbers_them() -> None:
    p = pynvml
    assert p.nvmlClocksEventReasonSwPowerCap == ours.POWER_CAP
    assert p.nvmlClocksEventReasonSwThermalSlowdown | p.nvmlClocksEventReasonHwThermalSlowdown == ours.THERMAL
    hardware = p.nvmlClocksEventReasonHwSlowdown | p.nvmlClocksEventReasonHwPowerBrakeSlowdown
    assert hardware | p.nvmlClocksEventReasonHwThermalSlowdown == ours.HARDWARE
    assert p.nvmlClocksEventReasonGpuIdle == ours.IDLE
    harmless = p.nvmlClocksEventReasonGpuIdle | p.nvmlClocksEventReasonApplicationsClocksSetting
    assert not ours.THROTTLED & (harmless | p.nvmlClocksEventReasonDisplayClockSetting)


def test_the_benches_meter_counts_between_moves_of_the_energy_counter(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[3] / "scripts" / "bench" / "measure.py"
    spec = importlib.util.spec_from_file_location("measure_of_power", path)
    assert spec is not None and spec.loader is not None
    measure = importlib.util.module_from_spec(spec)
    sys.modules["measure_of_power"] = measure  # dataclasses look themselves up
    spec.loader.exec_module(measure)
    gpu = nvml.add(f"GPU-{UUID}")
    meter = measure.Meter()
    meter._gpu = find_by(UUID)
    now, deadline = 100.0, time.monotonic() + 60

    def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    with meter:
        for count in range(2, 7):
            now, looked = now + 0.02, nvml.calls("energy")
            wait(lambda: nvml.calls("energy") > looked + 1)  # noqa: B023 (it has seen the time)
            gpu.set(energy=gpu.struct.value[0] + 10_000)
            wait(lambda: len(meter._moves) == count)  # noqa: B023
        now += 1.0  # whatever the length of the window
    assert meter.watts == pytest.approx(10 / 0.02) and meter.megahertz == 1980
    with meter:
        now += 1.0
    assert meter.watts == 0  # the counter stands still
