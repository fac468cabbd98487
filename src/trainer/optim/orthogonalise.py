"""Newton-Schulz: the orthogonal factor of a matrix, from products alone.

For U = W S V^T (singular values S), a polynomial a x + b x^3 + c x^5 of X is W (a S + b S^3 + c S^5) V^T: it changes
singular values and no direction. With X_0 = U / ||U||_F all of them lie in [0, 1], and

    A = X X^T        X <- a X + (b A + c A^2) X

some steps with suitable coefficients bring all of them near 1, so that X comes near W V^T:

    quintic          one triple for all steps (arXiv 2502.16982); 5 steps end in 0.7 to 1.13
    deepseek_v4      quintic, and two last steps of (2, -1.5, 0.5), which end within 0.007 of 1 (arXiv 2606.19348)
    polar_express    a triple for each step, optimal after the step before it (arXiv 2505.16932), divided by a safety
                     factor of 1.01 in all but the last

The norm is computed in FP32, the steps in a selectable format, with sums in FP32. The products cost k (4 m^2 n + 2 m^3)
FLOPs in k steps for m rows and n >= m columns; a tall matrix is transposed. On Hopper GPUs, in BF16, our kernels
compute one triangle of the symmetric A and b A + c A^2, and fuse addition and division: k (3 m^2 n + m^3)
(`precision.kernels.newton_schulz`). A CPU multiplies as `precision.cpu` says, and rounds to the format.
"""

import importlib.util

import torch
from torch import Tensor

from precision import cpu
from precision.proof import MUON, refused
from trainer.config import Coefficients, Iteration

Triple = tuple[float, float, float]

EPS = 1e-15  # added to the norm: a matrix of zeros stays one
_QUINTIC = (3.4445, -4.7750, 2.0315)
_LAST_OF_V4 = (2.0, -1.5, 0.5)
_SAFETY = 1.01
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
STEPS = {Coefficients.quintic: 5, Coefficients.deepseek_v4: 10, Coefficients.polar_express: 8}
"""Published number of steps of each method."""
DTYPES = {Iteration.bf16: torch.bfloat16, Iteration.fp16: torch.float16, Iteration.fp32: torch.float32}
CARRIED = {each: torch.float32 if each is Iteration.fp16 else dtype for each, dtype in DTYPES.items()}
"""Format of U until it is normed: FP16 would lose small gradients, and large ones become infinite."""
FEWEST = {Coefficients.quintic: 1, Coefficients.deepseek_v4: 3, Coefficients.polar_express: 1}


def polynomials(kind: Coefficients, steps: int | None = None) -> list[Triple]:
    """Return (a, b, c) of each step. steps: None for the published number."""
    steps = STEPS[kind] if steps is None else steps
    if kind is Coefficients.quintic:
        return [_QUINTIC] * steps
    if kind is Coefficients.deepseek_v4:
        return [_QUINTIC] * (steps - 2) + [_LAST_OF_V4] * 2
    raw = [_POLAR_EXPRESS[min(i, len(_POLAR_EXPRESS) - 1)] for i in range(steps)]
    return [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in raw[:-1]] + raw[-1:]


def flops(rows: int, columns: int, steps: int) -> float:
    """Return the FLOPs of the products of one matrix."""
    m, n = sorted((rows, columns))
    return steps * (4.0 * m * m * n + 2.0 * m**3)


@torch.no_grad()
def orthogonalise(u: Tensor, triples: list[Triple], dtype: torch.dtype) -> Tensor:
    """Orthogonalise u [k, A, B], any format: near W V^T of each, [k, A, B] in `dtype`. Zeros stay zeros. May overwrite
    u."""
    if u.shape[-2] > u.shape[-1]:
        return orthogonalise(u.mT, triples, dtype).mT
    if dtype is torch.bfloat16 and has_kernels(u.device):
        from precision.kernels import newton_schulz  # needs Triton

        if newton_schulz.is_faster(u.shape[-2], u.shape[-1], u.device):
            x = u.to(dtype).contiguous()
            norms = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float32)
            return newton_schulz.iterate(x, 1 / (norms + EPS), triples)
    return plain(u, triples, dtype)


def plain(u: Tensor, triples: list[Triple], dtype: torch.dtype) -> Tensor:
    """Run `orthogonalise` in plain PyTorch, for matrices no taller than wide."""
    wide = u.float()
    x = (wide / (torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True) + EPS)).to(dtype)
    for a, b, c in triples:
        gram = _sum(None, x, x.mT, 0.0, 1.0)
        x = _sum(x, _sum(gram, gram, gram, b, c), x, a, 1.0)
    return x


def has_kernels(device: torch.device) -> bool:
    """Return whether Muon's kernels run here."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None and MUON not in refused


def _sum(added: Tensor | None, x: Tensor, y: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta added + alpha x y, [k, m, n], in the format of x."""
    if x.is_cuda:
        return x @ y if added is None else torch.baddbmm(added, x, y, beta=beta, alpha=alpha)
    product = cpu.multiply(x, y, torch.float32, narrow=x.dtype is torch.bfloat16)
    return (product if added is None else product.mul_(alpha).add_(added, alpha=beta)).to(x.dtype)
