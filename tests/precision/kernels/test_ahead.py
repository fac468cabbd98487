"""Kernels of traced operators are compiled elsewhere, for the very specialisations that are launched later."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is missing")

# A GPU is not needed to compile for one: the driver is this stub, and launches stop short of it.
PROGRAM = """
import subprocess
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from precision import observe, operators
from precision.config import Granularity
from precision.formats import E4M3
from precision.kernels import ahead, ops
from precision.kernels.common import MODES, Cast

compiled = []

class Hopper:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
FakeTensor.is_cuda = True
knobs.compilation.listener = lambda src, cache_hit, **_: compiled.append((src.fn.__name__, cache_hit))
ahead.compile_ahead()
how = Cast(E4M3, MODES[Granularity.tensor], True, 0, False).text

def arguments(scale=1, amax=4):  # where they are in the arena: at multiples of 16 bytes or not
    arena = torch.empty(8)
    return torch.empty(256, 256, dtype=torch.bfloat16), *(arena.as_strided((), (), i) for i in (scale, amax)), how

def trace(operator):
    with FakeTensorMode(), observe.sampling(lambda *_: print("shown")):
        operator(*arguments())
    assert FakeTensor.data_ptr is torch.Tensor.data_ptr and compiled == []

trace(ops.cast_transposed)
server = operators.on_trace._server
server.stdin.close()
assert server.wait() == 0
started = []
ahead._serve = lambda: started.append(1) or subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
trace(ops.cast_transposed)
assert not started, "nothing is new"
trace(ops.cast)
assert started, "one that has ended is started again"

launch = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **more: launch(self, *args, grid=grid, warmup=True, **more)
ops.cast_transposed(*arguments())  # real tensors: what a step launches
assert compiled == [(f"_{name}_kernel", True) for name in ("amax", "tensor_transposed")], compiled
ops.cast_transposed(*arguments(4, 1))
assert not compiled[-1][1], "another specialisation is another kernel"
"""


def test_kernels_are_compiled_while_an_operator_is_traced(tmp_path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
