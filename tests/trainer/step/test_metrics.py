"""What leaves the device in one copy is what was there; tokens per second."""

import pytest
import torch

from trainer.step.metrics import Throughput, bf16_peak, copy_to_host


def test_numbers_of_any_shape_and_format_keep_their_names_and_order() -> None:
    tensors = {
        "b": torch.tensor(1.5),
        "count": torch.tensor([[2**40 + 1, 2], [3, 4]]),
        "a": torch.tensor(0.1, dtype=torch.float64),
        "ok": torch.tensor(True),
        "none": torch.zeros(0, 4),
        "c": torch.tensor([2.5, -1.0], requires_grad=True),
    }
    told = copy_to_host(tensors)
    assert list(told) == list(tensors)
    assert told == {
        "b": 1.5, "count": [[2**40 + 1, 2], [3, 4]], "a": 0.1, "ok": 1.0, "none": [], "c": [2.5, -1.0]
    }  # fmt: skip
    assert copy_to_host({}) == {}


def test_tokens_per_second_of_a_run_are_the_median_without_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    rates = Throughput(1e9, torch.device("cpu"))
    assert rates.median == 0
    for tokens, seconds, median in ((100, 50.0, 2), (100, 1.0, 100), (300, 1.0, 200), (200, 1.0, 200)):
        rates.step(tokens)
        now += seconds
        with rates.paused(wait=True):
            now += 7
        assert rates.read()["perf/tokens_per_second"] == tokens / seconds
        assert rates.median == median


def test_flops_between_two_readings_are_those_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    rates = Throughput(1e12, torch.device("cpu"))
    rates.step(3)
    rates.flops_per_token = 2e12  # the next phase has longer sequences
    rates.step(1)
    now += 2.0
    assert rates.read()["perf/tflops_per_gpu"] == (3 * 1 + 1 * 2) / 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2250e12), ("NVIDIA GB200", 2500e12),
        ("NVIDIA RTX A1000", None), ("NVIDIA H20", None),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_gpu(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    assert bf16_peak(torch.device("cuda")) == peak
