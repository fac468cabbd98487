"""On a GPU the AdamW kernel is as exact as torch's fused one, never waits for the host, and runs at memory's speed.

pytest tests/gpu/test_adamw.py -s -k bandwidth      # prints what it and torch reach
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from precision.config import Granularity
from precision.formats import E4M3
from trainer.config import Moments, OptimConfig, Schedule
from trainer.optim.adamw import LearningRate, Optimizer

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
SHAPES = [(1,), (3,), (37,), (64, 33), (2048, 11), (1000003,), (4096, 2048), (3, 1024, 1408)]
CONFIG = OptimConfig(
    lr=LR, betas=list(BETAS), eps=EPS, weight_decay=DECAY, clip=1.0, moments=Moments.fp32, schedule=Schedule.wsd,
    warmup_steps=0, decay_fraction=0.0, min_lr_ratio=1.0,
)  # fmt: skip


class Run:
    """Parameters with moments and step counts for the kernel."""

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        betas: tuple[float, float] = BETAS,
        moments: torch.dtype = torch.float32,
    ):
        from precision.kernels.adamw import FusedAdamW

        generator = torch.Generator("cuda").manual_seed(0)
        self.parameters = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
        self.first, self.second = ([torch.zeros_like(p, dtype=moments) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device="cuda") for _ in shapes]
        state = self.parameters, self.first, self.second, self.steps
        self.kernel = FusedAdamW(*state, [DECAY] * len(shapes), betas, EPS)
        self.lr = torch.tensor(LR, device="cuda")
        self.good, self.bad = torch.tensor(True, device="cuda"), torch.tensor(False, device="cuda")

    @property
    def all(self) -> list[Tensor]:
        return [*self.parameters, *self.first, *self.second, *self.steps]


def set_gradients(parameters: list[Tensor], seed: int) -> None:
    """Of sizes from 1e-6 to 1e2, element by element the same size in each step."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for i, p in enumerate(parameters):
        sizes = torch.Generator("cuda").manual_seed(1000 + i)
        size = 10.0 ** torch.randint(-6, 3, p.shape, device="cuda", generator=sizes)
        p.grad = torch.randn(p.shape, device="cuda", generator=generator) * size


def torchs(parameters: list[Tensor], betas: tuple[float, float], dtype: torch.dtype) -> torch.optim.AdamW:
    copies = [p.detach().to(dtype, copy=True) for p in parameters]
    fused = dtype == torch.float32
    return torch.optim.AdamW(copies, lr=LR, betas=betas, eps=EPS, weight_decay=DECAY, fused=fused)


def test_copies_are_casts_of_the_new_masters() -> None:
    from precision.kernels.common import MODES, Cast
    from precision.kernels.weights import cast_weight

    run = Run([(3, 1024, 1408), (1024, 2048), (1000003,)])
    scale = torch.tensor([50.0, 300.0, 4e3], device="cuda")
    data = torch.empty(3, 1024, 1408, device="cuda", dtype=E4M3.dtype)
    made, plain = (
        (data, scale, scale.clone(), torch.zeros_like(scale)),
        torch.empty(1024, 2048, device="cuda").bfloat16(),
    )
    for seed, ok in enumerate((run.good, run.bad)):
        set_gradients(run.parameters, seed)
        made[3].zero_()
        assert run.kernel.step(ok, run.lr, None, [made, (plain,), None]) == [True, True, False]
        how, amax = Cast(E4M3, MODES[Granularity.tensor], True, 0, False), torch.zeros_like(scale)
        data, inv, _, _ = cast_weight(run.parameters[0], scale, amax, how, None, transposed=False)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(made, (data, scale, inv, amax), strict=True))
        assert torch.equal(plain, run.parameters[1].bfloat16())


