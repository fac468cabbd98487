"""The cuda backend against the reference backend on random data and awkward shapes; in the interpreter or on a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_layers import DEVICE, Layers, build
from torch import Tensor

from precision import (
    Operand,
    PrecisionConfig,
    begin_step,
    expert_ffn,
    gated_ffn,
    linear_cross_entropy,
    rms_norm,
)
from precision.activation import Gelu
from precision.scaling import step_scale

pytest.importorskip("triton", reason="Triton is missing")
Recipe = Callable[..., PrecisionConfig]
CURRENT = {"scaling__method": "current", "scaling__granularity": "tensor", "scaling__power_of_two": False}
ROW = {"scaling__method": "current", "scaling__granularity": "row", "scaling__power_of_two": True}
RECIPES = {
    "bf16": ("bf16", {}),
    "delayed": ("fp8_delayed", {}),
    "current": ("fp8_jit", CURRENT),
    "row": ("fp8_jit", ROW),
    "row_margin_e4m3": ("fp8_jit", ROW | {"scaling__backward": "e4m3", "scaling__margin": 1}),
    "block": ("fp8_block", {}),
}
ON_GPU = torch.cuda.is_available()  # else interpreted, which takes its time: fewer shapes
CHOSEN = list(RECIPES) if ON_GPU else ["bf16", "delayed", "row", "block"]


def error(ours: Tensor, exact: Tensor) -> float:
    assert ours.shape == exact.shape
    return float((ours.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30))


def compare(
    recipe: Recipe, name: str, sizes: tuple[int, int, int], run: Callable[[Layers, int], list[Tensor]], *parts: str
) -> None:
    """Outputs, gradients, scales and amaxes of `run`: `cuda` is as near to FP32 as `reference` is.

    They are not compared with each other: where one GEMM's result is quantised again, a rounding of BF16 in an amax
    changes a scale that is no power of two, and with it how every number is rounded. Two right results then differ by
    the rounding of FP8 itself.
    """
    base, overrides = RECIPES[name]
    if base == "fp8_block" and not ON_GPU and ("up" in parts or run.__qualname__.startswith("test_linear")):
        pytest.skip("cuBLAS takes block scales on a GPU only")
    results = []
    steps = 2 if ON_GPU or base == "fp8_delayed" else 1  # the second one scales by the history of the first
    for config, backend in (
        (recipe("fp32"), "reference"),
        (recipe(base, **overrides), "reference"),
        (recipe(base, **overrides), "cuda"),
    ):
        layers, arena = build(config, backend, sizes, *parts)
        seen: list[Tensor] = []
        amaxes: list[Tensor] = []
        for step in range(steps):
            if step > 0:  # `build` has cast the weights
                begin_step(layers, arena)
            seen += run(layers, step)
            seen += [p.grad for p in layers.parameters() if p.grad is not None]
            layers.zero_grad()
            amaxes.append(arena.amax.clone())
            arena.commit(arena.finite())
        results.append((seen, [*amaxes, arena.scale], arena.names))
    (exact, _, _), (theirs, their_rows, names), (ours, our_rows, our_names) = results
    for i, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert torch.isfinite(a).all() and a.dtype == b.dtype, f"tensor {i}"
        # 2^-8: one more rounding of a result to BF16
        assert error(a, c) <= 1.2 * error(b, c) + 2.0**-8, (
            f"tensor {i}: error {error(a, c):.1e}, reference {error(b, c):.1e}"
        )
    assert names == our_names
    for a, b in zip(our_rows, their_rows, strict=True):
        assert error(a, b) < 2e-2


def through_experts(layers: Layers, x: Tensor, expert: Tensor, weight: Tensor, **more: Any) -> Tensor:
    """The norm and the gated experts; more: arguments of `expert_ffn`."""
    given: dict[str, Any] = {"rows_feed": None, "combine": torch.bfloat16, "accumulate": torch.float32, "add": None}
    made = rms_norm(x, layers.gain, 1e-6, layers.feed, layers.kernels)
    return expert_ffn(
        made, expert, weight, layers.ups, layers.downs, down_feed=layers.downs_feed, **(given | more)
    )  # fmt: skip


def gradient(y: Tensor) -> Tensor:
    """The same random numbers in every recipe."""
    return (torch.randn(y.shape) * 1e-4).bfloat16().to(y.device, y.dtype)


def backward(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    """y, and the gradients of inputs."""
    y.backward(gradient(y))
    gradients = [x.grad for x in inputs if x.grad is not None]
    assert len(gradients) == len(inputs)
    return [y.detach(), *gradients]


def draw(step: int, *shape: int) -> Tensor:
    torch.manual_seed(100 + step)
    x = torch.randn(shape) * torch.logspace(-1, 1, shape[0])[:, None]
    return x.to(DEVICE, torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(
    ("rows", "width", "inner"),
    [(37, 144, 272), (1, 16, 48), (130, 256, 128), (1000, 768, 512)][: None if ON_GPU else 1],
)
def test_linear(recipe: Recipe, name: str, rows: int, width: int, inner: int) -> None:
    def run(layers: Layers, step: int) -> list[Tensor]:
        x = draw(step, rows, width)
        y = layers.alone(x)
        return backward(y, x)

    compare(recipe, name, (width, inner, 2), run, "alone")


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("sizes", [(5, 0, 131, 1), (0, 0, 7, 0), (300, 200, 1, 0)][: None if ON_GPU else 1])
def test_grouped_linear(recipe: Recipe, name: str, sizes: tuple[int, ...]) -> None:
    def run(layers: Layers, step: int) -> list[Tensor]:
        x = draw(step, sum(sizes), 144)
        y = layers.grouped(x, torch.tensor(sizes, device=DEVICE).cumsum(0).int())
        return backward(y, x)

    compare(recipe, name, (144, 48, len(sizes)), run, "grouped")


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(
    ("rows", "width", "inner"), [(37, 144, 80), (3, 16, 32), (129, 256, 256), (1000, 768, 512)][: None if ON_GPU else 1]
)
def test_norm_and_dense_ffn(recipe: Recipe, name: str, rows: int, width: int, inner: int) -> None:
    def run(layers: Layers, step: int) -> list[Tensor]:
        x = draw(step, rows, width)
        y = gated_ffn(
            rms_norm(x, layers.gain, 1e-6, layers.feed, layers.kernels), layers.up, layers.down, layers.down_feed
        )
        return backward(y, x)

    compare(recipe, name, (width, inner, 2), run, "up", "down")


@pytest.mark.parametrize("spread", ["random", "one expert has all", "one has none"][: None if ON_GPU else 1])
@pytest.mark.parametrize(
    ("name", "inner", "keep"),
    [(name, inner, True) for name in CHOSEN for inner in (80, 128) if ON_GPU or inner == 80 or name == "block"]
    + [("bf16", 80, False)],
)
def test_norm_and_experts(recipe: Recipe, name: str, spread: str, inner: int, keep: bool) -> None:
    rows, width, experts = (45, 144, 5) if ON_GPU else (21, 144, 3)

    def run(layers: Layers, step: int) -> list[Tensor]:
        x = draw(step, rows, width)
        first = {
            "random": torch.randint(experts - 1, (rows,)),
            "one expert has all": torch.zeros(rows, dtype=torch.long),
        }
        chosen = first.get(spread, torch.randint(2, (rows,)))
        expert = torch.stack([chosen, torch.full_like(chosen, experts - 1)], 1).to(DEVICE)
        weight = torch.rand(rows, 2).to(DEVICE).requires_grad_()
        add = torch.randn(rows, width).to(DEVICE, torch.bfloat16).requires_grad_()
        y = through_experts(layers, x, expert, weight, add=add, keep_rows=keep)
        return backward(y, x, weight, add)

    compare(recipe, name, (width, inner, experts), run, "ups", "downs")


@pytest.mark.parametrize("name", ["bf16", "delayed"])
def test_experts_read_tokens_that_travelled_in_fp32(recipe: Recipe, name: str) -> None:
    def run(layers: Layers, step: int) -> list[Tensor]:
        x = draw(step, 21, 144).detach().float().requires_grad_()
        expert, weight = torch.randint(3, (21, 2)).to(DEVICE), torch.rand(21, 2).to(DEVICE)
        combine = {"combine": torch.bfloat16, "accumulate": torch.float32, "add": None}
        y = expert_ffn(
            x, expert, weight, layers.ups, layers.downs, down_feed=layers.downs_feed, rows_feed=None, **combine
        )
        return backward(y, x)

    compare(recipe, name, (144, 80, 3), run, "ups", "downs")


@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """What is read before it is written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # without which torch does not fill memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("name", CHOSEN)
def test_experts_that_no_token_chose_have_gradients_of_zero(recipe: Recipe, name: str, memory_of_nan: None) -> None:
    base, overrides = RECIPES[name]
    layers, arena = build(recipe(base, **overrides), "cuda", (144, 80, 2), "ups", "downs")
    x, none = draw(0, 21, 144), torch.full((21, 2), 2, device=DEVICE)
    y = through_experts(layers, x, none, torch.ones(21, 2, device=DEVICE), choices=42)
    y.backward(gradient(y))
    for tensor in (y.detach(), x.grad, layers.ups.weight.grad, layers.downs.weight.grad):
        assert tensor is not None and not tensor.any()
    assert arena.finite()


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize(("name", "inner"), [*((name, 16) for name in CHOSEN), ("block", 128)])
def test_rows_beyond_the_last_experts_are_never_read(
    recipe: Recipe, name: str, inner: int, memory_of_nan: None
) -> None:
    base, overrides = RECIPES[name]
    layers, arena = build(recipe(base, **overrides), "cuda", (144, inner, 3), "ups", "downs")
    x, first = draw(0, 21, 144), torch.zeros(21, 1, dtype=torch.int64, device=DEVICE)
    y = through_experts(layers, x, first, torch.ones(21, 1, device=DEVICE))
    y.backward(gradient(y))
    for tensor in (y.detach(), x.grad, layers.ups.weight.grad, layers.downs.weight.grad):
        assert tensor is not None and torch.isfinite(tensor).all()
    assert arena.finite()


