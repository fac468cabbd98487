"""Sampled, the cuda backend's operators show rows of the very numbers that they cast, and change nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from precision import (
    Feed,
    GemmRow,
    GroupedLinear,
    Kurtosis,
    Linear,
    Plan,
    PrecisionConfig,
    ScalingArena,
    begin_step,
    bind,
    expert_ffn,
    gated_ffn,
    observe,
    rms_norm,
)
from precision.formats import Format, read_back, saturating_cast
from precision.kurtosis import add_plain_kurtosis
from precision.observe import sampling

pytest.importorskip("triton", reason="Triton is missing")
Recipe = Callable[..., PrecisionConfig]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SAMPLE = "SAMPLE" if ON_GPU else "SAMPLE_ON_CPU"
ROWS, WIDTH, INNER, EXPERTS = (45, 144, 80, 3) if ON_GPU else (13, 144, 48, 2)
ROW = {"scaling__method": "current", "scaling__granularity": "row", "scaling__power_of_two": True}
RECIPES = {"bf16": ("bf16", {}), "tensor": ("fp8_delayed", {}), "row": ("fp8_jit", ROW), "block": ("fp8_block", {})}


class Layer(nn.Module):
    """A norm, and behind it a feed-forward layer or experts."""

    def __init__(self, config: PrecisionConfig, backend: str, dense: bool):
        super().__init__()
        self.plan, self.dense, self.backend = Plan(config, 1), dense, backend

        def row(name: str, k: int, n: int) -> GemmRow:
            many = () if dense else (EXPERTS, 2)
            made = self.plan.gemm(f"layers.0.{name}", "ffn" if dense else "moe.experts", k, n, *many)
            return replace(made, recipe=replace(made.recipe, backend=backend))

        kind = Linear if dense else GroupedLinear
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up, self.down = kind(row("up", WIDTH, 2 * INNER)), kind(row("down", INNER, WIDTH))
        self.feed, self.down_feed = Feed(self.up, tensor=not dense), Feed(self.down)
        self.kurtosis = Kurtosis("ffn")

    def forward(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        operand = rms_norm(x, self.gain, 1e-6, self.feed, self.backend)
        if isinstance(self.up, Linear) and isinstance(self.down, Linear):
            return gated_ffn(operand, self.up, self.down, self.down_feed, self.kurtosis)
        assert isinstance(self.up, GroupedLinear) and isinstance(self.down, GroupedLinear)
        return expert_ffn(
            operand, expert, weight, self.up, self.down, down_feed=self.down_feed, rows_feed=None,
            combine=torch.bfloat16, accumulate=torch.float32, add=None, kurtosis=self.kurtosis,
        )  # fmt: skip


class Shown:
    """An observer that keeps what it is shown, by the name of the arena's row; rows that do not count are left out."""

    def __init__(self, arena: ScalingArena):
        self._names, self.casts = arena.names, dict[str, list[tuple[Tensor, Tensor, Tensor, Format]]]()

    def __call__(
        self, place: int, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
    ) -> None:
        if live is not None:
            rows = (live >= 0).nonzero().flatten()
            x, data = x[rows], data.view(torch.uint8)[rows].view(data.dtype)
            scale_inv = scale_inv[rows] if scale_inv.dim() else scale_inv
        self.casts.setdefault(self._names[place], []).append((x.clone(), data.clone(), scale_inv.clone(), fmt))

    def names(self) -> set[str]:
        return {name.removeprefix("layers.0.").removesuffix(".0") for name in self.casts}


def build(config: PrecisionConfig, backend: str, dense: bool) -> tuple[Layer, ScalingArena]:
    torch.manual_seed(1)
    layer = Layer(config, backend, dense).to(DEVICE)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return layer, bind(layer, layer.plan, DEVICE)


def step(layer: Layer, arena: ScalingArena, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """All results of a step."""
    torch.manual_seed(2)
    x = (torch.randn(ROWS, WIDTH) * torch.logspace(-1, 1, ROWS)[:, None]).to(DEVICE, torch.bfloat16).requires_grad_()
    expert = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(ROWS)]).to(DEVICE)
    weight = torch.rand(ROWS, 2).to(DEVICE).requires_grad_()
    begin_step(layer, arena)
    y = (run or layer)(x, expert, weight)
    y.backward((torch.randn(y.shape) * 1e-3).to(DEVICE, y.dtype))
    found = [y.detach(), *(t.grad for t in (x, weight, *layer.parameters()) if t.grad is not None), arena.amax.clone()]
    layer.zero_grad()
    return found


