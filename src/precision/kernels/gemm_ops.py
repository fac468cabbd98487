"""The FP8 GEMMs as custom operators; see `grouped_gemm`.

Grouped ones take rows without gaps, offsets [G] int32, and move them into tiles of 128 for the product.
"""

import torch
from torch import Tensor

from precision.kernels import const, grouped_gemm
from precision.kernels.cast import cast_blocks, gather_transposed
from precision.kernels.common import Cast
from precision.kernels.route import Route, gather
from precision.operators import fake, operator
from precision.permutation import rows_in_tiles


@operator("grouped_nt")
def grouped_nt(
    a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor, offsets: Tensor, how: str, fast: bool = False
) -> Tensor:
    """Multiply a [R, K] by w [G, N, K]^T; return [R, N] BF16."""
    made, to = Cast.parse(how), tiles(offsets, a.shape[0])
    rows, inv = gather(a, a_inv, to, made)
    assert inv is not None
    return grouped_gemm.nt(rows, inv, w, w_inv, made.mode, to, fast).index_select(0, to.position.view(-1))


@fake(grouped_nt)
def _(a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor, offsets: Tensor, how: str, fast: bool = False) -> Tensor:
    return torch.empty(a.shape[0], w.shape[1], device=a.device, dtype=torch.bfloat16)


@operator("grouped_wgrad")
def grouped_wgrad(
    dy: Tensor, dy_inv: Tensor, dy_exact: Tensor, x: Tensor, x_inv: Tensor, offsets: Tensor, how: str, how_x: str,
    out: torch.dtype, fast: bool = False,
) -> Tensor:  # fmt: skip
    """Return dy^T x per group, [G, N, K] in `out`, FP32 or BF16, for dy [R, N], x [R, K]. BLOCK: dy's tiles are cast
    from the exact gradient."""
    made, to = Cast.parse(how), tiles(offsets, x.shape[0])
    if made.mode == const.BLOCK.value:
        unseen = torch.zeros((), device=x.device)
        _, _, dy_t, dy_t_inv = cast_blocks(
            dy_exact.contiguous(), unseen, made, rows=False, transposed=True, ends=to.ends, token=to.token
        )
        assert dy_t is not None and dy_t_inv is not None
    else:
        _, _, dy_t, dy_t_inv = gather_transposed(dy, dy_inv, to.token, to.ends, made, rows=False)
    _, _, x_t, x_t_inv = gather_transposed(x, x_inv, to.token, to.ends, Cast.parse(how_x), rows=False)
    return grouped_gemm.wgrad(dy_t, dy_t_inv, x_t, x_t_inv, made.mode, to, out, fast)


@fake(grouped_wgrad)
def _(dy, dy_inv, dy_exact, x, x_inv, offsets, how, how_x, out: torch.dtype, fast=False) -> Tensor:
    return torch.empty(offsets.shape[0], dy.shape[1], x.shape[1], device=x.device, dtype=out)


def tiles(offsets: Tensor, rows: int) -> Route:
    """Return the positions in tiles of 128 of rows without gaps (expert e's end at offsets[e]). No host
    synchronisation."""
    E, device = offsets.shape[0], offsets.device
    size = rows_in_tiles(rows, E)
    ends = offsets.long()
    counts = ends - torch.nn.functional.pad(ends, (1, 0))[:-1]
    padded = (counts + 127) // 128 * 128
    last = padded.cumsum(0)
    row = torch.arange(rows, device=device)
    expert = torch.searchsorted(ends, row, right=True).clamp_(max=E - 1)
    position = row - (ends - counts)[expert] + (last - padded)[expert]
    token = torch.full((size,), -1, device=device, dtype=torch.int32)
    token.scatter_(0, position, row.int())
    tile_expert = torch.searchsorted(last, torch.arange(size // 128, device=device) * 128, right=True)
    weight = torch.empty(0, device=device)
    return Route(token, weight, position[:, None].int(), (last - padded).int(), last.int(), tile_expert.int())
