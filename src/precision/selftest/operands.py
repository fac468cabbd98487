"""Checks of casts, weights, norms and SwiGLU."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats import E4M3, E5M2, read_back, saturating_cast
from precision.fused import swiglu_from_fp8, swiglu_to_fp8
from precision.kernels import cast, const, norm, swiglu
from precision.kernels.common import Cast
from precision.kernels.route import Route, gather, route
from precision.kernels.swiglu_blocks import swiglu_backward_blocks
from precision.kernels.weights import cast_weight, transpose_weight
from precision.selftest.twins import (
    BF16_ROUNDING,
    FP8_ROUNDING,
    FP32_SUM,
    TILES,
    WEIGHT_TILES,
    Mismatch,
    cast_in_tiles,
    experts_rows,
    near,
    same,
)

TENSOR, ROW, BLOCK = const.TENSOR.value, const.ROW.value, const.BLOCK.value
MODES = (TENSOR, ROW, BLOCK)
FORWARD = {
    TENSOR: Cast(E4M3, TENSOR, True, 0, False),
    ROW: Cast(E4M3, ROW, False, 0, True),
    BLOCK: Cast(E4M3, BLOCK, False, 0, True),
}
"""Casts of activations in the recipes, by mode: delayed, per row, per block."""
GRAD = {TENSOR: Cast(E5M2, TENSOR, True, 0, False), ROW: Cast(E5M2, ROW, False, 0, True), BLOCK: FORWARD[BLOCK]}
SHAPES = (1, 16), (37, 144)
T, K, E = 40, 2, 3


def values(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers of six orders of magnitude, along rows."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[-2])[:, None]
    return x.to(device, dtype)


def plain(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Return random numbers of one magnitude, different for each shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 10_000 * seed)).to(device, dtype)


def zeros(device: torch.device, *shape: int) -> Tensor:
    """Return FP32 zeros."""
    return torch.zeros(shape, device=device)


def routed(device: torch.device) -> tuple[Route, Tensor, Tensor]:
    """Return a route in which the second expert has no row, the choices [T, K] and their weights."""
    generator = torch.Generator().manual_seed(T)
    first = torch.randint(0, 2, (T,), generator=generator) * (E - 1)
    expert = torch.stack([first, E - 1 - first], 1).to(device)
    weight = torch.rand(T, K, generator=generator).to(device)
    return route(expert, weight, E, 128), expert, weight


def casts_of(device: torch.device) -> Iterator[tuple[Cast, Tensor, Tensor]]:
    """Yield each kind of cast, a tensor, and the arena's scale: none, or one that saturates some numbers."""
    for shape in SHAPES:
        x = values(device, *shape)
        for how in dict.fromkeys([*FORWARD.values(), *GRAD.values()]):
            known = 3.0 * how.fmt.max / x.abs().amax().float()
            for scale in (zeros(device), known) if how.delayed else (zeros(device),):
                yield how, x, scale


def casts(device: torch.device) -> None:
    """Check casts of activations and gradients, their transposed copies, and the transposition of saved operands."""
    for how, x, scale in casts_of(device):
        where = f"{how.fmt.name}, mode {how.mode}, {tuple(x.shape)}"
        R, amax, known = len(x), zeros(device), scale if how.delayed and bool(scale > 0) else None
        want, want_inv = cast_in_tiles(x, how, *TILES[how.mode], known)
        for transposed in (False, True):
            data, inv, data_t, inv_t = cast.cast(x, scale, amax, how, transposed)
            same(data, want, f"cast, {where}")
            same(read_back(data, inv), want.float() * want_inv, f"scales of a cast, {where}")
        same(amax, x.abs().max(), f"amax, {where}")
        assert data_t is not None and inv_t is not None
        if how.mode == TENSOR:
            columns = want
        elif how.mode == ROW:
            columns = saturating_cast(want.float() * want_inv, want_inv.amax().reciprocal(), how.fmt)
        else:
            columns, columns_inv = cast_in_tiles(x, how, 128, 1)
            same(read_back(data_t.t(), inv_t)[:R], columns.float() * columns_inv, f"column scales, {where}")
        same(data_t[:, :R].t(), columns, f"transposed copy, {where}")
        same(data_t[:, R:], torch.zeros_like(data_t[:, R:]), f"padding of the transposed copy, {where}")
        if how.mode == BLOCK:
            columns, _ = cast_in_tiles(want.float() * want_inv, how, 128, 1)
        same(cast.transpose(data, inv, how)[0][:, :R].t(), columns, f"transposition, {where}")


