"""Checks of routing, and of GEMMs over experts' rows and over all rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from precision.formats import read_back
from precision.hardware import knows_fp8
from precision.kernels import cast, grouped_gemm
from precision.kernels.peers import push, take
from precision.kernels.read_back import read_back_bf16
from precision.kernels.route import Route, combine, gather
from precision.kernels.scaled_mm import scaled_nt, scaled_wgrad
from precision.kernels.weights import cast_weight
from precision.selftest.operands import BLOCK, FORWARD, GRAD, MODES, ROW, TENSOR, E, K, T, plain, routed, zeros
from precision.selftest.twins import BF16_ROUNDING, FP32_SUM, Mismatch, experts_rows, near, same

SUM = 2.0**-10
"""Error bound of FP8 products: sums here are short, and the tensor cores keep 13 bits of each."""


def routes(device: torch.device) -> None:
    """Check the counting sort, the gather, and the weighted sum."""
    to, expert, weight = routed(device)
    if to.starts.tolist() != [0, *to.ends.tolist()[:-1]] or any(end % 128 for end in to.ends.tolist()):
        raise Mismatch(f"route: experts begin at {to.starts.tolist()} and end at {to.ends.tolist()}")
    for e, part in enumerate(experts_rows(to)):
        token, chosen = to.token[part], (expert == e).nonzero()[:, 0]
        same(token[token >= 0], chosen, f"tokens of expert {e}")
        same(to.weight[part][token >= 0], weight[expert == e], f"router's weights of expert {e}")
        tiles = to.tile_expert[part.start // 128 : part.stop // 128]
        same(tiles, torch.full_like(tiles, e), f"tiles of expert {e}")
    x, add = plain(device, T, 80), plain(device, T, 80, seed=1)
    rows, _ = gather(x, None, to, None)
    for part in experts_rows(to):
        token = to.token[part].long()
        same(rows[part], torch.where(token[:, None] >= 0, x[token.clamp_min(0)], 0), "gathered rows")
    partial = plain(device, 3, len(to.token), dtype=torch.float32)
    total, shares = combine(rows, to, add, partial)
    assert shares is not None
    near(total, x.double() * K + add.double(), BF16_ROUNDING, "sum over a token's experts")
    near(shares, partial.double()[:, to.position.long()].sum(0), FP32_SUM, "gradient of the router's weights")


def peers(device: torch.device) -> None:
    """Check rows that two processes, both simulated here, write into each other's inboxes and read from them, and
    gradients that arrive in FP8."""
    slots, width, used = 5, 12, ((5, 2), (0, 3))  # rows from each to each
    rows = [plain(device, 2 * slots, width, dtype=torch.float32, seed=seed) for seed in range(2)]
    inboxes = [torch.full_like(one, torch.nan) for one in rows]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    for rank in range(2):
        push(rows[rank], addresses, torch.tensor(used[rank], device=device), 0, rank)
    for rank, inbox in enumerate(inboxes):
        sent = [rows[sender].unflatten(0, (2, slots))[rank].clone() for sender in range(2)]
        for sender in range(2):
            sent[sender][used[sender][rank] :] = 0
        here = torch.tensor([used[sender][rank] for sender in range(2)], device=device)
        same(take(inbox, here), torch.cat(sent), f"rows in inbox {rank}")
    if not knows_fp8(device):
        return
    data = plain(device, 5, 272).to(torch.float8_e5m2)
    for inv in (torch.tensor(0.3, device=device), plain(device, 3, 5, dtype=torch.float32).t()):
        same(read_back_bf16(data, inv), read_back(data, inv).bfloat16(), "FP8 gradients read back")


def _experts_operands(device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor, Route]]:
    """Yield x, dy, w and their route, in widths that are not whole tiles and in widths that are: these use different
    kernels."""
    to, _, _ = routed(device)
    live = to.token[:, None] >= 0
    for inner, outer in ((144, 272), (256, 128)):
        x, dy = (torch.where(live, plain(device, len(to.token), n), 0).bfloat16() for n in (inner, outer))
        yield x, dy, plain(device, E, outer, inner, dtype=torch.float32), to


def experts_products(device: torch.device, scales: str, sums: str = "fp32") -> None:
    """Check products and weight gradients of the experts in FP8. sums: fp32, or fast: by the tensor cores alone."""
    mode, fast = {"tensor": TENSOR, "row": ROW, "block": BLOCK}[scales], sums == "fast"
    for x, dy, w, to in _experts_operands(device):
        x8, x_inv, x_t, x_t_inv = cast.cast(x, zeros(device), zeros(device), FORWARD[mode], transposed=True)
        _, _, dy_t, dy_t_inv = cast.cast(dy, zeros(device), zeros(device), GRAD[mode], transposed=True)
        assert x_t is not None and x_t_inv is not None and dy_t is not None and dy_t_inv is not None
        w8, w_inv, _, _ = cast_weight(w, zeros(device, E), zeros(device, E), FORWARD[mode], None)
        y = grouped_gemm.nt(x8, x_inv, w8, w_inv, mode, to, fast)
        dw = grouped_gemm.wgrad(dy_t, dy_t_inv, x_t, x_t_inv, mode, to, torch.float32, fast)
        x_read = read_back(x8, x_inv)
        w_read = read_back(w8, w_inv.view(E, 1, 1) if mode == TENSOR else w_inv)
        x_columns, dy_columns = (read_back(t.t(), i) for t, i in ((x_t, x_t_inv), (dy_t, dy_t_inv)))
        for e, part in enumerate(experts_rows(to)):
            where = f"of expert {e}, {scales}, {sums}, {w.shape[2]} -> {w.shape[1]}"
            near(y[part], x_read[part].double() @ w_read[e].double().t(), BF16_ROUNDING, f"product {where}")
            near(dw[e], dy_columns[part].double().t() @ x_columns[part].double(), SUM, f"weight gradient {where}")


def experts_products_bf16(device: torch.device) -> None:
    """Check products, input gradients and weight gradients of the experts, without FP8."""
    for x, dy, wide, to in _experts_operands(device):
        w = wide.bfloat16()
        y, dx = grouped_gemm.nt_bf16(x, w, to), grouped_gemm.nt_bf16(dy, w.mT, to)
        dw = grouped_gemm.wgrad_bf16(dy, x, to)
        for e, part in enumerate(experts_rows(to)):
            where = f"of expert {e}, BF16, {w.shape[2]} -> {w.shape[1]}"
            near(y[part], x[part].double() @ w[e].double().t(), BF16_ROUNDING, f"product {where}")
            near(dx[part], dy[part].double() @ w[e].double(), BF16_ROUNDING, f"input gradient {where}")
            near(dw[e], dy[part].double().t() @ x[part].double(), FP32_SUM, f"weight gradient {where}")


def products(device: torch.device) -> None:
    """Check GEMMs over all rows: cuBLAS, or where it does not support blocks the experts' kernels with one group."""
    for R, inner, outer in ((37, 144, 272), (132, 256, 128)):
        for mode in MODES:
            if mode == BLOCK and R % 4 == 0 and device.type == "cpu":
                continue  # cuBLAS alone supports blocks
            x, dy, w = plain(device, R, inner), plain(device, R, outer), plain(device, outer, inner)
            x8, x_inv, x_t, x_t_inv = cast.cast(x, zeros(device), zeros(device), FORWARD[mode], transposed=True)
            _, _, dy_t, dy_t_inv = cast.cast(dy, zeros(device), zeros(device), GRAD[mode], transposed=True)
            assert x_t is not None and x_t_inv is not None and dy_t is not None and dy_t_inv is not None
            w8, w_inv, _, _ = cast_weight(w, zeros(device), zeros(device), FORWARD[mode], None)
            y = scaled_nt(x8, x_inv, w8, w_inv, mode, torch.bfloat16)
            want = read_back(x8, x_inv).double() @ read_back(w8, w_inv).double().t()
            near(y, want, BF16_ROUNDING, f"product, mode {mode}, {(R, inner, outer)}")
            dw = scaled_wgrad(dy_t, dy_t_inv, x_t, x_t_inv, mode, torch.float32)
            left, right = (read_back(t.t(), i).double() for t, i in ((dy_t, dy_t_inv), (x_t, x_t_inv)))
            near(dw, left.t() @ right, SUM, f"weight gradient, mode {mode}, {(R, inner, outer)}")
