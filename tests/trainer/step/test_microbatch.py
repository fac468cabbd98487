"""Where no CUDA graph can be, `cuda_graph=true` is refused in one line; that graphs compute the same is tested on a
GPU."""

import re
from collections.abc import Callable

import pytest
import torch

from trainer.config import Config
from trainer.forecast.preflight import check
from trainer.step.engine import build_engine
from trainer.step.microbatch import EagerMicrobatch

Configs = Callable[..., Config]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["trainer.device=cpu"], "cuda_graph=true: trainer.device=cpu has no CUDA graphs; set cuda_graph=false"),
        (
            ["trainer.device=auto", "debug.inject={step:1,where:loss,value:nan}"],
            "cuda_graph=true: debug.inject puts a fault into one step, and a graph is the same in all; set",
        ),
    ],
)
def test_runs_that_cannot_be_cuda_graphs_are_refused(config: Configs, keys: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        check(config("cuda_graph=true", *keys))


def test_a_machine_without_a_gpu_is_refused_before_memory_is_taken(config: Configs) -> None:
    with pytest.raises(ValueError, match="cuda_graph=true: torch sees no GPU; set cuda_graph=false"):
        build_engine(config("cuda_graph=true", "trainer.device=auto"), torch.device("cpu"))


def test_auto_is_the_plain_way_without_a_gpu(config: Configs) -> None:
    made = config("cuda_graph=auto", "trainer.device=cpu")
    check(made)
    assert isinstance(build_engine(made, torch.device("cpu")).microbatch, EagerMicrobatch)
