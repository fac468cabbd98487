"""Two GPUs that write tokens into each other's memory, or send them in slots over NCCL, compute what the all-to-all way
does, bit for bit; no host waits, and a CUDA graph holds it: the checks of scripts/bench/dispatch.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[3] / "scripts" / "bench" / "dispatch.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ways_of_tokens_to_experts_give_the_same_bits(start_ranks: Callable[..., None]) -> None:
    words = "--hidden", "512", "--width", "272", "--experts", "16", "--tokens", "1000", "--repeat", "50"
    start_ranks(BENCH, 2, *words, "--skip-times")
