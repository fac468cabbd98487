"""The AdamW kernels do what torch.optim.AdamW does, in Triton's interpreter."""

import copy
import math

import pytest
import torch
from torch import Tensor

from precision.config import Granularity
from precision.formats import E4M3

adamw = pytest.importorskip("precision.kernels.adamw", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_adamw.py")
SHAPES = [(1,), (37,), (8, 16), (50, 100), (200,), (3, 64)]  # chunks of 128: less than one, exactly one, many
LR, BETAS, EPS, DECAYS = 1e-2, (0.9, 0.95), 1e-8, (0.0, 0.1, 0.1, 0.3, 0.0, 0.1)


class Run:
    """P tensors and both optimizers' state, in any dtype for the twin."""

    def __init__(
        self, betas: tuple[float, float] = BETAS, eps: float = EPS, shapes=SHAPES, moments: torch.dtype = torch.float32
    ):
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.randn(shape, generator=generator) for shape in shapes]
        self.sizes = [10.0 ** torch.randint(-6, 3, shape, generator=generator) for shape in shapes]  # of gradients
        self.first, self.second = ([torch.zeros(shape, dtype=moments) for shape in shapes] for _ in range(2))
        self.steps = [torch.zeros(()) for _ in shapes]
        self.generator, self.betas, self.eps = generator, betas, eps
        self.kernel = adamw.FusedAdamW(
            self.parameters, self.first, self.second, self.steps, DECAYS[: len(shapes)], betas, eps, block=128
        )

    @property
    def all(self) -> list[Tensor]:
        return [*self.parameters, *self.first, *self.second, *self.steps]

    def twin(self, dtype: torch.dtype = torch.float64) -> torch.optim.AdamW:
        """torch's optimizer over copies of the parameters."""
        groups = [
            {"params": [p.detach().to(dtype)], "weight_decay": decay}
            for p, decay in zip(self.parameters, DECAYS, strict=False)
        ]
        return torch.optim.AdamW(groups, LR, self.betas, self.eps)

    def set_gradients(self, twin: torch.optim.AdamW, divisor: float = 1.0) -> None:
        """The same gradients, for both; the twin's are divided."""
        for p, size, group in zip(self.parameters, self.sizes, twin.param_groups, strict=True):
            p.grad = torch.randn(p.shape, generator=self.generator) * size
            (theirs,) = group["params"]
            theirs.grad = p.grad.to(theirs.dtype) / divisor

    def step(self, ok: bool = True, divisor: float | None = None) -> None:
        number = None if divisor is None else torch.tensor(divisor)
        self.kernel.step(torch.tensor(ok), torch.tensor(LR), number)

    def check(self, twin: torch.optim.AdamW) -> None:
        for i, group in enumerate(twin.param_groups):
            (theirs,) = group["params"]
            state = twin.state[theirs]
            torch.testing.assert_close(self.parameters[i], theirs.float(), rtol=3e-7, atol=5e-6 * LR)
            first, second = state["exp_avg"], state["exp_avg_sq"]
            assert ((self.first[i] - first).abs() <= 1e-6 * self.sizes[i]).all()
            torch.testing.assert_close(self.second[i], second.float(), rtol=2e-6, atol=1e-16)
            assert self.steps[i] == state["step"]


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.95), 1e-8), ((0.9, 0.999), 1e-3), ((0.0, 0.3), 1e-8)])
def test_equals_adamw_in_float64(betas: tuple[float, float], eps: float) -> None:
    run = Run(betas, eps)
    twin = run.twin()
    for _ in range(4):
        run.set_gradients(twin)
        run.step()
        twin.step()
    run.check(twin)


def test_gradients_are_divided_and_not_written() -> None:
    run, divisor = Run(eps=1e-3), 7.3
    twin = run.twin()
    for _ in range(2):
        run.set_gradients(twin, divisor)
        before = [p.grad.clone() for p in run.parameters]  # type: ignore[union-attr]
        run.step(divisor=divisor)
        twin.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(run.parameters, before, strict=True))  # type: ignore[arg-type]
    run.check(twin)


def test_a_skipped_step_changes_no_bit() -> None:
    run, bad = Run(), math.nan
    twin = run.twin()
    run.set_gradients(twin)
    run.step()
    twin.step()
    before = copy.deepcopy(run.all)
    for p in run.parameters:
        p.grad = torch.full_like(p, bad)
    run.step(ok=False, divisor=bad)
    assert all(torch.equal(a, b) for a, b in zip(run.all, before, strict=True))
    run.set_gradients(twin)
    run.step()
    twin.step()
    run.check(twin)  # the skipped step did not count


