"""Blocks whose kernels are ours, compiled, give what they give uncompiled; with experts spread over processes, too.

On a CPU, in Triton's interpreter; torch's own FP8 product knows one scale a tensor there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.block import MoEBlock
from precision import Plan, PrecisionConfig, begin_step, bind, topk_experts
from precision.hardware import Gpu
from trainer.config.schema import Recompute
from trainer.parallel.blocks import parallelize

PRECISIONS = Path(__file__).parents[3] / "configs" / "precision"
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 128, "num_layers": 2, "num_heads": 2, "kv_lora_rank": 32}
SIZES |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 128}
SIZES |= {"moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_token": 1, "num_mtp_layers": 0}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def step(group: Any, compiled: bool, **sizes: Any) -> dict[str, Tensor]:
    """Loss, gradients and amaxes of a step. sizes: other ones of the model."""
    torch._dynamo.reset()
    base = OmegaConf.structured(PrecisionConfig), OmegaConf.load(PRECISIONS / "fp8_delayed.yaml")
    precision = OmegaConf.to_object(OmegaConf.merge(*base, OmegaConf.from_dotlist(["backend=cuda"])))
    config = ModelConfig(**SIZES | sizes)
    plan = Plan(precision, config.num_layers, Gpu("NVIDIA H200", (9, 0)))  # type: ignore[arg-type]
    model = DeepSeek(config, plan)
    model.init_weights(seed=0)
    for _, block in model.iter_blocks():
        if group is not None and isinstance(block, MoEBlock):
            block.moe.spread(group)
    arena = bind(model, plan, torch.device("cpu"))
    parallelize(model, Recompute.none, compiled, "aot_eager")
    tokens = torch.randint(0, 128, (1, 10), generator=torch.Generator().manual_seed(1))
    begin_step(model, arena)
    total = model(tokens).total
    total.backward()
    made = {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), "amax": arena.amax, **made}


def test_compiled_blocks_compute_the_same(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_experts, "has_kernel", lambda score: True)
    plain, compiled = step(None, False), step(None, True)
    assert plain.keys() == compiled.keys()
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    experts = {"num_layers": 1, "num_dense_layers": 0}
    plain, spread = step(None, False, **experts), step(group, True, **experts)
    assert plain.keys() == spread.keys()
    for name in plain:
        assert torch.equal(spread[name], plain[name]), f"{name}: a group of one sends all rows to itself, in order"
