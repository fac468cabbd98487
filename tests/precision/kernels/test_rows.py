"""Routes of many choices, and SwiGLU at sizes and with scales that the self-test has not (`precision.selftest`)."""

import pytest
import torch
from torch import Tensor

from precision.formats import E4M3, E5M2

pytest.importorskip("triton", reason="Triton is missing")
from precision.fused import swiglu_from_fp8, swiglu_to_fp8
from precision.kernels import cast, swiglu
from precision.kernels.common import Cast
from precision.kernels.route import Route, route
from precision.kernels.swiglu_blocks import swiglu_backward_blocks
from precision.selftest.twins import experts_rows, near

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR, ROW, BLOCK = 1, 2, 3


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def routed(T: int, K: int, E: int) -> tuple[Route, Tensor, Tensor]:
    """A route, and the experts and weights [T, K] that it is of; the last expert gets none."""
    torch.manual_seed(T)
    expert = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).clamp(max=E - 2).to(DEVICE)
    weight = torch.rand(T, K).to(DEVICE)
    return route(expert, weight, E, 128), expert, weight


def test_choices_of_several_programs_are_sorted_by_expert() -> None:
    T, K = 300, 3  # a program has 256 choices
    to, expert, weight = routed(T, K, 7)
    starts, ends = to.starts.tolist(), to.ends.tolist()
    assert starts == [0, *ends[:-1]] and all(end % 128 == 0 for end in ends)
    for e, rows in enumerate(experts_rows(to)):
        real = to.token[rows] >= 0
        assert to.token[rows][real].tolist() == (expert == e).nonzero()[:, 0].tolist(), "in the tokens' order"
        assert torch.equal(to.weight[rows][real], weight[expert == e]) and not to.weight[rows][~real].any()
    assert int((to.token >= 0).sum()) == T * K
    assert torch.equal(to.token[to.position.long()], torch.arange(T, device=DEVICE)[:, None].expand(T, K).int())
    experts = [e for e, rows in enumerate(experts_rows(to)) for _ in range(rows.start, rows.stop, 128)]
    assert to.tile_expert[: len(experts)].tolist() == experts


@pytest.mark.parametrize(("mode", "width"), [(TENSOR, 144), (ROW, 144), (BLOCK, 144), (BLOCK, 256)])
def test_swiglu_saved_in_fp8_goes_back_as_the_numbers_that_were_saved(mode: int, width: int) -> None:
    to, _, _ = routed(40, 2, 2)
    R, weight, ends, live = len(to.token), to.weight, to.ends, slice(0, int(to.ends[-1]))
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
def test_swiglu_in_blocks_of_any_scale_has_the_bits_of_separate_passes(experts: bool) -> None:
    to, width = routed(40, 2, 2)[0] if experts else None, 384
    R = len(to.token) if to is not None else 150
    weight, ends = (to.weight, to.ends) if to is not None else (None, None)
    live = slice(0, int(to.ends[-1]) if to is not None else R)
    y, dh = random(R, 2 * width) + 0.5, random(R, width)
    dh[3] *= 1000
    dh[5:10] = 0
    how, back = (Cast(fmt, BLOCK, False, 0, power_of_two=False) for fmt in (E4M3, E5M2))
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
