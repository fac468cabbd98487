"""Tokens that were sent to experts and back give what experts in place give, on both backends; and what it was that
travelled. One process plays both ends; several are in tests/models/test_dispatch.py."""

from collections.abc import Callable

import pytest
import torch
from kernel_layers import DEVICE, Layers, build
from torch import Tensor

from precision import Operand, PrecisionConfig, ScalingArena, begin_step, expert_ffn, rms_norm
from precision.ffn import has_row_kernels
from precision.wire import GradFormat, RowMap, read_back, return_to_tokens, send

pytest.importorskip("triton", reason="Triton is missing")
Recipe = Callable[..., PrecisionConfig]
T, WIDTH, INNER, EXPERTS, PROCESSES = 21, 144, 48, 4, 2
SIZES, PARTS = (WIDTH, INNER, EXPERTS), ("ups", "downs")
BF16, FP32 = torch.bfloat16, torch.float32
RECIPES = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"]
CURRENT = {"scaling__method": "current"}
# Triton's interpreter takes a minute for all recipes: there one stands for them
RUNS = [(name, "reference") for name in [*RECIPES, "no_history", "current"]]
RUNS += [(name, "cuda") for name in ([*RECIPES, "no_history", "current"] if DEVICE == "cuda" else ["fp8_delayed"])]


def norm(layer: Layers, x: Tensor) -> Operand | Tensor:
    return rms_norm(x, layer.gain, 1e-6, layer.feed, layer.kernels)


def experts(
    layer: Layers, x: Operand | Tensor, expert: Tensor, weight: Tensor, add: Tensor | None, grad=None, choices: int = -1
) -> Tensor:
    return expert_ffn(
        x, expert, weight, layer.ups, layer.downs, down_feed=layer.downs_feed, rows_feed=None, combine=BF16,
        accumulate=FP32, add=add, grad=grad, choices=choices,
    )  # fmt: skip


class Mirror:
    """Both ends in one process. log: format and shape of whatever travelled. used: rows that are, of slots; the others
    arrive as zeros, whatever they were."""

    def __init__(self):
        self.log: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self.used: Tensor | None = None

    def to_experts(self, *rows: Tensor) -> list[Tensor]:
        self.log += [(one.dtype, tuple(one.shape)) for one in rows]
        came = [one.clone() for one in rows]
        if self.used is not None:
            for one in came:
                one.view(torch.uint8).masked_fill_(~self.used[:, None], 0)
        return came

    to_tokens = to_experts

    def largest(self, x: Tensor) -> Tensor:
        return x


