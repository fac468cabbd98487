"""Kernels of traced operators compile in threads, for the very specialisations that are launched later."""

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is missing")

# A GPU is not needed to compile for one: the driver is this stub, and launches stop short of it.
PROGRAM = """
import threading
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from precision import operators
from precision.config import Granularity
from precision.formats import E4M3
from precision.kernels import ops
from precision.kernels.ahead import compile_ahead
from precision.kernels.common import MODES, Cast

launchers, compiled = [], []
names = ["_amax_kernel", "_tensor_kernel", "_tensor_transposed_kernel"]

class Hopper:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    launcher_cls = lambda self, source, metadata: launchers.append(metadata.name)

driver.set_active(Hopper())
FakeTensor.is_cuda = True
knobs.compilation.listener = lambda src, **_: compiled.append((src.fn.__name__, threading.current_thread().name))
compile_ahead()
how = Cast(E4M3, MODES[Granularity.tensor], True, 0, False).text

def arguments(scale=1, amax=4):  # where they are in the arena: at multiples of 16 bytes or not
    arena = torch.empty(8)
    return torch.empty(256, 256, dtype=torch.bfloat16), *(arena.as_strided((), (), i) for i in (scale, amax)), how

with FakeTensorMode():
    for _ in range(2):
        ops.cast_transposed(*arguments())
    ops.cast(*arguments())
    assert FakeTensor.data_ptr is torch.Tensor.data_ptr
operators.on_trace._threads.shutdown()
assert sorted(name for name, _ in compiled) == sorted(launchers) == names, (compiled, launchers)
assert all(thread.startswith("compile-ahead") for _, thread in compiled), compiled

launch, before = JITFunction.run, len(compiled)
JITFunction.run = lambda self, *args, grid, warmup, **more: launch(self, *args, grid=grid, warmup=True, **more)
ops.cast_transposed(*arguments())  # real tensors: what a step launches
assert len(compiled) == before, compiled[before:]
ops.cast_transposed(*arguments(4, 1))
assert len(compiled) > before, "another specialisation is another kernel"
"""


def test_kernels_are_compiled_while_an_operator_is_traced(tmp_path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