@pytest.mark.parametrize("name", [name for name in CHOSEN if name != "bf16"])
def test_experts_without_a_gate_read_gathered_scales(recipe: Recipe, name: str) -> None:
    def run(layers: Layers, step: int) -> list[Tensor]:
        x = draw(step, 21, 144)
        expert = torch.stack([torch.randint(2, (21,)), torch.full((21,), 2)], 1).to(DEVICE)
        weight = torch.rand(21, 2).to(DEVICE).requires_grad_()
        y = expert_ffn(
            rms_norm(x, layers.gain, 1e-6, layers.grouped_feed, layers.kernels), expert, weight, layers.grouped,
            layers.downs, down_feed=layers.downs_feed, rows_feed=None, combine=torch.bfloat16,
            accumulate=torch.float32, add=None, activation=Gelu(),
        )  # fmt: skip
        return backward(y, x, weight)

    compare(recipe, name, (144, 80, 3), run, "grouped", "downs")


@pytest.mark.parametrize("name", [name for name in CHOSEN if name != "bf16"])
def test_a_head_in_chunks_reads_the_scales_of_its_rows(
    recipe: Recipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"_CHUNK_BYTES": 1, "_MIN_ROWS": 16, "_ROUND": 16}.items():
        monkeypatch.setattr(f"precision.head.{key}", value)

    def run(layers: Layers, step: int) -> list[Tensor]:
        h = draw(step, 37, 144)
        loss = linear_cross_entropy(h[None], layers.alone, torch.randint(80, (1, 37), device=DEVICE))
        loss.backward()
        assert h.grad is not None
        return [loss.detach(), h.grad]

    compare(recipe, name, (144, 80, 2), run, "alone")


