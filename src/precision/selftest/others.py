"""Checks of the kernels that are not GEMMs: choice of experts, attention and its inputs, loss, optimizer,
statistics."""

import math

import torch

from precision import fp8_attention as reference
from precision.attention import attention_core, document_mask, visible
from precision.cross_entropy import IGNORED, mean_weight, plain_rows
from precision.formats import E4M3, E5M2, Format, saturating_cast
from precision.hardware import knows_bf16, knows_fp8
from precision.kernels import cast_statistics, cross_entropy, document_attention, fp8_attention, rotary
from precision.kernels.adamw import FusedAdamW
from precision.kernels.gradient_norms import GradientNorms
from precision.kernels.kurtosis import add_kurtosis
from precision.kernels.topk_experts import choose
from precision.kurtosis import add_plain_kurtosis
from precision.rotary import attention_inputs
from precision.selftest.operands import plain
from precision.selftest.twins import BF16_ROUNDING, BF16_STEP, FP8_ROUNDING, FP32_SUM, near, same
from precision.topk_experts import plain_choice

LR, BETAS, EPS, DECAYS = 1e-2, (0.9, 0.95), 1e-8, (0.0, 0.1, 0.3)


def choices(device: torch.device) -> None:
    """Check the K largest scores, among all experts and among the best groups."""
    for E, K, groups, kept in ((10, 4, 5, 2), (64, 6, 1, 1)):
        score, bias = plain(device, 33, E, dtype=torch.float32), plain(device, E, dtype=torch.float32)
        for given in (bias, None):
            ours, theirs = (take(score, given, K, groups, kept) for take in (choose, plain_choice))
            same(ours, theirs, f"choice of {K} of {E} experts")


def losses(device: torch.device) -> None:
    """Check losses of logits, and the gradient in their place."""
    for rows, words in ((5, 64), (13, 333)):
        target = torch.randint(0, words, (rows,), generator=torch.Generator().manual_seed(rows)).to(device)
        target[1::3] = IGNORED
        for dtype, rounding in ((torch.float32, FP32_SUM), (torch.bfloat16, BF16_STEP)):
            ours, weight = plain(device, rows, words, dtype=dtype) * 10, mean_weight(target)
            theirs, where = ours.clone(), f"{rows} rows of {words} logits, {dtype}"
            loss = cross_entropy.cross_entropy_rows(ours, target, weight, True, IGNORED)
            near(loss, plain_rows(theirs, target, weight, True), FP32_SUM, f"loss of {where}")
            near(ours, theirs, rounding, f"gradient of {where}")


