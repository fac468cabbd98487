"""What Octet uses of torch's private parts stands in two files, and is there in the torch that is installed."""

import inspect
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from trainer.parallel import compiler_internals
from trainer.parallel.fsdp_internals import AllGather, ReduceScatter, end_backward, groups, let_dynamo_guard
from trainer.step.pipelined_step import _ShardedStage

ROOT = Path(__file__).parents[3]
PRIVATE = re.compile(
    r"distributed\.fsdp\.[\w.]*\b_\w+|_get_fsdp_state|_is_fsdp_managed_module|_all_gather_comm|_unsharded_param"
    r"|torch\._(dynamo|functorch|inductor|higher_order_ops)\b"
)
ALLOWED = {"fsdp_internals.py", "compiler_internals.py"}


def test_no_other_file_uses_private_parts_of_fsdp_or_of_the_compiler() -> None:
    files = [file for folder in ("src", "scripts") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if file.name not in ALLOWED and PRIVATE.search(file.read_text())] == []


@pytest.fixture(params=[(1,), (1, 1)], ids=["shared", "with replicas"])
def linear(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[nn.Module]:
    """A layer that one rank shares with itself."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names = ("replicate", "shard")[-len(request.param) :]
        linear = nn.Linear(4, 2, bias=False)
        fully_shard(linear, mesh=init_device_mesh("cpu", request.param, mesh_dim_names=names))
        yield linear
    finally:
        dist.destroy_process_group()


def test_each_private_part_of_fsdp_is_where_it_is_expected(linear: nn.Module) -> None:
    ((module, group),) = groups(linear)
    (shard,) = group.shards
    parameter, seen = next(linear.parameters()), []
    parameter.register_post_accumulate_grad_hook(seen.append)
    let_dynamo_guard(linear)
    linear(torch.ones(3, 4)).sum().backward()
    for thing in (group, shard):
        for name, member in vars(type(thing)).items():
            if isinstance(member, property):
                getattr(thing, name)
    assert module is linear and group.device.type == "cpu" and group.reduces and group.reduce_ranks.size() == 1
    assert isinstance(group.all_gather, AllGather) and isinstance(group.reduce_scatter, ReduceScatter)
    assert shard.size == shard.local.shape == shard.whole.shape == (2, 4) and shard.num_ranks == 1
    shard.add_gradient(torch.ones(8))
    assert isinstance(parameter.grad, DTensor) and torch.equal(parameter.grad.to_local(), torch.full((2, 4), 4.0))
    assert len(seen) == 2, "FSDP's own gradient, and the one that was added"
    module.unshard()
    torch.autograd.backward(shard.whole, torch.ones(2, 4))
    group.reduce()
    end_backward(linear)
    assert torch.equal(parameter.grad.to_local(), torch.full((2, 4), 5.0)), "reduced outside of a backward pass"
    assert shard.gathered
    shard.gathered = []
    assert shard.gathered == []


def test_each_part_of_a_stage_that_is_overridden_is_torchs() -> None:
    overridden = {name for name, member in vars(_ShardedStage).items() if inspect.isfunction(member)}
    assert {name for name in overridden if not hasattr(PipelineStage, name)} == {"_without_buffers"}


def test_dynamo_has_the_limit() -> None:
    before = torch._dynamo.config.recompile_limit
    try:
        compiler_internals.allow_graphs(before + 3)
        assert torch._dynamo.config.recompile_limit == before + 3
        compiler_internals.allow_graphs(1)
        assert torch._dynamo.config.recompile_limit == before + 3
    finally:
        torch._dynamo.config.recompile_limit = before


class _Turned(torch.autograd.Function):
    """Needs no C++ compiler, which takes seconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> torch.Tensor:
        return dy[0].t()


def test_a_graph_with_an_autograd_function_is_reused_by_the_next_process() -> None:
    compiler_internals.reuse_graphs()
    assert (tag := torch.compiler.config.cache_key_tag).startswith("octet-")
    compiler_internals.reuse_graphs()
    assert torch.compiler.config.cache_key_tag == tag
    counts, x = torch._dynamo.utils.counters["aot_autograd"], torch.ones(2, 3, requires_grad=True)
    with fresh_cache():
        for hits in (0, 1):
            torch._dynamo.reset()
            counts.clear()
            torch.compile(_Turned.apply, fullgraph=True)(x).sum().backward()
            assert counts["autograd_cache_hit"] == hits
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]


def test_the_advice_that_is_silenced_is_still_given(caplog: pytest.LogCaptureFixture) -> None:
    adviser = import_module(compiler_internals.ADVISER)
    assert compiler_internals.ADVICE in inspect.getsource(adviser)
    compiler_internals.silence_advice_on_recomputation()
    with caplog.at_level(logging.WARNING, compiler_internals.ADVISER):
        logging.getLogger(compiler_internals.ADVISER).warning(compiler_internals.ADVICE)
        logging.getLogger(compiler_internals.ADVISER).warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