def test_operands_of_the_reference_backend_are_the_same_ones(recipe: Recipe) -> None:
    """A Feed may serve both backends, where the kernels of one kind of layer are refused."""
    layers, _ = build(recipe("fp8_block"), "cuda", (144, 80, 2), "ups", "downs")
    x, expert = draw(0, 21, 144).detach(), torch.arange(42, device=DEVICE).view(21, 2) % 2
    made = []
    for backend in ("cuda", "reference"):
        assert layers.feed.recipe is not None
        layers.feed.recipe = replace(layers.feed.recipe, backend=backend)
        operand, weight = rms_norm(x, layers.gain, 1e-6, layers.feed), torch.ones(21, 2, device=DEVICE)
        assert isinstance(operand, Operand)
        y = expert_ffn(
            operand, expert, weight, layers.ups, layers.downs, down_feed=layers.downs_feed, rows_feed=None,
            combine=torch.bfloat16, accumulate=torch.float32, add=None,
        )  # fmt: skip
        made.append((operand.data.float(), operand.scale_inv, y))
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "cuda") for name in CHOSEN if name != "bf16"), ("block", "reference")]
)
def test_what_swiglu_saves_in_fp8_changes_gradients_by_its_rounding(recipe: Recipe, name: str, backend: str) -> None:
    base, overrides = RECIPES[name]
    results = []
    for more in ({}, {"table__swiglu": "fp8"}):
        layers, _ = build(recipe(base, **overrides, **more), backend, (144, 80, 2), "ups", "downs")
        assert layers.ups.recipe.swiglu.is_fp8 == bool(more)
        x, expert = draw(0, 21, 144), torch.arange(42, device=DEVICE).view(21, 2) % 2
        weight = torch.ones(21, 2, device=DEVICE, requires_grad=True)
        y = through_experts(layers, x, expert, weight)
        torch.manual_seed(4)
        y.backward(gradient(y))
        results.append((y.detach(), [x.grad, weight.grad, layers.ups.weight.grad, layers.downs.weight.grad]))
    (y, plain), (same_y, narrow) = results
    assert torch.equal(y, same_y)
    for one, other in zip(narrow, plain, strict=True):
        assert one is not None and other is not None
        assert error(one, other) < 2 * 2.0**-4, "two factors, rounded to E4M3"
    assert not torch.equal(narrow[2], plain[2])