def weights(device: torch.device) -> None:
    """Check weights, and stacks of them in BF16: whole, without a transposed copy, and transposed afterwards."""
    for mode in MODES:
        for stack, dtype in (((), torch.float32), ((2,), torch.bfloat16)):
            w = values(device, *stack, 272, 144, dtype=dtype)
            _weight(w, FORWARD[mode], f"weight, mode {mode}, {tuple(w.shape)}, {dtype}")


def _weight(w: Tensor, how: Cast, where: str) -> None:
    stack, device = w.shape[:-2], w.device
    amax, scale = zeros(device, *stack), zeros(device, *stack)
    data, inv, data_t, inv_t = cast_weight(w, scale, amax, how, None)
    rows, columns = WEIGHT_TILES[how.mode]
    for g in range(stack[0] if stack else 1):
        exact, ours, ours_t, top = ((t[g] if stack else t) for t in (w.bfloat16(), data, data_t, amax))
        same(top, exact.abs().max(), f"amax, {where}")
        same(ours, cast_in_tiles(exact, how, rows, columns)[0], where)
        along = (0, 1) if how.mode == ROW else (rows, columns)
        same(ours_t.t(), cast_in_tiles(exact, how, *along)[0], f"transposed copy, {where}")
    if how.mode == ROW:
        return
    if how.mode == BLOCK:
        same(inv.mT, inv_t, f"scales of the transposed copy, {where}")
    same(transpose_weight(data, None), data_t, f"transposition, {where}")
    part = cast_weight(w, scale, torch.zeros_like(amax), how, None, transposed=False)
    same(part[0], data, f"without a transposed copy, {where}")


def norms(device: torch.device) -> None:
    """Check RMSNorm, forward and backward, with and without a cast."""
    for R, C in ((5, 48), (37, 144)):
        x = (plain(device, R, C + 16) * 3)[:, :C]  # rows of a wider tensor
        gain, dy = plain(device, C, dtype=torch.float32), plain(device, R, C, seed=1)
        wide = x.double().requires_grad_(), gain.double().requires_grad_()
        exact = F.rms_norm(wide[0], (C,), wide[1], 1e-5)
        exact.backward(dy.double())
        for mode in (0, *MODES):
            how, amax, where = FORWARD.get(mode), zeros(device), f"norm, mode {mode}, {(R, C)}"
            y, data, inv, rstd = norm.rms_norm(x, gain, 1e-5, zeros(device), amax, how, plain=True)
            near(y, exact.detach(), BF16_ROUNDING, where)
            if how is not None:
                want, want_inv, _, _ = cast.cast(y, zeros(device), zeros(device), how)
                same(read_back(data, inv), read_back(want, want_inv), f"FP8 of a {where}")
                same(amax, y.abs().max(), f"amax of a {where}")
        dx, dgain = norm.rms_norm_backward(dy, x, gain, rstd)
        assert wide[0].grad is not None and wide[1].grad is not None
        near(dx, wide[0].grad, BF16_ROUNDING, f"gradient of a norm, {(R, C)}")
        near(dgain, wide[1].grad, FP32_SUM, f"gradient of a norm's gain, {(R, C)}")