@pytest.mark.parametrize("divisor", [None, 7.3])
@pytest.mark.parametrize("betas", [BETAS, (0.9, 0.999), (0.0, 0.3)])
def test_as_near_to_float64_as_torch(betas: tuple[float, float], divisor: float | None) -> None:
    run = Run(SHAPES, betas)
    twins = {dtype: torchs(run.parameters, betas, dtype) for dtype in (torch.float32, torch.float64)}
    number = None if divisor is None else torch.tensor(divisor, device="cuda")
    for seed in range(5):
        set_gradients(run.parameters, seed)
        for dtype, twin in twins.items():
            for p, ours in zip(twin.param_groups[0]["params"], run.parameters, strict=True):
                assert ours.grad is not None
                p.grad = ours.grad.to(dtype) / (divisor or 1.0)
            twin.step()
        run.kernel.step(run.good, run.lr, number)
    exact, near = twins[torch.float64], twins[torch.float32]
    for i, p in enumerate(run.parameters):
        wide, plain = (twin.param_groups[0]["params"][i] for twin in (exact, near))
        ours = (p, run.first[i], run.second[i])
        fused = (plain, near.state[plain]["exp_avg"], near.state[plain]["exp_avg_sq"])
        right = (wide, exact.state[wide]["exp_avg"], exact.state[wide]["exp_avg_sq"])
        size = (1.0, right[2].sqrt() + 1e-30, right[2] + 1e-30)
        for mine, theirs, true, unit in zip(ours, fused, right, size, strict=True):
            error, allowed = (float(((t - true) / unit).abs().max()) for t in (mine, theirs))
            assert error <= 2 * allowed + 2e-7
        assert run.steps[i] == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_step_changes_no_bit(bad: float) -> None:
    run = Run(SHAPES)
    set_gradients(run.parameters, 0)
    run.kernel.step(run.good, run.lr)
    before = [t.clone() for t in run.all]
    for p in run.parameters:
        p.grad = torch.full_like(p, bad)
    run.kernel.step(run.bad, run.lr, torch.tensor(bad, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(run.all, before, strict=True))


def test_addresses_are_followed_without_waiting() -> None:
    """New gradients in each step, one at an odd address and one missing, while the host must not wait."""
    run, twin = Run(SHAPES), Run(SHAPES)
    for r in (run, twin):
        set_gradients(r.parameters, 9)
        r.kernel.step(r.good, r.lr)  # compiles
    kept = []
    torch.cuda.synchronize()
    for seed in range(4):
        for r in (run, twin):
            set_gradients(r.parameters, seed)
            r.parameters[seed].grad = None
        odd = run.parameters[5]
        assert odd.grad is not None
        odd.grad = torch.cat([odd.grad.new_zeros(seed), odd.grad])[seed:]
        kept.append([p.grad for p in run.parameters])  # so that no address comes twice
        torch.cuda.set_sync_debug_mode("error")
        try:
            for r in (run, twin):
                r.kernel.step(r.good, r.lr)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip([*run.parameters, *run.steps], [*twin.parameters, *twin.steps], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


def test_norms_of_gradients_are_those_of_float64_without_waiting() -> None:
    from precision.kernels.gradient_norms import GradientNorms

    kernel = GradientNorms([math.prod(shape) for shape in SHAPES], torch.device("cuda"))
    for seed in range(3):
        parameters = [torch.empty(shape, device="cuda") for shape in SHAPES]
        set_gradients(parameters, seed)
        gradients = [p.grad for p in parameters]
        gradients[seed] = None
        odd = gradients[5]
        assert odd is not None
        gradients[5] = torch.cat([odd.new_zeros(seed), odd])[seed:]
        exact = torch.stack([odd.new_zeros(()) if g is None else g.double().norm() for g in gradients]).float()
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        try:
            ours = kernel(gradients)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("large")
def test_more_than_two_to_the_31_elements() -> None:
    size = 2**31 + 5001
    from precision.kernels.adamw import FusedAdamW

    p, first, second, gradient = (torch.zeros(size, device="cuda") for _ in range(4))
    step, good, lr = torch.zeros((), device="cuda"), torch.tensor(True, device="cuda"), torch.tensor(LR, device="cuda")
    ends = slice(0, 10000), slice(2**31 - 3000, size)
    for part in ends:
        gradient[part] = torch.empty(len(gradient[part]), device="cuda").uniform_(1, 2)
    p.grad = gradient
    FusedAdamW([p], [first], [second], [step], [DECAY], BETAS, EPS).step(good, lr)
    for part in ends:
        torch.testing.assert_close(p[part], -LR * gradient[part].sign(), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(first[part], 0.1 * gradient[part])
        torch.testing.assert_close(second[part], 0.05 * gradient[part].square())
    assert not p[20000:30000].any()


@pytest.mark.parametrize(("clip", "moments"), [(None, Moments.fp32), (1.0, Moments.fp32), (1.0, Moments.bf16)])
def test_the_optimizer_uses_it(clip: float | None, moments: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same masters, moments and step counts as with torch's, a skipped step among them; with moments in BF16 but for
    elements that round the other way."""
    config = replace(CONFIG, clip=clip, moments=moments, eps=1e-4)
    flip = 2.0**-8 if moments is Moments.bf16 else 0.0  # of a moment

    def made() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 333), nn.Linear(333, 8, bias=False)).cuda()
        return model, Optimizer(model, {"0.bias"}, config, LearningRate(config, 100), torch.device("cuda"))

    model, optimizer = made()
    monkeypatch.setattr("trainer.optim.adamw._has_kernel", lambda device: False)
    twin, plain = made()
    assert optimizer._kernel is not None and plain._kernel is None
    for step in range(6):
        x = torch.randn(16, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for m, o in ((model, optimizer), (twin, plain)):
            m(x).square().sum().backward()
            norm, ok = o.grad_norms().norm(), torch.tensor(step != 3, device="cuda")
            o.step(ok, torch.tensor(step, device="cuda"), norm)
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 + 5 * LR * flip)
    for name, expected in plain.state_dict().items():
        state = optimizer.state_dict()[name]
        assert state["step"] == expected["step"] == 5
        for key in ("exp_avg", "exp_avg_sq"):
            assert (state[key].float() - expected[key]).norm() <= (1e-4 + flip) * expected[key].float().norm()
    assert {t.dtype for s in optimizer.state_dict().values() for t in s.values() if t.dim()} == {
        torch.bfloat16 if flip else torch.float32
    }


def test_bandwidth(milliseconds: Callable[[Callable[[], object]], float]) -> None:
    """Two layers of 64 experts, and many small tensors: at least a tenth faster than torch's fused AdamW; with moments
    in BF16 a tenth faster again."""
    shapes = [(64, 2816, 2048), (64, 2048, 1408)] * 2 + [(2048, 3072)] * 8 + [(2048,)] * 100
    count = sum(math.prod(shape) for shape in shapes)
    run = Run(shapes)
    for p in run.parameters:
        p.grad = torch.full_like(p, 1e-3)
    one = torch.ones((), device="cuda")

    def show(name: str, ms: float, size: int = 28) -> float:
        print(f"{name:36s} {ms:7.3f} ms   {size * count / ms / 1e9:5.2f} TB/s of {size} bytes a parameter")
        return ms

    print(f"\n{count / 1e9:.2f} G parameters on {torch.cuda.get_device_name()}")
    half = run.parameters[0]
    show("(copy, counted as 28 bytes)", milliseconds(lambda: run.first[0].copy_(half)) * 28 / 8 * count / half.numel())
    adamw = torch.optim.AdamW(run.parameters, lr=run.lr, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    for p, first, second, step in zip(run.parameters, run.first, run.second, run.steps, strict=True):
        adamw.state[p] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    show("torch fused", milliseconds(adamw.step))
    adamw.grad_scale, adamw.found_inf = one, torch.zeros((), device="cuda")  # type: ignore[attr-defined]
    theirs = show("torch fused with grad_scale", milliseconds(adamw.step))
    ours = show("kernel", milliseconds(lambda: run.kernel.step(run.good, run.lr, one)))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run.kernel.step(run.good, run.lr, one)
    print(f"host: {1e6 * (time.perf_counter() - begin):.0f} us for {len(shapes)} tensors")
    less = Run(shapes, moments=torch.bfloat16)
    for p, old in zip(less.parameters, run.parameters, strict=True):
        p.grad = old.grad
    narrow = show("kernel, moments in BF16", milliseconds(lambda: less.kernel.step(less.good, less.lr, one)), 20)
    assert ours < 0.9 * theirs and narrow < 0.9 * ours