def test_moments_in_bf16_are_rounded_to_the_nearest_after_the_update() -> None:
    run = Run(moments=torch.bfloat16)
    twin = run.twin()
    for ok in (True, True, False, True):
        run.set_gradients(twin)
        run.step(ok)
        if not ok:
            continue
        twin.step()
        for i, group in enumerate(twin.param_groups):
            (theirs,) = group["params"]
            torch.testing.assert_close(run.parameters[i], theirs.float(), rtol=3e-7, atol=5e-6 * LR)
            for ours, key in ((run.first[i], "exp_avg"), (run.second[i], "exp_avg_sq")):
                wide = twin.state[theirs][key]
                assert ((ours.double() - wide).abs() <= 2.0**-8 * wide.abs() + 1e-6 * run.sizes[i]).all()
                wide.copy_(ours)  # the next step begins with what is stored
    assert run.first[0].dtype == torch.bfloat16
    norms = run.kernel.norms(torch.tensor(LR))
    assert bool(norms[0].gt(0).all())
    torch.testing.assert_close(norms[1], torch.stack([p.double().norm() for p in run.parameters]), rtol=1e-6, atol=0)


def test_a_parameter_without_a_gradient_stays_and_its_count_too() -> None:
    run = Run()
    twin = run.twin()
    for missing in (None, 3, 0, None):
        run.set_gradients(twin)
        if missing is not None:
            run.parameters[missing].grad = twin.param_groups[missing]["params"][0].grad = None
        run.step()
        twin.step()
    run.check(twin)
    assert [int(t) for t in run.steps] == [3, 4, 4, 3, 4, 4]


def test_addresses_are_followed() -> None:
    """Gradients that are views at odd addresses, not contiguous ones, and parameters that moved."""
    run = Run()
    twin = run.twin()
    for change in ("odd", "transposed", "moved", "same"):
        run.set_gradients(twin)
        for p in run.parameters:
            assert p.grad is not None
            if change == "odd":
                p.grad = torch.cat([p.grad.new_zeros(1), p.grad.flatten()])[1:].view(p.shape)
            elif change == "transposed" and p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()
                assert not p.grad.is_contiguous()
            elif change == "moved":
                p.data = p.data.clone()
        run.step()
        twin.step()
    run.check(twin)


@pytest.mark.parametrize("shape", [(50, 96), (3, 16, 32)])
def test_copies_are_casts_of_the_new_masters(shape: tuple[int, ...]) -> None:
    from precision.kernels.common import MODES, Cast
    from precision.kernels.weights import cast_weight

    run = Run(shapes=[shape, shape, (37,)])
    twin, groups = run.twin(), shape[0] if len(shape) == 3 else 1
    scale = torch.linspace(20, 90, groups).view(shape[:-2])
    made = torch.empty(shape, dtype=torch.float8_e4m3fn), scale, torch.empty_like(scale), torch.zeros_like(scale)
    plain = torch.empty(shape, dtype=torch.bfloat16)
    for ok in (True, False):
        run.set_gradients(twin)
        for spoilt in (*made[2:], plain):
            spoilt.fill_(math.inf if spoilt is not made[3] else 0.0)
        written = run.kernel.step(torch.tensor(ok), torch.tensor(LR), None, [made, (plain,), None])
        assert written == [True, True, False]
        amax = torch.zeros_like(scale)
        how = Cast(E4M3, MODES[Granularity.tensor], True, 0, False)
        data, inv, _, _ = cast_weight(run.parameters[0], scale, amax, how, None, transposed=False)
        for ours, theirs in zip((made[0].float(), *made[2:]), (data.float(), inv, amax), strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(plain, run.parameters[1].bfloat16())
    run.parameters[0].grad = None
    assert run.kernel.step(torch.tensor(True), torch.tensor(LR), None, [made, None, None]) == [False] * 3


def test_the_kernel_has_formats_only_where_a_copy_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before sm_89 cannot compile FP8, those before sm_80 BF16."""
    run, seen = Run(shapes=[(8, 16)]), []
    monkeypatch.setattr(adamw, "_adamw_kernel", {(1,): lambda *args, **options: seen.append(args[-3:])})
    run.set_gradients(run.twin())
    ones = [torch.ones(()) for _ in range(3)]
    narrow, wide = (torch.empty(8, 16, dtype=dtype) for dtype in (E4M3.dtype, torch.bfloat16))
    for copies in ((), [(wide,)], [(narrow, *ones)]):
        run.kernel.step(torch.tensor(True), torch.tensor(LR), None, copies)
    assert [None if fmt is None else fmt.name for fmt, _, _ in seen] == [None, None, "fp8e4nv"]
    assert [copied for _, _, copied in seen] == [False, True, True]


def test_experts_whose_size_no_block_divides_get_no_copy() -> None:
    run = Run(shapes=[(3, 16, 18)])  # blocks of 128
    run.set_gradients(run.twin())
    data, rows = torch.empty(3, 16, 18, dtype=torch.float8_e4m3fn), [torch.ones(3) for _ in range(3)]
    assert run.kernel.step(torch.tensor(True), torch.tensor(LR), None, [(data, *rows)]) == [False]


def test_versions_count_up() -> None:
    """What is made from a parameter, such as the operand of a product, asks for its version."""
    run = Run()
    twin = run.twin()
    run.set_gradients(twin)
    run.parameters[1].grad = None
    before = [p._version for p in run.parameters]
    run.step()
    changed = [p._version > version for p, version in zip(run.parameters, before, strict=True)]
    assert changed == [True, False, True, True, True, True]
