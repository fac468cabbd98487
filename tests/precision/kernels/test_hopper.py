"""The kernels compile for Hopper on any machine: hardly a spilled register, tensor cores where there are products,
words that are settled before they are transposed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is missing")

SOURCE = Path(__file__).parents[3] / "src"
PROGRAM = '''
import re, subprocess, sys, tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class Hopper:
    """A driver that knows a GPU and has none: kernels are compiled for it, not started."""

    capability = 90

    def get_current_device(self):
        return self.capability  # with which kernels are in a cache of their own

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


driver.set_active(Hopper())
launch, seen, assembly = jit.JITFunction.run, set(), {}
disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    if kernel.hash in seen:
        return
    seen.add(kernel.hash)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([disassembler, "-res-usage", file.name], capture_output=True, text=True).stdout
    stack = int(re.search(r"STACK:(\\d+)", usage)[1])
    assert stack <= 64, (self.__name__, usage)  # bytes; more means that registers are spilled over and over
    code, name = kernel.asm["ttgir"], self.__name__
    assembly.setdefault(name, []).append(kernel.asm["ptx"])
    attends = "attention" in self.fn.__module__ and not any(kind in name for kind in ("_transpose", "_scale", "delta"))
    product = attends or any(kind in name for kind in ("_nt_", "_wgrad", "_product", "_triangle"))
    assert product or ("tt.trans" in code) == ("mov.b32" in code), self.__name__  # see kernels.common.settled
    if product:
        assert "wgmma" in kernel.asm["ptx"], self.__name__


jit.JITFunction.run = compile_only

from precision.formats import E4M3, E5M2
from precision.kernels import adamw, cast, cast_statistics, cross_entropy, fp8_attention, gradient_norms, grouped_gemm
from precision.kernels import muon, newton_schulz, norm, rotary, route, swiglu, swiglu_blocks, topk_experts
from precision.kernels import update_norms, weights
from precision.kernels.common import Cast

grouped_gemm.multiprocessors = newton_schulz.multiprocessors = lambda device: 132
R, D, F, E = 1024, 2048, 1408, 2


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def ints(*shape):
    return new(*shape, dtype=torch.int32)


def floats(*shape):
    return new(*shape, dtype=torch.float32)


one, mode = floats(), int(sys.argv[1])
to = route.Route(ints(R), floats(R), ints(R // 2, 2), ints(E), ints(E), ints(R // 128))
how, back = (Cast(fmt, mode, mode == 1, 0, mode != 1) for fmt in (E4M3, E5M2))
x8 = new(R, D, dtype=torch.float8_e4m3fn)
inv = {1: floats(), 2: floats(R, 1), 3: floats(D // 128, R).t()}[mode]
cast.cast(new(R, D), one, one, how)
cast.cast(new(R, D), one, one, back, True)
cast.transpose(x8, inv, how)
sums = new(cast_statistics.PROGRAMS, 5, dtype=torch.float64)
cast_statistics.add_cast_statistics(sums, new(R, D), x8, inv, E4M3)
cast_statistics.add_cast_statistics(sums, new(R, D), x8.view(E5M2.dtype), inv, E5M2)
master, weight_inv = floats(E, 2 * F, D), {1: floats(E), 2: floats(E, 2 * F, 1), 3: floats(E, 2 * F // 128, D // 128)}
weight8 = new(*master.shape, dtype=torch.float8_e4m3fn)
cast_statistics.add_cast_statistics(sums, master, weight8, weight_inv[mode], E4M3)
cast.gather_transposed(x8, inv, to.token, to.ends, how, True)
route.gather(x8, inv, to, how)
norm.rms_norm(new(R, D), floats(D), 1e-5, one, one, how, True)
swiglu.swiglu(new(R, 2 * F), to.weight, to.ends, one, one, how)
y8, y_inv = swiglu.swiglu(new(R, 2 * F), to.weight, to.ends, one, one, how, True)[2:]
if mode == 1:
    swiglu.swiglu_backward_tensor(new(R, F), new(R, 2 * F), to.weight, to.ends, floats(2), one, one, back, how)
    swiglu.swiglu_backward_tensor(new(R, F), y8, to.weight, to.ends, floats(2), one, one, back, how, y_inv)
    route.route(new(R, 6, dtype=torch.int64), floats(R, 6), 64, 128)
    route.combine(new(R, D), to, new(R // 2, D), floats(22, R))
    topk_experts.choose(floats(R, 64), floats(64), 6, 1, 1)
    topk_experts.choose(floats(R, 256), floats(256), 8, 8, 4)
    norm.rms_norm_backward(new(R, D), new(R, D), floats(D), floats(R))
    heads, values, table = new(1, R, 16, 192), new(1, R, 16, 128), floats(2, R, 32)
    given = heads, new(1, R, 16, 256), new(1, R, 64)
    rotary.rotate_heads(*given, table)
    rotary.rotate_heads_backward(heads, heads, values, table)
    for scale in (0.0, 32.0):
        rstd = rotary.norm_and_rotate_heads(*given, table, 1e-6, scale)[2:4]
    rotary.rotate_heads_backward(heads, heads, values, table, (*given, *rstd))
    grouped_gemm.wgrad_bf16(new(R, 2 * F), new(R, D), to)
    grouped_gemm.wgrad_bf16(new(R, D), new(R, F), to)
    grouped_gemm.wgrad_bf16(new(R, 2 * F), new(R, D), to, torch.bfloat16)
    grouped_gemm.wgrad_bf16(new(R, 144), new(R, D), to)
    grouped_gemm.nt_bf16(new(R, D), new(E, F, D), to)
    grouped_gemm.nt_bf16(new(R, D), new(E, D, F).mT, to)
    x, s, flag = new(E, F, D), new(E, F, F), torch.tensor(True)
    for newton_schulz.serves_hopper in (lambda device: True, lambda device: False):
        newton_schulz.product(x, x, s, None, floats(E), 1.0, 0.0, True)
        newton_schulz.product(s, s, s, s, floats(E), 1.0, 2.0, True)
        newton_schulz.product(s, x, x, x, floats(E), 1.0, 2.0, False)
    for slot in (x, new(E, D, F).mT):
        muon.advance(floats(E, F, D), floats(E, F, D), slot, flag, one, 0.9, True)
        muon.apply(floats(E, F, D), slot, floats(muon.programs(x)), flag, one, 1.0, 0.1)

    def count(ptx, start, width="v4.b32"):
        return sum(start in line and width in line for line in ptx.splitlines())

    p, copied = floats(D, F), (new(D, F, dtype=E4M3.dtype), floats(), floats(), floats())
    p.grad = floats(D, F)
    for moment, narrow in ((torch.float32, 0), (torch.bfloat16, 2)):
        moments = [new(D, F, dtype=moment)], [new(D, F, dtype=moment)]
        optimizer = adamw.FusedAdamW([p], *moments, [floats()], [0.1], (0.9, 0.95), 1e-8)
        optimizer.step(flag, one, one, [copied])
        wide = adamw._BLOCK // (4 * 32 * adamw._WARPS)
        # one load and one store more than an update: a skipped step reads the master, and a copy may be in BF16
        ptx = assembly["_adamw_kernel"].pop()
        assert (count(ptx, "ld.global"), count(ptx, "st.global")) == ((5 - narrow) * wide, (3 - narrow) * wide)
        halves = count(ptx, "ld.global", "v2.b32"), count(ptx, "st.global", "v2.b32")
        assert halves == (narrow * wide, (narrow + 1) * wide), f"as many elements of BF16: {halves}"
        optimizer.norms(one)
        wide = update_norms._BLOCK // (4 * 32 * update_norms._WARPS)
        # BF16 has half the bytes
        assert count(assembly["_squares_kernel"].pop(), "ld.global") == (3 - narrow / 2) * wide, "16 bytes at a time"
    gradient_norms.GradientNorms([D * F], one.device)([p.grad])
    wide = gradient_norms._BLOCK // (4 * 32 * gradient_norms._WARPS)
    assert count(assembly["_squares_kernel"].pop(), "ld.global") == wide, "16 bytes at a time"
    for dtype in (torch.bfloat16, torch.float32):
        for gradient in (True, False):
            logits, target = new(8, 163840, dtype=dtype), new(8, dtype=torch.int64)
            cross_entropy.cross_entropy_rows(logits, target, one, gradient, -100)
            assert count(assembly["_cross_entropy_kernel"].pop(), "ld.global"), "16 bytes at a time"
    Hopper.capability = 80  # which has no E4M3
    optimizer.step(flag, one, one, [(new(D, F),)])
    Hopper.capability = 75  # which has no BF16
    adamw.FusedAdamW([p], [floats(D, F)], [floats(D, F)], [floats()], [0.1], (0.9, 0.95), 1e-8).step(flag, one)
    Hopper.capability = 90
if mode == 2:
    S, bounds = 512, ints(2, 2, 512)
    dS = fp8_attention.cast_of_scores(E5M2, True, 0, False)
    for width, V in ((192, 128), (48, 32)):
        q8, v8 = (new(2, S, 3, w, dtype=E4M3.dtype).transpose(1, 2) for w in (width, V))
        out, lse = fp8_attention.forward(q8, one, q8, one, v8, one, bounds, 0.1, False)
        dout8 = new(2, S, 3, V, dtype=E5M2.dtype).transpose(1, 2)
        given = dout8, one, q8, one, q8, one, v8, one, bounds, out, lse
        fp8_attention.backward(*given, one, floats(), dS, 0.1, False)
    swiglu.swiglu_backward_rows(new(R, F), new(R, 2 * F), to.weight, to.ends, floats(R, 1), one, back, how)
    swiglu.swiglu_backward_rows(new(R, F), y8, to.weight, to.ends, floats(R, 1), one, back, how, y_inv)
if mode == 3:
    cast.cast_blocks(new(R // 2, D), one, back, rows=True, transposed=True, ends=to.ends, token=to.token)
    swiglu.swiglu_backward_rows(new(R, F), new(R, 2 * F), to.weight, to.ends, None, one, None, None)
    swiglu_blocks.swiglu_backward_blocks(new(R, F), new(R, 2 * F), to.weight, to.ends, one, back, how)
    swiglu_blocks.swiglu_backward_blocks(new(R, F), y8, to.weight, to.ends, one, back, how, y_inv)
weights.cast_weight(floats(E, 2 * F, D), floats(E), floats(E), how, None)
if mode != 2:
    weights.cast_weight(floats(D, F), one, one, how, None, transposed=False)
    weights.transpose_weight(new(E, 2 * F, D, dtype=torch.float8_e4m3fn), None)
for n, k, fmt in ((2 * F, D, E4M3), (D, F, E4M3), (F, D, back.fmt), (D, 2 * F, back.fmt)):
    scale_a = {1: one, 2: floats(R, 1), 3: floats(k // 128, R).t()}[mode]
    scale_b = {1: floats(E), 2: floats(E, n, 1), 3: floats(E, n // 128, k // 128)}[mode]
    w8 = new(E, n, k, dtype=torch.float8_e4m3fn)
    grouped_gemm.nt(new(R, k, dtype=fmt.dtype), scale_a, w8, scale_b, mode, to)
for m, n in ((2 * F, D), (D, F), (144, D)):
    scales = [floats(R // 128, size) if mode == 3 else one for size in (m, n)]
    a8, b8 = new(m, R, dtype=back.fmt.dtype), new(n, R, dtype=torch.float8_e4m3fn)
    grouped_gemm.wgrad(a8, scales[0], b8, scales[1], mode, to)
    if mode != 2:
        grouped_gemm.wgrad(a8, scales[0], b8, scales[1], mode, to, torch.bfloat16)
print(len(seen), "kernels")
'''


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_every_kernel_compiles_well(mode: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(mode)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) >= 15