class _AttentionCase:
    """Operands; and in float64 the result, its log-sum-exp to base 2, and the gradients of q, k and v."""

    def __init__(self, device: torch.device, S: int, D: int, V: int):
        starts = torch.tensor([0, 1, 2, 20, 50], device=device)
        ends = torch.tensor([1, 2, 20, 50, S], device=device)
        which = torch.searchsorted(ends, torch.arange(S, device=device), right=True)
        self.bounds, self.scale = torch.stack([starts[which], ends[which]]).int()[:, None].contiguous(), D**-0.5
        self.q, self.k, self.v = (plain(device, 1, S, 2, w, seed=i).transpose(1, 2) for i, w in enumerate((D, D, V)))
        self.probe = plain(device, 1, S, 2, V, seed=3).transpose(1, 2)
        wide = [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        mask = document_mask(self.bounds, torch.float64, D, V)
        exact = attention_core(wide[0], wide[1], wide[2], self.scale, mask)
        self.gradients = torch.autograd.grad(exact, wide, self.probe.double())
        self.out = exact.detach()
        logits = (wide[0] @ wide[1].mT).detach() * self.scale
        self.lse = logits.masked_fill(~visible(mask, S, device), -torch.inf).logsumexp(-1) / math.log(2)
        self.where = f"of attention, {(S, D, V)}"


def attention_forward(device: torch.device, S: int, D: int, V: int) -> None:
    """Check attention within documents: its result."""
    case = _AttentionCase(device, S, D, V)
    out, lse = document_attention.forward(case.q, case.k, case.v, case.bounds, case.scale)
    near(out, case.out, 8 * BF16_ROUNDING, f"result {case.where}")
    near(lse, case.lse, BF16_ROUNDING, f"log-sum-exp {case.where}")


def attention_backward(device: torch.device, S: int, D: int, V: int) -> None:
    """Check its gradients. A score's gradient is a difference (`ds`); its parts, one of them from the rounded result,
    are several times as large."""
    case = _AttentionCase(device, S, D, V)
    out, lse = case.out.to(case.q.dtype), case.lse.float()
    grads = document_attention.backward(case.probe, case.q, case.k, case.v, case.bounds, out, lse, case.scale)
    for name, ours, exact in zip("qkv", grads, case.gradients, strict=True):
        near(ours, exact, 8 * BF16_ROUNDING, f"gradient of {name} {case.where}")


class _Fp8Case:
    """Operands in FP8, within documents, and results of the reference. Running maxima differ from its maximum, and with
    them the rounding of P."""

    def __init__(self, device: torch.device, S: int, D: int, V: int):
        case = _AttentionCase(device, S, D, V)
        q, k, v = (_in_fp8(x, E4M3) for x in (case.q, case.k, case.v))
        self.operands, self.dout = (*q, *k, *v), _in_fp8(case.probe, E5M2)
        self.bounds, self.scale, self.where = case.bounds, case.scale, f"{case.where} in FP8"
        self.out, self.lse = reference.forward(*self.operands, self.bounds, self.scale)


def attention_in_fp8_forward(device: torch.device, S: int, D: int, V: int, sums: str) -> None:
    """Check attention with FP8 products: its result. sums: fp32 or fast."""
    case = _Fp8Case(device, S, D, V)
    out, lse = fp8_attention.forward(*case.operands, case.bounds, case.scale, sums == "fast")
    near(out, case.out, FP8_ROUNDING["e4m3"], f"result {case.where}")
    near(lse, case.lse, BF16_ROUNDING, f"log-sum-exp {case.where}")


def attention_in_fp8_backward(device: torch.device, S: int, D: int, V: int, sums: str, known: float) -> None:
    """Check its gradients and the amax of dS. known: the scale of dS; 0: that of its own amax."""
    case, amaxes = _Fp8Case(device, S, D, V), torch.zeros(2, device=device)
    given = *case.dout, *case.operands, case.bounds, case.out, case.lse, torch.tensor(known, device=device)
    how = fp8_attention.cast_of_scores(E5M2, True, 0, False)
    *grads, _ = fp8_attention.backward(*given, amaxes[0], how, case.scale, sums == "fast")
    theirs = reference.backward(*given, amaxes[1], E5M2, True, 0, False, case.scale)
    for name, ours, want in zip("qkv", grads, theirs, strict=True):
        near(ours, want, FP8_ROUNDING["e4m3"], f"gradient of {name} {case.where}")
    near(amaxes[0], amaxes[1], BF16_ROUNDING, f"amax of dS {case.where}")


def _in_fp8(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    scale = fmt.max / x.abs().amax().float()
    return saturating_cast(x, scale, fmt), scale.reciprocal()


def heads(device: torch.device) -> None:
    """Check queries and keys after RoPE, and their gradients, also in another memory order; with norms before it, and
    in FP8."""
    for S, H, N, R, V in ((5, 3, 24, 8, 16), (3, 17, 128, 64, 128)):
        sizes = (H, N + R), (H, N + V), (R,)
        q, kv, k_rope = (plain(device, 2, S, *size, seed=i) for i, size in enumerate(sizes))
        angle = plain(device, S, R // 2, dtype=torch.float32)
        table = torch.stack([angle.cos(), angle.sin()])
        probes = [plain(device, 2, H, S, width, seed=i).transpose(1, 2) for i, width in enumerate((N + R, N + R, V))]
        dq, dk, dv = probes
        for eps in (None, 1e-2):
            wide = [t.double().requires_grad_() for t in (q, kv, k_rope)]
            norms = None if eps is None else (_HeadNorm(eps), _HeadNorm(eps))
            made = attention_inputs(wide[0], wide[1], wide[2][:, :, None], table.double(), norms=norms)
            exact = [x for x in made if isinstance(x, torch.Tensor)]  # all of them: plain ops cast nothing
            torch.autograd.backward(exact, [probe.double() for probe in probes])
            where, kept, rounding = f"with {H} heads of {N} + {R} and {V}, eps {eps}", None, BF16_ROUNDING
            if eps is None:
                ours = rotary.rotate_heads(q, kv, k_rope, table)
            else:
                given, rounding = (q, kv, k_rope, table, eps), 2 * BF16_ROUNDING  # of the norm and of RoPE
                *ours, q_rstd, k_rstd, _ = rotary.norm_and_rotate_heads(*given, 0.0)
                *in_fp8, _, _, amaxes = rotary.norm_and_rotate_heads(*given, 16.0)
                kept = q, kv, k_rope, q_rstd, k_rstd
                for name, made, data, amax in zip("qk", ours, in_fp8, amaxes, strict=True):
                    same(data, saturating_cast(made, amax.new_tensor(16.0), E4M3), f"{name} in FP8 {where}")
                    same(amax, made.abs().amax().float(), f"amax of {name} {where}")
            for name, made, want in zip("qk", ours, exact, strict=False):
                near(made, want.detach(), rounding, f"{name} {where}")
            gradients = rotary.rotate_heads_backward(dq, dk, dv, table, kept)
            for name, made, leaf in zip(("q", "kv", "k_rope"), gradients, wide, strict=True):
                assert leaf.grad is not None
                near(made, leaf.grad, BF16_ROUNDING, f"gradient of {name} {where}")


class _HeadNorm:
    """The norm of a head in plain PyTorch."""

    def __init__(self, eps: float):
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def optimizer(device: torch.device) -> None:
    """Check norms of gradients; AdamW, the norms of its updates and its copies, in three steps of which the second is
    skipped."""
    gradients = [plain(device, n, dtype=torch.float32) for n in (1, 5000, 37)]
    norms = GradientNorms([1, 5000, 37, 3], device)([*gradients, None])
    near(norms, torch.stack([*(g.double().norm() for g in gradients), norms.new_zeros(())]), FP32_SUM, "gradient norms")
    for moments in (torch.float32, torch.bfloat16):
        _optimizer(device, moments)


def _optimizer(device: torch.device, moments: torch.dtype) -> None:
    sizes = (1, 37, 5120)
    ours = [plain(device, n, dtype=torch.float32) for n in sizes]
    first, second = ([torch.zeros_like(p, dtype=moments) for p in ours] for _ in range(2))
    steps = [torch.zeros((), device=device) for _ in ours]
    theirs = [p.double() for p in ours]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(theirs, DECAYS, strict=True)]
    twin = torch.optim.AdamW(groups, LR, BETAS, EPS)
    kernel = FusedAdamW(ours, first, second, steps, DECAYS, BETAS, EPS)
    lr, divisor = torch.tensor(LR, device=device), torch.tensor(2.0, device=device)
    narrow, wide = (torch.zeros_like(p, dtype=d) for p, d in ((ours[2], E4M3.dtype), (ours[1], torch.bfloat16)))
    scale = torch.tensor([30.0, 700.0], device=device)
    scale_inv, amax = torch.zeros_like(scale), torch.zeros_like(scale)
    for step, ok in enumerate((True, False, True)):
        before = [p.double() for p in ours]
        for p, q in zip(ours, theirs, strict=True):
            p.grad = plain(device, len(p) + step, dtype=torch.float32)[: len(p)]
            q.grad = p.grad.double() / 2
        in_fp8 = step > 0 and knows_fp8(device)  # without it the kernel is another
        copy = (narrow, scale, scale_inv, amax.zero_()) if in_fp8 else None
        in_bf16 = (wide,) if knows_bf16(device) else None
        kernel.step(torch.tensor(ok, device=device), lr, divisor, [None, in_bf16, copy])
        if in_bf16 is not None:
            same(wide, ours[1].bfloat16(), f"copy in BF16, step {step}")
        if in_fp8:
            halves = ours[2].bfloat16().view(2, -1)
            same(narrow.view(2, -1), saturating_cast(halves, scale[:, None], E4M3), f"copy in FP8, step {step}")
            same(torch.stack([scale_inv, amax]), torch.stack([1 / scale, halves.abs().amax(1).float()]), "its scales")
        if ok:
            twin.step()
            moved = torch.stack([(p.double() - b).norm() for p, b in zip(ours, before, strict=True)])
            allowed = 1e-4 if moments == torch.float32 else 2.0**-8  # weights with 24 bits, rounded moments
            near(kernel.norms(lr)[0], moved, allowed, f"norms of updates, step {step}")
            for kept, key in ((first, "exp_avg"), (second, "exp_avg_sq")):
                for mine, q in zip(kept, theirs, strict=True):
                    near(mine, twin.state[q][key], 2.0**-8 + FP32_SUM, f"{key} in {moments}, step {step}")
                    twin.state[q][key].copy_(mine)  # with its rounding
        for p, q, decay in zip(ours, theirs, DECAYS, strict=True):
            near(p, q, FP32_SUM, f"AdamW, {moments}, step {step}, decay {decay}")
        sizes_of = torch.stack([p.double().norm() for p in ours])
        near(kernel.norms(lr)[1], sizes_of, FP32_SUM, f"norms of parameters, step {step}")


def statistics(device: torch.device) -> None:
    """Check the kurtosis of rows, and the statistics of casts."""
    x = plain(device, 7, 300)
    ours, theirs = (torch.zeros(2, dtype=torch.float64, device=device) for _ in range(2))
    add_kurtosis(ours, x)
    add_plain_kurtosis(theirs, x)
    near(ours, theirs, FP32_SUM, "kurtosis")
    x, inv = plain(device, 45, 200) * 1000, torch.tensor(1.5, device=device)
    x[0] *= 1e-7
    data = (x.float() / inv).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    sums = cast_statistics.new_sums(device=device)
    cast_statistics.add_cast_statistics(sums, x, data, inv, E4M3)
    exact, read = x.double(), data.double() * inv
    saturated, vanished = (exact.abs() > E4M3.max * inv).sum(), ((exact != 0) & (read == 0)).sum()
    counts = torch.stack([torch.tensor(x.numel(), device=device), saturated, vanished])
    same(sums.sum(0)[:3], counts, "counts of what a cast loses")
    squares = torch.stack([(read - exact).square().sum(), exact.square().sum()])
    near(sums.sum(0)[3:], squares, FP32_SUM, "squared error of a cast")