def activations(device: torch.device, kind: str) -> None:
    """Check SwiGLU, forward and backward, in BF16 and with every kind of scale, on plain `rows` or `experts`'."""
    to = routed(device)[0] if kind == "experts" else None
    R, width = 37 if to is None else len(to.token), 80
    weight, ends = (None, None) if to is None else (to.weight, to.ends)
    live = slice(0, R if to is None else int(to.ends[-1]))
    y, dh = plain(device, R, 2 * width), plain(device, R, width)
    wide = y.double().requires_grad_()
    factor = (torch.ones(R, device=device).double() if weight is None else weight.double()).requires_grad_()
    gate, up = wide.chunk(2, 1)
    exact = F.silu(gate) * up * factor[:, None]
    exact.backward(dh.double())
    assert wide.grad is not None and factor.grad is not None
    for mode in (0, *MODES):
        how, back, where = FORWARD.get(mode), GRAD.get(mode), f"SwiGLU, mode {mode}, {kind}"
        h, h_inv, _, _ = swiglu.swiglu(y, weight, ends, zeros(device), amax := zeros(device), how)
        got = h[live] if how is None else read_back(h[live], h_inv[0] if mode == TENSOR else h_inv[live])
        near(got, exact.detach()[live], FP8_ROUNDING["e4m3"] if how else BF16_ROUNDING, where)
        if how is not None:
            near(amax, exact.detach()[live].abs().max(), BF16_ROUNDING, f"amax of {where}")
        rounding, d_amax = BF16_ROUNDING, zeros(device)
        if mode == TENSOR:
            assert how is not None and back is not None
            d, dt, ht, inv, dw = swiglu.swiglu_backward_tensor(
                dh, y, weight, ends, h_inv, zeros(device), d_amax, back, how
            )
            same(dt[:, live].t(), d[live], f"transposed gradient of {where}")
            same(ht[:, live].t(), h[live], f"transposed copy of {where}")
            for copy in (dt[:, R:], ht[:, R:]):
                same(copy, torch.zeros_like(copy), f"padding of the transposed copies of {where}")
            got, rounding = read_back(d[live], inv), FP8_ROUNDING["e5m2"]
        elif mode == ROW:
            d, again, inv, dw = swiglu.swiglu_backward_rows(dh, y, weight, ends, h_inv, d_amax, back, how)
            same(again[live], h[live], f"{where} in the backward pass")
            got, rounding = read_back(d[live], inv[live]), FP8_ROUNDING["e5m2"]
        else:
            d, again, _, dw = swiglu.swiglu_backward_rows(dh, y, weight, ends, None, d_amax, None, None)
            near(again[live], exact.detach()[live], BF16_ROUNDING, f"{where} in the backward pass")
            got = d[live]
        near(got, wide.grad[live], rounding, f"gradient of {where}")
        if to is not None:
            near(dw.sum(0)[live], factor.grad[live], FP32_SUM, f"gradient of the router's weights, {where}")


