"""Ranks that share a model train it as one process does: the same losses, scales and verdicts, for every layout.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hydra import compose, initialize_config_dir

from trainer.build import build_engine
from trainer.config import Config, load
from trainer.distributed import World
from trainer.trainer import train_step

CONFIGS = Path(__file__).parents[3] / "configs"
STEPS = 20
RUN = ["trainer.device=cpu", "precision.backend=reference", f"trainer.max_steps={STEPS}", "optim.warmup_steps=2"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=32", "optim.lr=3e-3"]
RUN += ["model.vocab_size=512", "model.hidden_size=128", "data=text", "data.path=."]


class Case(NamedTuple):
    """A run. keys: overrides. spoil: the rank whose loss is not a number in step 3."""

    keys: tuple[str, ...]
    steps: int = STEPS
    spoil: int | None = None


FSDP, HSDP, EP = ("parallel=fsdp",), ("parallel=hsdp", "parallel.shard=2"), ("parallel=fsdp", "parallel.expert=2")
FP32, BF16 = "precision=fp32", "precision=bf16"
FP8 = "precision=fp8_delayed", "precision=fp8_jit", "precision=fp8_block"
EACH = "parallel.reduce_each_microbatch=true"
CASES = {
    1: {name: Case((f"precision={name}",)) for name in ("fp32", "bf16", "fp8_delayed", "fp8_jit", "fp8_block")},
    2: {
        "fsdp fp32": Case((*FSDP, FP32)),
        "fsdp fp32 each": Case((*FSDP, FP32, EACH)),
        "fsdp fp32 kept": Case((*FSDP, FP32, "parallel.reshard_after_forward=false")),
        "ep fp32": Case((*EP, FP32)),
        "fsdp bf16": Case((*FSDP, BF16)),
        **{f"fsdp {name}": Case((*FSDP, f"precision={name}")) for name in ("fp8_delayed", "fp8_jit", "fp8_block")},
        "ep fp8_delayed": Case((*EP, "precision=fp8_delayed")),
        "spoilt": Case((*FSDP, "precision=fp8_delayed"), steps=5, spoil=1),
    },
    4: {
        "fsdp fp32": Case((*FSDP, FP32)),
        "hsdp fp32": Case((*HSDP, FP32)),
        "hsdp fp32 each": Case((*HSDP, FP32, EACH)),
        "ddp fp32": Case(("parallel=hsdp", "parallel.shard=1", FP32)),
        "ep fp32": Case((*EP, FP32)),
        "ep over groups fp32": Case((*HSDP, "parallel.expert=4", FP32)),
        "hsdp fp8_delayed": Case((*HSDP, "precision=fp8_delayed")),
        "spoilt": Case((*HSDP, FP32), steps=5, spoil=2),
    },
}
Curves = dict[str, list[dict[str, float]]]


def config_of(case: Case) -> Config:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return load(compose("train", overrides=[*RUN, *case.keys]))


def train(case: Case, world: World) -> list[dict[str, float]]:
    """The metrics of each step, and what must be the same on all ranks."""
    config = config_of(case)
    engine = build_engine(config, world.device, world=world)
    generator = torch.Generator().manual_seed(3)
    lines = []
    for step in range(1, case.steps + 1):
        base = torch.randint(0, 512, (4, 1), generator=generator)
        tokens = (base + torch.arange(33) * torch.randint(1, 4, (4, 1), generator=generator)) % 512
        if case.spoil == world.rank and step == 3:
            with torch.no_grad():
                _, block = engine.model.iter_blocks()[1]
                handle = block.register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:]))
            result = train_step(engine, step, tokens, config.trainer.microbatch_size)
            handle.remove()
        else:
            result = train_step(engine, step, tokens, config.trainer.microbatch_size)
        line = {key: float(value) for key, value in result.metrics.items()}
        line["ok"], line["place"] = float(result.verdict.ok), float(result.verdict.place)
        line["scale"], line["amax"] = float(engine.arena.scale.double().sum()), float(engine.arena.amax.double().sum())
        line["norm"] = float(engine.optimizer.parameter_norm())
        line["bias"] = float(torch.stack(engine.model.router_bias).double().abs().sum())
        everyone = world.gather(line)
        assert all(str(other) == str(line) for other in everyone), "the same on every rank"
        lines.append(line)
    return lines


def main(rank: int, size: int, port: str, out: Path) -> None:
    torch.set_num_threads(1)
    world = World(torch.device("cpu"), rank, rank, size, size)
    if size > 1:
        import torch.distributed as dist

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        dist.init_process_group("gloo", rank=rank, world_size=size)
    curves = {name: train(case, world) for name, case in CASES[size].items()}
    if rank == 0:
        out.write_text(json.dumps(curves))
    if size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Curves]:
    """What each world size computed."""
    made = {}
    for size in CASES:
        out = tmp_path_factory.mktemp("ranks") / "curves.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-W", "ignore", __file__]
        ranks = [subprocess.Popen([*command, str(rank), str(size), port, str(out)]) for rank in range(size)]
        codes = [rank.wait(timeout=600) for rank in ranks]
        assert not any(codes), f"{size} ranks ended with {codes}"
        made[size] = json.loads(out.read_text())
    return made


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
