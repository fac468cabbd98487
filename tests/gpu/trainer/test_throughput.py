"""Tokens per second of steps that the GPU runs after the host has gone on."""

import time

import torch

from trainer.step.metrics import Throughput


def test_steps_that_run_when_a_pause_begins_count() -> None:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates, pause = Throughput(1.0, torch.device("cuda")), 1.0
    begun.record()
    torch.cuda._sleep(500_000_000)
    ended.record()
    rates.step(1)
    with rates.paused(wait=True):
        time.sleep(pause)
    step = begun.elapsed_time(ended) / 1e3
    assert 0.99 * step < rates.read()["perf/step_seconds"] < step + pause
