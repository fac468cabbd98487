"""Tokens per second of steps that the GPU runs after the host has gone on."""

import time

import torch

from trainer.step.metrics import Throughput


def test_steps_that_run_when_a_pause_begins_count() -> None:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = Throughput(1.0, torch.device("cuda"))
    begun.record()
    torch.cuda._sleep(500_000_000)
    ended.record()
    rates.step(1)
    with rates.paused(wait=True):
        time.sleep(0.5)
    seconds = rates.read()["perf/step_seconds"]
    assert 0.99 < seconds / (begun.elapsed_time(ended) / 1e3) < 1.5
