"""The chunked head equals the whole one, never makes all logits, and hands its weight gradient over without a copy."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from precision import IGNORED, Linear, Plan, PrecisionConfig, ScalingArena, begin_step, bind, linear_cross_entropy
from precision.backends import replaced
from precision.backends.reference import ReferenceBackend
from precision.cross_entropy import cross_entropy
from precision.head import chunk_rows

Recipe = Callable[..., PrecisionConfig]
TOKENS, HIDDEN, WORDS = 53, 48, 112


def bound_head(config: PrecisionConfig) -> tuple[Linear, ScalingArena]:
    """A head with random weights, and its scales."""
    plan = Plan(config, 1)
    layer = Linear(plan.gemm("lm_head", "lm_head", HIDDEN, WORDS))
    nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return layer, bind(layer, plan, "cpu")


def head(config: PrecisionConfig) -> Linear:
    return bound_head(config)[0]


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """State [1, T, D] that wants a gradient, targets [1, T]; some are ignored."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(1, TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, WORDS, (1, TOKENS), generator=generator)
    target[0, 11::7] = IGNORED
    return h, target


@pytest.fixture(params=[1, 16, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a chunk: one, some, all."""
    for name, value in {"_CHUNK_BYTES": 1, "_MIN_ROWS": request.param, "_ROUND": 1}.items():
        monkeypatch.setattr(f"precision.head.{name}", value)
    return request.param


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_equals_pytorch_with_its_gradients(name: str, chunk: int, recipe: Recipe) -> None:
    layer, dtype = head(recipe(name)), torch.float32 if name == "fp32" else torch.bfloat16
    h, target = batch(dtype)
    loss = linear_cross_entropy(h, layer, target)
    (0.3 * loss).backward()
    exact, weight = (t.detach().to(dtype).double().requires_grad_() for t in (h, layer.weight))
    expected = F.cross_entropy((exact @ weight.t()).flatten(0, 1), target.flatten())
    (0.3 * expected).backward()
    assert loss.dtype == torch.float32 and loss.dim() == 0
    rounding = 1e-5 if name == "fp32" else 2e-2
    torch.testing.assert_close(loss.double(), expected, rtol=rounding / 10, atol=0)
    for ours, theirs in ((h.grad, exact.grad), (layer.weight.grad, weight.grad)):
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs).norm() < rounding * theirs.norm()
    assert h.grad is not None and (h.grad[target == IGNORED] == 0).all()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_gradients_in_fp16_are_made_under_the_loss_scale(recipe: Recipe) -> None:
    """Autograd passes the loss scale too late, when they are rounded. Too small a scale loses them, too large a one
    makes them infinite, and one between leaves no trace."""
    layer = head(recipe("fp16"))
    found = {}
    for power in (-20, 0, 10, 30):
        h, target = batch(torch.float16)
        loss = linear_cross_entropy(h, layer, target, torch.tensor(2.0**power))
        found[power] = float(loss.detach()), *torch.autograd.grad(loss, (h, layer.weight))
    (small, lost, _), (one, dh, dw), (same, *scaled), (large, infinite, _) = found.values()
    assert small == one == same == large, "powers of two"
    assert (lost == 0).float().mean() > 0.9 and not infinite.isfinite().any(-1).all()
    for ours, theirs in zip(scaled, (dh, dw), strict=True):
        assert (ours - theirs).norm() < 2.0**-8 * theirs.norm()


def test_bf16_head_on_an_fp32_stream(chunk: int, recipe: Recipe) -> None:
    layer = head(recipe("bf16", table__residual="fp32"))
    h, target = batch(torch.float32)
    whole, part = cross_entropy(layer(h), target), linear_cross_entropy(h, layer, target)
    torch.testing.assert_close(part, whole, rtol=1e-6, atol=0)
    grads = [torch.autograd.grad(loss, (h, layer.weight)) for loss in (part, whole)]
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_jit", "fp8_block"])
def test_a_head_in_fp8_is_the_whole_one_but_for_the_scales_of_chunks(name: str, chunk: int, recipe: Recipe) -> None:
    layer = head(recipe(name, table__lm_head="fp8"))
    h, target = batch(torch.bfloat16)
    whole, part = cross_entropy(layer(h), target), linear_cross_entropy(h, layer, target)
    assert torch.equal(part, whole)
    grads = [torch.autograd.grad(loss, (h, layer.weight)) for loss in (part, whole)]
    for ours, theirs in zip(*grads, strict=True):  # of dz in E5M2, cast under other scales: both are half a step off
        assert (ours.float() - theirs.float()).norm() < 2 * 2.0**-3 * theirs.float().norm()


@pytest.mark.parametrize("targets", [96, 112, 128])
@pytest.mark.parametrize("name", ["fp8_jit", "fp8_block"])
def test_a_gradient_in_fp8_has_its_size_for_any_number_of_targets(name: str, targets: int, recipe: Recipe) -> None:
    """Scales that are powers of two leave 1 / targets as it is: FP8 must not round it in all rows alike. What rounds
    alike is the 1 - 1 / WORDS of a target."""
    layer = head(recipe(name, table__lm_head="fp8"))
    generator = torch.Generator().manual_seed(1)
    h = (0.1 * torch.randn(1, targets, HIDDEN, generator=generator)).bfloat16().requires_grad_()
    target = torch.randint(0, WORDS, (1, targets), generator=generator)
    ours = torch.autograd.grad(linear_cross_entropy(h, layer, target), (h, layer.weight))
    exact, weight = (t.detach().double().requires_grad_() for t in (h, layer.weight))
    expected = F.cross_entropy((exact @ weight.t()).flatten(0, 1), target.flatten())
    for mine, theirs in zip(ours, torch.autograd.grad(expected, (exact, weight)), strict=True):
        assert float((mine * theirs).sum() / theirs.square().sum()) == pytest.approx(1, abs=2 / WORDS)


def test_fewer_targets_than_in_past_steps_clip_no_gradient(recipe: Recipe) -> None:
    """After a resume with a smaller microbatch the mean has fewer targets, and each weighs more."""
    found = []
    for past in (1, 8):
        layer, arena = bound_head(recipe("fp8_delayed", table__lm_head="fp8"))
        for times in (past, 1):
            begin_step(layer, arena)
            h, target = batch(torch.bfloat16)
            loss = linear_cross_entropy(h.repeat(1, times, 1), layer, target.repeat(1, times))
            found.append(torch.autograd.grad(loss, layer.weight)[0])
            arena.commit(torch.tensor(True))
    torch.testing.assert_close(found[3], found[1], rtol=0, atol=0)


def test_uses_add_up_in_the_master(recipe: Recipe) -> None:
    layer = head(recipe("fp32"))
    h, target = batch(torch.float32)
    expected = torch.autograd.grad(linear_cross_entropy(h, layer, target), layer.weight)[0]
    (linear_cross_entropy(h, layer, target) + 0.25 * linear_cross_entropy(h, layer, target)).backward()
    torch.testing.assert_close(layer.weight.grad, 1.25 * expected)
    linear_cross_entropy(h, layer, target).backward()
    torch.testing.assert_close(layer.weight.grad, 2.25 * expected)


class _Largest(TorchDispatchMode):
    """Elements of the largest result that has V columns or V rows."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = 0
        self.weight_sized: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == WORDS and t.shape[0] != HIDDEN:
                self.logits = max(self.logits, t.shape[0])
            if isinstance(t, Tensor) and t.shape == (WORDS, HIDDEN):
                self.weight_sized.add(t.untyped_storage().data_ptr())
        return out


def test_logits_of_a_chunk_at_most_and_no_copy_of_the_weight_gradient(chunk: int, recipe: Recipe) -> None:
    layer = head(recipe("fp32"))
    h, target = batch(torch.float32)
    saved: list[int] = []

    def note(t: Tensor) -> Tensor:
        saved.append(t.untyped_storage().data_ptr())
        return t

    with _Largest() as seen, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = linear_cross_entropy(h, layer, target)
    assert 0 < seen.logits <= chunk, "chunks are equal, so they may be smaller"
    assert len(saved) == 2, "dh and dw, neither h nor logits"
    layer.weight.grad = None
    loss.backward()
    assert layer.weight.grad is not None and layer.weight.grad.data_ptr() in saved


class _Counting(ReferenceBackend):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, x, x_inv, weight, offsets, recipe) -> Tensor:
        self.calls.append("fprop")
        return super().forward(x, x_inv, weight, offsets, recipe)

    def dgrad(self, dy, weight, offsets, recipe) -> Tensor:
        self.calls.append("dgrad")
        return super().dgrad(dy, weight, offsets, recipe)

    def wgrad(self, dy, x, x_inv, offsets, recipe, out) -> Tensor:
        self.calls.append("wgrad")
        return super().wgrad(dy, x, x_inv, offsets, recipe, out)


def test_the_weight_gradient_has_the_dtype_of_the_weight(chunk: int, recipe: Recipe) -> None:
    layer = head(recipe("bf16"))
    h, target = batch(torch.bfloat16)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        layer.weight = nn.Parameter(layer.weight.detach().to(dtype))
        loss = linear_cross_entropy(h, layer, target)
        found.append((loss, *torch.autograd.grad(loss, (h, layer.weight), torch.tensor(3.0))))
    (loss, dh, dw), (same_loss, same_dh, rounded) = found
    assert torch.equal(loss, same_loss) and torch.equal(dh, same_dh)
    assert dw.dtype == torch.float32 and torch.equal(rounded, dw.bfloat16()), "once, after the sum over chunks"


def test_only_what_is_wanted_is_computed(recipe: Recipe) -> None:
    layer = head(recipe("bf16"))
    h, target = batch(torch.bfloat16)
    expected = linear_cross_entropy(h, layer, target).detach()
    with replaced("reference", counting := _Counting()):
        with torch.no_grad():
            assert linear_cross_entropy(h, layer, target) == expected
        assert counting.calls == ["fprop"]
        counting.calls.clear()
        linear_cross_entropy(h.detach(), layer, target).backward()
        assert counting.calls == ["fprop", "wgrad"]
        counting.calls.clear()
        layer.weight.requires_grad_(False)
        linear_cross_entropy(h, layer, target).backward()
        assert counting.calls == ["fprop", "dgrad"]


def test_backward_runs_once(recipe: Recipe) -> None:
    layer = head(recipe("fp32"))
    h, target = batch(torch.float32)
    loss = linear_cross_entropy(h, layer, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_nan_reaches_the_loss_and_the_gradients(recipe: Recipe) -> None:
    layer = head(recipe("bf16"))
    h, target = batch(torch.bfloat16)
    with torch.no_grad():
        h[0, 3, 5] = float("nan")
    loss = linear_cross_entropy(h, layer, target)
    loss.backward()
    assert loss.isnan() and h.grad is not None and h.grad[0, 3].isnan().all() and h.grad[0, 4].isfinite().all()
    assert layer.weight.grad is not None and layer.weight.grad.isnan().any()


@pytest.mark.parametrize(("tokens", "words", "width", "rows"), [
    (32768, 32768, 2, 4096),  # 256 MiB
    (32768, 163840, 2, 2048),  # 640 MiB: fewer rows would be slow
    (32768, 102400, 2, 2048),
    (5000, 32768, 2, 2560),  # two equal chunks
    (77, 4096, 2, 128),
    (0, 4096, 4, 1),
])  # fmt: skip
def test_chunks(tokens: int, words: int, width: int, rows: int) -> None:
    assert chunk_rows(tokens, words, width) == rows
