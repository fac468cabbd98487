"""The minimal work of any implementation: the GEMMs of a layer forward and backward with prepared operands, and the
attention core. Their time in the same process is the limit that the benches quote.

For y [M, N] = x [M, K] w [N, K]^T: y, dx [M, K] = dy w, dw [N, K] = dy^T x. BF16 by torch.mm, and for groups by
torch._grouped_mm or the project's own kernels, whichever is faster. FP8 (E4M3, one scale a tensor, fast accumulation,
both factors contiguous along the sum) by torch._scaled_mm, and for groups by the project's own kernels, which were
measured to be faster than torch's. Random numbers: zeros would draw less power and run faster.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from measure import device, short
from torch import Tensor

from precision import GemmRow, Plan
from precision.attention import attention_core
from precision.backends.availability import cuda_problem
from precision.hardware import detect
from trainer.config import Config

if TYPE_CHECKING:
    from precision.kernels.route import Route

Work = Callable[[], object]
FP8 = torch.float8_e4m3fn
LARGEST = 1 << 30  # elements of a result that are measured at once; larger GEMMs run at the same rate
_scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Return BF16 numbers ~ N(0, scale)."""
    return torch.randn(shape, device=device()).mul_(scale).to(torch.bfloat16)


def _fp8(*shape: int) -> Tensor:
    return (random(*shape) * 64).to(FP8)


def linear_bf16(M: int, N: int, K: int) -> Work:
    x, w, dy = random(M, K), random(N, K, scale=0.02), random(M, N, scale=1e-3)
    return lambda: (x @ w.t(), dy @ w, dy.t() @ x)


def linear_fp8(M: int, N: int, K: int) -> Work:
    one, rows = torch.ones((), device=device()), M - M % 16  # wgrad sums over rows
    x, w, dy, x_t, w_t, dy_t = _fp8(M, K), _fp8(N, K), _fp8(M, N), _fp8(K, rows), _fp8(K, N), _fp8(N, rows)

    def gemm(a: Tensor, b: Tensor) -> Tensor:
        return _scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return lambda: (gemm(x, w), gemm(dy, w_t), gemm(dy_t, x_t))


def grouped_bf16(expert_TK: Tensor, groups: int, N: int, K: int) -> Work:
    """Return three grouped GEMMs over the rows of a routing: torch's or, if they run and are faster, the project's."""
    theirs = _torch_grouped(expert_TK, groups, N, K)
    if cuda_problem(detect(device())):
        return theirs
    return min(theirs, _own_grouped(expert_TK, groups, N, K), key=_warm)


def _torch_grouped(expert_TK: Tensor, groups: int, N: int, K: int) -> Work:
    """Return three torch._grouped_mm, each group's rows rounded up to 16 as they need it."""
    padded = (torch.bincount(expert_TK.flatten(), minlength=groups) + 15) // 16 * 16
    ends, R = padded.cumsum(0).int(), int(padded.sum())
    x, w, dy = random(R, K), random(groups, N, K, scale=0.02), random(R, N, scale=1e-3)
    return lambda: (_grouped_mm(x, w.mT, offs=ends), _grouped_mm(dy, w, offs=ends), _grouped_mm(dy.t(), x, offs=ends))


def _own_grouped(expert_TK: Tensor, groups: int, N: int, K: int) -> Work:
    """Return three of the project's grouped BF16 GEMMs, in tiles of 128; weight gradients in BF16, as torch's."""
    from precision.kernels.grouped_gemm import nt_bf16, wgrad_bf16

    to = _tiles(expert_TK, groups)
    x, w, dy = random(len(to.token), K), random(groups, N, K, scale=0.02), random(len(to.token), N, scale=1e-3)
    return lambda: (nt_bf16(x, w, to), nt_bf16(dy, w.mT, to), wgrad_bf16(dy, x, to, torch.bfloat16))