@pytest.mark.parametrize("name", [name for name in CHOSEN if name != "bf16"])
def test_weights_transposed_in_the_backward_pass_are_the_copies_that_are_kept(recipe: Recipe, name: str) -> None:
    base, overrides = RECIPES[name]
    results: list[list[Any]] = []
    for keeps in (True, False):
        layers, arena = build(recipe(base, **overrides), "cuda", (144, 128, 2), "alone", "grouped", "ups", "downs")
        linears = [layers.grouped, layers.ups, layers.downs]
        linears += [] if base == "fp8_block" and not ON_GPU else [layers.alone]  # cuBLAS takes blocks on a GPU only
        for layer in linears:
            layer.keeps_transposed = keeps
        begin_step(layers, arena)
        assert all((layer.operand is not None and layer.operand.data_t is not None) == (keeps or name.startswith("row"))
                   for layer in linears)  # fmt: skip
        if name.startswith("row"):  # what it quantises, it quantises in both directions, whatever is kept
            continue
        x, expert = draw(0, 21, 144), torch.arange(42, device=DEVICE).view(21, 2) % 2
        weight = torch.rand(21, 2, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        y = through_experts(layers, x, expert, weight)
        torch.manual_seed(4)
        y.backward(gradient(y))
        others = [layers.grouped(x, torch.tensor([9, 21], device=DEVICE).int())]
        others += [layers.alone(x)] if layers.alone in linears else []
        for other in others:
            other.backward(gradient(other))
        results.append([x.grad, *(layer.weight.grad for layer in linears)])
    for kept, made in zip(*results, strict=True):
        assert torch.equal(kept, made)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("history", [False, True])
def test_a_weight_quantised_in_parts_is_the_weight_quantised_whole(recipe: Recipe, name: str, history: bool) -> None:
    base, overrides = RECIPES[name]
    layers, _ = build(recipe(base, **overrides), "cuda", (144, 256, 2), "alone", "ups")
    for layer in (layers.alone, layers.ups):
        slot = layer.weight_slot
        assert slot is not None and slot.scale is not None and slot.amax is not None
        slot.scale.fill_(0.37 * history)
        layer.refresh_weight()
        whole = layer.operand
        assert whole is not None
        stacked = layer.weight.dim() == 3
        scaling = layer.recipe.scaling
        scale = step_scale(slot.amax, slot.scale, layer.recipe.input.max, scaling, layer.recipe.delayed)
        made = []
        rows = 128 if name == "block" else 107  # without blocks a part may have any number of rows
        for i, part in enumerate(layer.weight.detach().split(1 if stacked else rows)):
            own = scale[i : i + 1] if stacked else scale
            amax = torch.zeros_like(own)
            made.append(layer.quantize_part(part, own, amax))
            assert torch.equal(amax, part.bfloat16().float().abs().amax((-2, -1)).view_as(amax))
        data, inv = torch.cat([d.view(torch.uint8) for d, _ in made]), made[0][1]
        inv = torch.cat([i for _, i in made]) if stacked or name == "block" else inv
        layer.operand = None
        for _ in range(2):  # the second time in place
            layer.receive_quantized(data, inv)
            for ours, theirs in zip(layer.operand or (), whole, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    assert torch.equal(ours.float(), theirs.float()) and ours.stride() == theirs.stride()