def travel(
    layer: Layers,
    made: Operand | Tensor,
    expert: Tensor,
    weight: Tensor,
    add: Tensor,
    known: bool,
    way: Mirror,
    slots: int,
):
    """The experts' layer over a wire, in so many slots for each process; 0: in as many rows as there are."""
    kernels = has_row_kernels(layer.ups, layer.downs, BF16, FP32)
    if slots:
        row_map, wanted = RowMap.in_slots(expert, PROCESSES, EXPERTS // PROCESSES, kernels, slots)
        assert wanted.tolist() == [int((expert // row_map.each == p).any(1).sum()) for p in range(PROCESSES)]
        choices, way.used = expert.numel() + (200 if kernels else 0), row_map.token >= 0
    else:
        row_map = RowMap.packed(expert, PROCESSES, EXPERTS // PROCESSES, kernels)
        sent, each = row_map.counts().t().tolist()
        row_map, choices = row_map.cut(sum(sent)), sum(each)
    grad = GradFormat.of(layer.downs, known) if isinstance(made, Operand) else None
    x, expert_AK, weight_AK = send(made, expert, weight, row_map, way, layer.ups, known)
    first_A1 = row_map.process[:, None] * row_map.each  # this process is all of them
    expert_AK = torch.where(expert_AK < row_map.each, expert_AK + first_A1, EXPERTS)
    y = experts(layer, x, expert_AK, weight_AK, None, None if grad is None else grad.rows, choices)
    return return_to_tokens(y, add, row_map, way, grad, FP32)


def step(layer: Layers, arena: ScalingArena, way: Mirror | None, known: bool, slots: int = 0) -> list[Tensor]:
    """Result, gradients and amaxes."""
    begin_step(layer, arena)
    layer.zero_grad()
    generator = torch.Generator().manual_seed(2)
    x, add, dy = (torch.randn(3, T, WIDTH, generator=generator) * 0.1).to(DEVICE, BF16).unbind()
    weight = torch.rand(T, 2, generator=generator).to(DEVICE).requires_grad_()
    expert = torch.rand(T, EXPERTS, generator=generator).argsort(1)[:, :2].contiguous().to(DEVICE)
    x, add = x.clone().requires_grad_(), add.clone().requires_grad_()
    made = norm(layer, x)
    if way is None:
        y = experts(layer, made, expert, weight, add)
    else:
        y = travel(layer, made, expert, weight, add, known, way, slots)
    y.backward(dy)
    grads = [t.grad for t in (x, add, weight, *layer.parameters()) if t.grad is not None]
    return [y.detach(), *grads, arena.amax.clone()]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_sent_or_in_place(recipe: Recipe, name: str, backend: str) -> None:
    known = name not in ("no_history", "current")
    recipes = {"no_history": recipe("fp8_delayed"), "current": recipe("fp8_delayed", **CURRENT)}
    layer, arena = build(recipes[name] if name in recipes else recipe(name), backend, SIZES, *PARTS)
    if name == "fp8_delayed":
        step(layer, arena, None, False)
        arena.commit(arena.finite())
    way = Mirror()
    here, sent = step(layer, arena, None, known), step(layer, arena, way, known)
    assert len(here) == len(sent) == 8
    for i, (a, b) in enumerate(zip(sent, here, strict=True)):
        assert torch.isfinite(a).all() and a.dtype == b.dtype
        error = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        limit = 5e-3 if i in (0, 1, 6) else 1e-6  # y, dx and the gain's gradient: sums of two rounded sums
        assert error <= limit, f"tensor {i}: {error:.1e}"
    for a, b in zip(step(layer, arena, Mirror(), known, slots=T + 11), sent, strict=True):
        assert torch.equal(a, b), "slots that are not in use change no bit"
    rows = way.log[0][1][0]
    assert T < rows < 2 * T, "a token goes to a process once"
    if name == "bf16":
        fp8_x, fp8_dy = BF16, BF16
    else:
        fp8_x, fp8_dy = layer.ups.recipe.input.dtype, layer.downs.recipe.grad.dtype
    scales = {"fp8_jit": 1, "fp8_block": 2}.get(name, 0)
    expected = [
        (fp8_x, (rows, WIDTH)),
        (torch.int32, (rows, 4 + scales)),
        (BF16, (rows, WIDTH)),
        (fp8_dy, (rows, WIDTH)),
    ]
    expected += [(FP32, (rows, scales))] * (scales > 0) + [(BF16, (rows, WIDTH)), (FP32, (rows, 2))]
    assert way.log == expected


class Leftovers(Mirror):
    """Shared memory: on the way back, slots that are not in use hold what was there before."""

    def to_tokens(self, *rows: Tensor) -> list[Tensor]:
        assert self.used is not None
        return [one.clone().masked_fill_(~self.used[:, None], torch.nan) for one in rows]


def test_a_token_without_a_slot_gets_no_gradient_from_what_is_left_in_another(recipe: Recipe) -> None:
    """Such a step is skipped, for its lack of slots and not for a gradient that is not finite."""
    layer, way = build(recipe("bf16"), "reference", SIZES, *PARTS)[0], Leftovers()
    x, weight = torch.randn(T, WIDTH).to(DEVICE, BF16).requires_grad_(), torch.rand(T, 2).to(DEVICE).requires_grad_()
    expert = torch.arange(2, device=DEVICE).expand(T, 2)  # all of the first process: the second one's slots stay empty
    row_map, _ = RowMap.in_slots(expert, PROCESSES, EXPERTS // PROCESSES, False, 8)
    way.used = row_map.token >= 0
    x_AD, _, weight_AK = send(x, expert, weight, row_map, way, layer.ups, True)
    assert isinstance(x_AD, Tensor)
    (x_AD.float().sum() + weight_AK.sum()).backward()
    for grad in (x.grad, weight.grad):
        assert grad is not None and bool((grad[:8] == 1).all()) and not grad[8:].any()


@pytest.mark.parametrize(("name", "backend"), [run for run in RUNS if run[0] in RECIPES])
def test_a_row_of_zeros_leaves_no_trace(recipe: Recipe, name: str, backend: str) -> None:
    """What experts receive that no token was sent to."""
    layer, arena = build(recipe(name), backend, SIZES, *PARTS)
    begin_step(layer, arena)
    before = arena.amax.clone()
    x = norm(layer, torch.zeros(1, WIDTH, device=DEVICE, dtype=BF16, requires_grad=True))
    expert, weight = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    y = experts(layer, x, expert, weight.requires_grad_(), None)
    y.backward(torch.zeros_like(y))
    for parameter in (layer.ups.weight, layer.downs.weight):
        assert parameter.grad is not None and not parameter.grad.any()
    assert not y.any() and torch.equal(arena.amax, before)


@pytest.mark.parametrize("fmt", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("width", [128, 144, 272])
def test_read_back(width: int, fmt: torch.dtype) -> None:
    data = torch.randn(5, width, device=DEVICE).to(fmt)
    for inv in (torch.tensor(0.3), torch.rand(5, 1), torch.rand(-(-width // 128), 5).t()):
        inv = inv.to(DEVICE)
        spread = (
            inv
            if inv.dim() == 0
            else torch.stack([inv[:, c // 128 if inv.shape[1] > 1 else 0] for c in range(width)], 1)
        )
        assert torch.equal(read_back(data, inv, FP32, False), data.float() * spread)
        for kernels in (False, True):
            assert torch.equal(read_back(data, inv, BF16, kernels), (data.float() * spread).to(BF16))