def activations_in_blocks(device: torch.device, kind: str) -> None:
    """Check SwiGLU's backward pass in one launch against BF16 and casts in passes of their own; kind: see
    `activations`."""
    to = routed(device)[0] if kind == "experts" else None
    R, width = 37 if to is None else len(to.token), 128
    weight, ends = (None, None) if to is None else (to.weight, to.ends)
    live = slice(0, R if to is None else int(to.ends[-1]))
    y, dh = plain(device, R, 2 * width), plain(device, R, width)
    exact, h, _, dw = swiglu.swiglu_backward_rows(dh, y, weight, ends, None, zeros(device), None, None)
    d, inv, dt, inv_t = cast.cast_blocks(exact, want := zeros(device), GRAD[BLOCK], True, True, ends=ends)
    _, _, ht, inv_ht = cast.cast_blocks(h, zeros(device), FORWARD[BLOCK], False, True, again=True, ends=ends)
    assert dt is not None and inv_t is not None and ht is not None and inv_ht is not None
    ours = swiglu_backward_blocks(dh, y, weight, ends, amax := zeros(device), GRAD[BLOCK], FORWARD[BLOCK])
    tiles = -(-live.stop // 128)
    for what, one, other in zip(
        ("gradient", "its scales", "transposed gradient", "its scales", "transposed copy", "its scales", "amax"),
        (ours[0][live], ours[1][live], ours[2][:, live], ours[3][:tiles], ours[4][:, live], ours[5][:tiles], amax),
        (d[live], inv[live], dt[:, live], inv_t[:tiles], ht[:, live], inv_ht[:tiles], want),
        strict=True,
    ):
        same(one, other, f"{what} of SwiGLU in blocks, {kind}")
    near(ours[6].sum(0)[live], dw.sum(0)[live], FP32_SUM, f"gradient of the router's weights, {kind}")


def saved_activations(device: torch.device) -> None:
    """Check what SwiGLU saves in FP8, and its backward pass from that."""
    R, width = 37, 128
    y, dh = plain(device, R, 2 * width), plain(device, R, width)
    data, inv = swiglu_to_fp8(y)
    wide = swiglu_from_fp8(data, inv, torch.float64).requires_grad_()
    gate, up = wide.chunk(2, 1)
    (F.silu(gate) * up).backward(dh.double())
    assert wide.grad is not None
    for mode in MODES:
        how, back, where = FORWARD[mode], GRAD[mode], f"SwiGLU saved in FP8, mode {mode}"
        _, h_inv, y8, y_inv = swiglu.swiglu(y, None, None, zeros(device), zeros(device), how, narrow=True)
        same(y8, data.flatten(-2), where)
        same(y_inv.view(2, -1, R), inv.permute(1, 2, 0), f"scales of {where}")
        given = dh, y8, None, None
        if mode == TENSOR:
            d, _, _, d_inv, _ = swiglu.swiglu_backward_tensor(
                *given, h_inv, zeros(device), zeros(device), back, how, y_inv
            )
        elif mode == ROW:
            d, _, d_inv, _ = swiglu.swiglu_backward_rows(*given, h_inv, zeros(device), back, how, y_inv)
        else:
            d, d_inv, *_ = swiglu_backward_blocks(*given, zeros(device), back, how, y_inv)
        near(read_back(d, d_inv), wide.grad, FP8_ROUNDING[back.fmt.name], f"gradient of {where}")


def experts_casts(device: torch.device) -> None:
    """Check rows of tokens in the experts' order: gathered with their scales, transposed or cast during the gather."""
    to, _, _ = routed(device)
    for mode in MODES:
        x, how, where = plain(device, T, 144), FORWARD[mode], f"rows of experts, mode {mode}"
        data, inv, _, _ = cast.cast(x, zeros(device), zeros(device), how)
        rows, inv_rows = gather(data, inv, to, how)
        again, inv_again, data_t, inv_t = cast.gather_transposed(data, inv, to.token, to.ends, how, rows=True)
        assert again is not None and inv_rows is not None and inv_again is not None
        read, coarsest = read_back(data, inv), inv.amax()
        for part in experts_rows(to):
            token = to.token[part].long()
            want = torch.where(token[:, None] >= 0, read[token.clamp_min(0)], 0.0)
            for ours, scales in ((rows, inv_rows), (again, inv_again)):
                same(read_back(ours[part], scales[part] if scales.dim() else scales), want, where)
            if mode == BLOCK:
                columns, columns_inv = cast_in_tiles(want, how, 128, 1)
                tiles = slice(part.start // 128, part.stop // 128)
                same(read_back(data_t.t()[part], inv_t[tiles]), columns.float() * columns_inv, where)
            else:
                columns = rows[part] if mode == TENSOR else saturating_cast(want, coarsest.reciprocal(), how.fmt)
                same(data_t.t()[part], columns, f"transposed {where}")
    x, how, amax, other = plain(device, T, 144), FORWARD[BLOCK], zeros(device), zeros(device)
    ours = cast.cast_blocks(x, amax, how, rows=True, transposed=True, ends=to.ends, token=to.token)
    rows, _ = gather(x, None, to, None)
    theirs = cast.cast_blocks(rows, other, how, rows=True, transposed=True, ends=to.ends)
    live = int(to.ends[-1])
    for one, two, part in zip(ours, theirs, ("data", "scales", "copy", "copy's scales"), strict=True):
        if one is None or two is None:
            raise Mismatch(f"{part} of gathered blocks: nothing was made")
        end = {"copy": (slice(None), slice(live)), "copy's scales": (slice(live // 128),)}.get(part, (slice(live),))
        same(one[end], two[end], f"{part} of gathered blocks")
    same(amax, x.abs().max(), "amax of gathered blocks")