def cast_again(x: Tensor, inv: Tensor, fmt: Format) -> Tensor:
    """The twin's cast of x [(G,) R, C] under known scales."""
    for dim in (-2, -1) if inv.dim() > 1 else ():
        if inv.shape[dim] not in (1, x.shape[dim]):
            inv = inv.repeat_interleave(128, dim).narrow(dim, 0, x.shape[dim])
    inv = inv[:, None, None] if inv.dim() == 1 else inv
    return saturating_cast(x.bfloat16(), torch.where(inv > 0, inv, 1.0).reciprocal(), fmt)


KINDS = [(name, dense) for name in RECIPES for dense in (True, False)]
KINDS = KINDS if ON_GPU else [kind for kind in KINDS if kind not in (("block", True), ("row", False))]
# cuBLAS takes blocks on a GPU only; the interpreter is slow


@pytest.mark.parametrize(("name", "dense"), KINDS)
def test_observers_are_shown_the_cast_numbers(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, name: str, dense: bool
) -> None:
    base, overrides = RECIPES[name]
    config = recipe(base, **overrides)
    layer, arena = build(config, "cuda", dense)
    alone = step(layer, arena)
    assert layer.kurtosis.sums is not None and not layer.kurtosis.sums.any()
    monkeypatch.setattr(observe, SAMPLE, 5 if dense else 70)
    shown = Shown(arena)
    with sampling(shown):
        watched = step(layer, arena)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True)), "the step does not notice"
    names = {f"{part}:{what}" for part in ("up", "down") for what in ("input", "weight", "grad")}
    assert shown.names() == (set() if name == "bf16" else names)
    for each, casts in shown.casts.items():
        ((x, data, inv, fmt),) = casts
        again = cast_again(x, inv, fmt)
        # a scale that is known as its inverse, and a number made again, may be off in the last bit
        assert (again.float() != data.float()).float().mean() < 0.01, each
        error = (read_back(data, inv[:, None, None] if inv.dim() == 1 else inv) - x.float()).norm() / x.float().norm()
        assert 0 < error < 0.08, each
        if not each.endswith(("weight", "weight.0", "weight.1", "weight.2")):
            assert len(x) <= (5 if dense else 70) and x.any(), "rows of tokens"
    if name == "block" and not ON_GPU:
        return

    sums = layer.kurtosis.sums.clone()
    monkeypatch.setattr(observe, SAMPLE, 4096)
    with sampling(shown):
        step(layer, arena)
    everything = layer.kurtosis.sums - sums
    theirs, their_arena = build(config, "reference", dense)
    with sampling(shown):
        step(theirs, their_arena)
    assert theirs.kurtosis.sums is not None
    assert everything[1] == theirs.kurtosis.sums[1] == ROWS * (1 if dense else 2) > sums[1] > 0
    torch.testing.assert_close(everything[0], theirs.kurtosis.sums[0], rtol=0.05, atol=0)


def test_a_compiled_layer_shows_the_same(recipe: Recipe) -> None:
    layer, arena = build(recipe("fp8_delayed"), "cuda", dense=True)
    alone = step(layer, arena)
    compiled = torch.compile(layer.forward, backend="aot_eager")
    quiet = step(layer, arena, compiled)
    eager, shown = Shown(arena), Shown(arena)
    with sampling(eager):
        step(layer, arena)
    assert layer.kurtosis.sums is not None
    sums = layer.kurtosis.sums.clone()
    with sampling(shown), torch.compiler.set_stance("fail_on_recompile"):
        watched = step(layer, arena, compiled)
    for results in (quiet, watched):
        assert all(torch.equal(a, b) for a, b in zip(alone, results, strict=True))
    assert eager.casts.keys() == shown.casts.keys() and len(shown.casts) == 6
    for each, ((x, data, inv, _),) in shown.casts.items():
        ((other_x, other_data, other_inv, _),) = eager.casts[each]
        assert torch.equal(x, other_x) and torch.equal(data.float(), other_data.float()) and torch.equal(inv, other_inv)
    torch.testing.assert_close(layer.kurtosis.sums, 2 * sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kurtosis_of_rows(dtype: torch.dtype) -> None:
    from precision.kernels.kurtosis import add_kurtosis

    torch.manual_seed(0)
    x = torch.randn(90, 1300).mul_(3).exp_().to(DEVICE, dtype)[::3]
    x[4] = 0
    live = torch.arange(90, dtype=torch.int32, device=DEVICE)[::3] % 4 - 1
    ours, theirs = torch.zeros(2, 2, dtype=torch.float64, device=DEVICE)
    add_kurtosis(ours, x)
    add_plain_kurtosis(theirs, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert ours[1] == 29, "one row is zeros"
    alive = live >= 0
    x[~alive] = torch.nan
    add_kurtosis(ours.zero_(), x, live)
    add_plain_kurtosis(theirs.zero_(), x[alive])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    add_kurtosis(theirs, x[:0])
    assert ours[1] == theirs[1] == (x[alive] != 0).any(1).sum() < 30