def _tiles(expert_TK: Tensor, groups: int) -> "Route":
    """Return the route of a routing's rows, in tiles of 128."""
    from precision.kernels.route import route

    return route(expert_TK, torch.ones(expert_TK.shape, device=device()), groups, 128)


def grouped_fp8(expert_TK: Tensor, groups: int, N: int, K: int) -> Work:
    """Return three of the project's grouped FP8 GEMMs over the rows of a routing, in tiles of 128."""
    from precision.kernels import const
    from precision.kernels.grouped_gemm import nt, wgrad

    to = _tiles(expert_TK, groups)
    R, mode = to.token.shape[0], const.TENSOR.value
    x, w, dy, x_t, w_t, dy_t = _fp8(R, K), _fp8(groups, N, K), _fp8(R, N), _fp8(K, R), _fp8(groups, K, N), _fp8(N, R)
    one, each = torch.ones((), device=device()), torch.ones(groups, device=device())
    return lambda: (
        nt(x, one, w, each, mode, to, fast=True),
        nt(dy, one, w_t, each, mode, to, fast=True),
        wgrad(dy_t, one, x_t, one, mode, to, fast=True),
    )


def heads(B: int, H: int, S: int, d: int, scale: float = 1.0) -> Tensor:
    """Return [B, H, S, d] as in a model: a view of a projection's output, [B, S, H, d]."""
    return random(B, S, H, d, scale=scale).transpose(1, 2)


def attention(B: int, H: int, S: int, d_qk: int, d_v: int) -> Work:
    """Return the attention core as the model calls it, forward and backward."""
    q, k, v = (heads(B, H, S, d).requires_grad_() for d in (d_qk, d_qk, d_v))
    dy = heads(B, H, S, d_v, scale=1e-3)

    def work() -> None:
        q.grad = k.grad = v.grad = None
        attention_core(q, k, v, d_qk**-0.5).backward(dy)

    return work


class StepLimit:
    """Seconds of a training step's GEMMs and attention core alone. Each shape is measured once."""

    def __init__(self) -> None:
        self._seconds: dict[tuple, float] = {}

    def seconds(self, config: Config, plan: Plan) -> float:
        """Return the seconds of one step of a config. Without FP8 units (a CPU), FP8 rows count at BF16's rate."""
        t, m = config.trainer, config.model
        tokens = t.microbatch_size * t.sequence_length
        gemms = sum(self._gemm(row, tokens) for row in plan.gemms.values())
        shape = t.microbatch_size, m.num_heads, t.sequence_length, m.qk_head_dim, m.v_head_dim
        core = self._measured(("attention", *shape), lambda: attention(*shape))
        blocks = m.num_layers + m.num_mtp_layers
        return (gemms + blocks * core) * (t.global_batch_size // t.microbatch_size)

    def _gemm(self, row: GemmRow, tokens: int) -> float:
        """Return the seconds of forward and backward of one row of the plan."""
        fp8, shape = row.recipe.is_fp8 and device().type == "cuda", (row.out_features, row.in_features)
        if row.groups == 1:
            M = min(tokens, LARGEST // row.out_features)
            make = linear_fp8 if fp8 else linear_bf16
            return row.rows_per_token * tokens / M * self._measured((fp8, M, *shape), lambda: make(M, *shape))

        def grouped() -> Work:
            chosen = torch.rand(tokens, row.groups, device=device()).topk(int(row.rows_per_token)).indices
            return (grouped_fp8 if fp8 else grouped_bf16)(chosen, row.groups, *shape)

        return self._measured((fp8, tokens, row.rows_per_token, row.groups, *shape), grouped)

    def _measured(self, key: tuple, make: Callable[[], Work]) -> float:
        if key not in self._seconds:
            self._seconds[key] = _warm(make())
        return self._seconds[key]


def _warm(work: Work) -> float:
    """Return its seconds, after three warm-up calls."""
    for _ in range(3):
        work()
    return short(work, 10)
