"""Routing, gathering, norm, SwiGLU and grouped GEMMs, each against a few lines of plain PyTorch, at awkward sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats import E4M3, E5M2

route_kernels = pytest.importorskip("precision.kernels.route", reason="Triton is missing")
from precision.fused import swiglu_from_fp8, swiglu_to_fp8  # noqa: E402
from precision.kernels import cast, grouped_gemm, norm, swiglu  # noqa: E402
from precision.kernels.common import Cast  # noqa: E402
from precision.kernels.route import Route  # noqa: E402
from precision.kernels.swiglu_blocks import swiglu_backward_blocks  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR, ROW, BLOCK = 1, 2, 3
T, K, E = (300, 3, 7) if DEVICE == "cuda" else (40, 2, 3)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> Tensor:
    return (torch.randn(shape) * size).to(DEVICE, dtype)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def routed(spread: str = "random", align: int = 128) -> tuple[Route, Tensor, Tensor]:
    """A route, the experts and the weights [T, K] that it is of; "one": the last expert gets all."""
    torch.manual_seed(T)
    expert = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(DEVICE)
    expert = torch.full_like(expert, E - 1) if spread == "one" else expert.clamp(max=E - 2)
    weight = torch.rand(T, K).to(DEVICE)
    return route_kernels.route(expert, weight, E, align), expert, weight


def groups(to: Route) -> list[slice]:
    """Rows of each expert, padding included."""
    return [slice(a, b) for a, b in zip(to.starts.tolist(), to.ends.tolist(), strict=True)]


def near(ours: Tensor, exact: Tensor, tolerance: float, what: str = "") -> None:
    assert torch.isfinite(ours.float()).all(), what
    error = (ours.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30)
    assert error < tolerance, f"{what}: relative error {error:.1e}"


def read(data: Tensor, inv: Tensor, mode: int) -> Tensor:
    """What FP8 rows stand for."""
    inv = inv.repeat_interleave(128, 1)[:, : data.shape[1]] if mode == BLOCK else inv
    return data.float() * inv


@pytest.mark.parametrize("align", [64, 128])
@pytest.mark.parametrize("spread", ["random", "one"])
def test_route(spread: str, align: int) -> None:
    to, expert, weight = routed(spread, align)
    starts, ends = to.starts.tolist(), to.ends.tolist()
    assert starts == [0, *ends[:-1]] and all(end % align == 0 for end in ends)
    seen = []
    for e, rows in enumerate(groups(to)):
        tokens = to.token[rows][to.token[rows] >= 0].tolist()
        where = (expert == e).nonzero()
        assert tokens == where[:, 0].tolist(), "in the order of the tokens, none lost"
        torch.testing.assert_close(to.weight[rows][to.token[rows] >= 0], weight[expert == e])
        assert (to.weight[rows][to.token[rows] < 0] == 0).all()
        seen += tokens
    assert len(seen) == T * K
    assert torch.equal(to.token[to.position.long()], torch.arange(T, device=DEVICE)[:, None].expand(T, K).int())
    if align == 128:
        experts = [e for e, rows in enumerate(groups(to)) for _ in range(rows.start, rows.stop, 128)]
        assert to.tile_expert[: len(experts)].tolist() == experts


def test_gather_and_combine() -> None:
    to, _, _ = routed()
    x, add = random(T, 80), random(T, 80)
    rows, _ = route_kernels.gather(x, None, to, None)
    for part in groups(to):
        token = to.token[part].long()
        assert torch.equal(rows[part], torch.where(token[:, None] >= 0, x[token.clamp_min(0)], 0))
    partial = random(3, to.token.shape[0], dtype=torch.float32)
    total, shares = route_kernels.combine(rows, to, add, partial)
    near(total, x.float() * K + add.float(), 4e-3)
    torch.testing.assert_close(shares, partial[:, to.position.long()].sum(0))


@pytest.mark.parametrize("mode", [ROW, BLOCK])
def test_gathered_rows_keep_their_scales(mode: int) -> None:
    to, _, _ = routed()
    how = Cast(E4M3, mode, False, 0, True)
    data, inv, _, _ = cast.cast(random(T, 144), zeros(), zeros(), how)
    rows, inv_rows = route_kernels.gather(data, inv, to, how)
    again, inv_again, _, _ = cast.gather_transposed(data, inv, to.token, to.ends, how, rows=True)
    assert inv_rows is not None and again is not None and inv_again is not None
    for part in groups(to):
        token = to.token[part].long()
        want = torch.where(token[:, None] >= 0, read(data, inv, mode)[token.clamp_min(0)], 0.0)
        assert torch.equal(read(rows[part], inv_rows[part], mode), want)
        assert torch.equal(read(again[part], inv_again[part], mode), want)


@pytest.mark.parametrize("spread", ["random", "one"])
@pytest.mark.parametrize("width", [128, 144])
def test_gathering_and_casting_blocks_at_once(spread: str, width: int) -> None:
    to, _, _ = routed(spread)
    x, how, live = random(T, width), Cast(E4M3, BLOCK, False, 0, True), int(to.ends[-1])
    amax, other = zeros(), zeros()
    ours = cast.cast_blocks(x, amax, how, rows=True, transposed=True, ends=to.ends, token=to.token)
    rows, _ = route_kernels.gather(x, None, to, None)
    theirs = cast.cast_blocks(rows, other, how, rows=True, transposed=True, ends=to.ends)
    for one, two, what in zip(ours, theirs, ("data", "inv", "data_t", "inv_t"), strict=True):
        assert one is not None and two is not None and one.shape == two.shape
        part = {"data_t": (slice(None), slice(live)), "inv_t": (slice(live // 128),)}.get(what, (slice(live),))
        assert torch.equal(one.float()[part], two.float()[part]), what
    assert amax == other and amax == x.abs().max()


@pytest.mark.parametrize("mode", [0, TENSOR, ROW, BLOCK])
@pytest.mark.parametrize(("R", "C"), [(37, 144), (5, 48), (1, 144)])
def test_rms_norm(mode: int, R: int, C: int) -> None:
    torch.manual_seed(R)
    x, gain, amax = random(R, C, size=3.0), random(C, dtype=torch.float32), zeros()
    how = Cast(E4M3, mode, False, 0, mode != TENSOR) if mode else None
    y, data, inv, rstd = norm.rms_norm(x, gain, 1e-5, zeros(), amax, how, plain=True)
    exact = F.rms_norm(x.double(), (C,), gain.double(), 1e-5)
    near(y, exact, 4e-3, "y")
    if how is not None:
        want, want_inv, _, _ = cast.cast(y, zeros(), zeros(), how)
        assert torch.equal(read(data, inv, mode), read(want, want_inv, mode)), "FP8 of the BF16 that others read"
        assert amax == y.abs().max()
    dy = random(R, C)
    wide = x.double().requires_grad_(), gain.double().requires_grad_()
    F.rms_norm(wide[0], (C,), wide[1], 1e-5).backward(dy.double())
    dx, dgain = norm.rms_norm_backward(dy, x, gain, rstd)
    assert wide[0].grad is not None and wide[1].grad is not None
    near(dx, wide[0].grad, 4e-3, "dx")
    near(dgain, wide[1].grad, 1e-5, "dgain")


@pytest.mark.parametrize("mode", [0, TENSOR, ROW, BLOCK])
@pytest.mark.parametrize(("experts", "R"), [(False, 37), (False, 1), (True, 0)])
def test_swiglu(mode: int, experts: bool, R: int) -> None:
    torch.manual_seed(mode)
    to = routed()[0] if experts else None
    R, width = (to.token.shape[0] if to is not None else R), 80
    weight, ends = (to.weight, to.ends) if to is not None else (None, None)
    live = slice(0, int(to.ends[-1]) if to is not None else R)
    y, dh = random(R, 2 * width), random(R, width)
    how, back = (Cast(fmt, mode, False, 0, mode != TENSOR) if mode else None for fmt in (E4M3, E5M2))
    amax, d_amax = zeros(), zeros()
    h, h_inv, _, _ = swiglu.swiglu(y, weight, ends, zeros(), amax, how)
    wide = y.double().requires_grad_()
    factor = (weight.double() if weight is not None else torch.ones(R, device=DEVICE).double()).requires_grad_()
    gate, up = wide.chunk(2, 1)
    exact = F.silu(gate) * up * factor[:, None]
    exact.backward(dh.double())
    assert wide.grad is not None and factor.grad is not None
    rounding = {0: 4e-3, TENSOR: 0.05, ROW: 0.05, BLOCK: 0.05}[mode]

    def rows(data: Tensor, inv: Tensor) -> Tensor:
        if not mode:
            return data[live]
        return read(data[live], inv[live] if mode != TENSOR else inv.flatten()[0], mode)

    near(rows(h, h_inv), exact[live], rounding, "h")
    if mode:
        near(amax, exact[live].abs().max(), 4e-3, "amax")
    if mode == TENSOR:
        assert how is not None and back is not None
        d, dt, ht, inv, dw = swiglu.swiglu_backward_tensor(dh, y, weight, ends, h_inv, zeros(), d_amax, back, how)
        assert torch.equal(dt[:, live].t().float(), d[live].float()) and torch.equal(
            ht[:, live].t().float(), h[live].float()
        )
        assert (dt[:, R:].float() == 0).all() and (ht[:, R:].float() == 0).all()
    elif mode == ROW:
        d, h8, inv, dw = swiglu.swiglu_backward_rows(dh, y, weight, ends, h_inv, d_amax, back, how)
        assert torch.equal(h8[live].float(), h[live].float()), "the same numbers as in the forward pass"
    else:
        d, again, inv, dw = swiglu.swiglu_backward_rows(dh, y, weight, ends, None, d_amax, None, None)
        near(again[live], exact[live], 4e-3, "h again")
    got = d[live] if mode in (0, BLOCK) else read(d[live], inv[live] if mode == ROW else inv, mode)
    near(got, wide.grad[live], 4e-3 if mode in (0, BLOCK) else 0.08, "[dg, du]")
    if experts:
        near(dw.sum(0)[live], factor.grad[live], 1e-4, "dw")


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
@pytest.mark.parametrize(("experts", "width"), [(False, 80), (True, 144), (True, 256)])
def test_swiglu_saved_in_fp8_goes_back_as_the_numbers_that_were_saved(mode: int, experts: bool, width: int) -> None:
    torch.manual_seed(mode)
    to = routed()[0] if experts else None
    R = to.token.shape[0] if to is not None else 37
    weight, ends = (to.weight, to.ends) if to is not None else (None, None)
    live = slice(0, int(to.ends[-1]) if to is not None else R)
    y, dh = random(R, 2 * width), random(R, width)
    y[2] *= 1e4
    y[3] = 0
    how, back = (Cast(fmt, mode, False, 0, mode != TENSOR) for fmt in (E4M3, E5M2))
    h, h_inv, y8, y_inv = swiglu.swiglu(y, weight, ends, zeros(), zeros(), how, narrow=True)
    same_h, same_inv, _, _ = swiglu.swiglu(y, weight, ends, zeros(), zeros(), how)
    assert torch.equal(h[live].float(), same_h[live].float())
    assert torch.equal(h_inv, same_inv)
    data, inv = swiglu_to_fp8(y)
    assert torch.equal(y8[live].float(), data.flatten(-2)[live].float())
    assert torch.equal(y_inv.view(2, -1, R)[..., live], inv.permute(1, 2, 0)[..., live])
    saved = swiglu_from_fp8(data, inv, torch.bfloat16)
    near(saved[live], y[live], 0.04, "[g, u]")
    results = []
    for given, scales in ((y8, y_inv), (saved, None)):
        made: list[Tensor] = [amax := zeros()]
        if mode == TENSOR:
            d, dt, ht, d_inv, dw = swiglu.swiglu_backward_tensor(
                dh, given, weight, ends, h_inv, zeros(), amax, back, how, scales
            )
            made += [d[live], dt[:, live], ht[:, live], d_inv]
        elif mode == ROW:
            d, h8, d_inv, dw = swiglu.swiglu_backward_rows(dh, given, weight, ends, h_inv, amax, back, how, scales)
            made += [d[live], h8[live], d_inv[live]]
        elif width % 128 == 0:
            *parts, dw = swiglu_backward_blocks(dh, given, weight, ends, amax, back, how, scales)
            made += [parts[0][live], parts[2][:, live], parts[4][:, live], parts[1][live]]
        else:
            d, h, _, dw = swiglu.swiglu_backward_rows(dh, given, weight, ends, None, amax, None, None, scales)
            made += [d[live], h[live]]
        results.append([*made, dw[:, live]])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("R", "width", "power_of_two"), [(37, 128, True), (150, 384, False)])
def test_swiglu_in_blocks_has_the_bits_of_separate_passes(
    experts: bool, R: int, width: int, power_of_two: bool
) -> None:
    torch.manual_seed(R)
    to = routed()[0] if experts else None
    R = to.token.shape[0] if to is not None else R
    weight, ends = (to.weight, to.ends) if to is not None else (None, None)
    live = slice(0, int(to.ends[-1]) if to is not None else R)
    y, dh = random(R, 2 * width) + 0.5, random(R, width)
    dh[3] *= 1000
    dh[5:10] = 0
    how, back = (Cast(fmt, BLOCK, False, 0, power_of_two) for fmt in (E4M3, E5M2))
    ours = swiglu_backward_blocks(dh, y, weight, ends, amax := zeros(), back, how)
    exact, h, _, dw = swiglu.swiglu_backward_rows(dh, y, weight, ends, None, zeros(), None, None)
    d, inv, dt, inv_t = cast.cast_blocks(exact, d_amax := zeros(), back, rows=True, transposed=True, ends=ends)
    _, _, ht, inv_ht = cast.cast_blocks(h, zeros(), how, rows=False, transposed=True, again=True, ends=ends)
    assert dt is not None and inv_t is not None and ht is not None and inv_ht is not None
    stop = live.stop if experts else dt.shape[1]  # plain rows: zeros up to whole tiles
    for one, other in ((ours[0][live], d[live]), (ours[2][:, :stop], dt[:, :stop]), (ours[4][:, :stop], ht[:, :stop])):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    tiles = -(-stop // 128)
    for one, other in ((ours[1][live], inv[live]), (ours[3][:tiles], inv_t[:tiles]), (ours[5][:tiles], inv_ht[:tiles])):
        assert torch.equal(one, other)
    assert amax == d_amax == exact[live].abs().max()
    if experts:
        near(ours[6].sum(0)[live], dw.sum(0)[live], 2.0**-16, "dw")


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
@pytest.mark.parametrize("spread", ["random", "one"])
def test_grouped_products(mode: int, spread: str) -> None:
    to, _, _ = routed(spread)
    R, inner, outer = to.token.shape[0], 144, 272
    how, back = (Cast(fmt, mode, False, 0, mode != TENSOR) for fmt in (E4M3, E4M3 if mode == BLOCK else E5M2))
    x, dy = (torch.where(to.token[:, None] >= 0, random(R, n), 0).bfloat16() for n in (inner, outer))
    w = random(E, outer, inner)
    x8, x_inv, x_t, x_t_inv = cast.cast(x, zeros(), zeros(), how, transposed=True)
    dy8, dy_inv, dy_t, dy_t_inv = cast.cast(dy, zeros(), zeros(), back, transposed=True)
    parts = [cast.cast(m, zeros(), zeros(), Cast(E4M3, TENSOR if mode == BLOCK else mode, False, 0, True)) for m in w]
    w8 = torch.stack([part[0] for part in parts])
    w_inv = torch.stack([part[1] for part in parts])
    w_read = w8.float() * w_inv.view(E, -1, 1)
    if mode == BLOCK:
        w_inv = w_inv.view(E, 1, 1).expand(E, 3, 2).contiguous()
    y = grouped_gemm.nt(x8, x_inv, w8, w_inv, mode, to)
    assert x_t is not None and x_t_inv is not None and dy_t is not None and dy_t_inv is not None
    dw = grouped_gemm.wgrad(dy_t, dy_t_inv, x_t, x_t_inv, mode, to)
    x_read, dy_read = (read(a.float(), b, mode) for a, b in ((x8, x_inv), (dy8, dy_inv)))
    x_columns, dy_columns = (
        a.t().float() * (b.repeat_interleave(128, 0)[: a.shape[1]] if mode == BLOCK else b)
        for a, b in ((x_t, x_t_inv), (dy_t, dy_t_inv))
    )
    near(dy_read, dy, 0.1)
    for e, rows in enumerate(groups(to)):
        near(y[rows], x_read[rows] @ w_read[e].t(), 4e-3, f"y of {e}")
        near(dw[e], dy_columns[rows].t() @ x_columns[rows], 1e-3, f"dw of {e}")


@pytest.mark.parametrize(("M", "N"), [(144, 272), (256, 128), (128, 256)])
def test_grouped_weight_gradient_in_bf16(M: int, N: int) -> None:
    to, _, _ = routed(align=64)
    live = to.token[:, None] >= 0
    a, b = (torch.where(live, random(to.token.shape[0], n), 0).bfloat16() for n in (M, N))
    d = grouped_gemm.wgrad_bf16(a, b, to)
    for e, rows in enumerate(groups(to)):
        near(d[e], a[rows].float().t() @ b[rows].float(), 1e-5, f"expert {e}")
