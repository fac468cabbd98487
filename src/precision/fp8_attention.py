"""Attention with all products in FP8, forward and backward. The reference is plain PyTorch, on any device; on a Hopper
GPU the plan chooses `kernels.fp8_attention`.

    1, 3   S  = q k^T        E4M3  E4M3     forward, and again backward
    2      O  = P v          E4M3  E4M3     P = exp(z - max) x 256, divided by the sum of the unrounded P
    4      dP = dO v^T       E5M2  E4M3
    5      dV = P^T dO       E4M3  E5M2     P = exp(z - lse) x 448
    6      dQ = dS k         E5M2  E4M3     dS = P (dP - D), D = rowsum(dO O)
    7      dK = dS^T q       E5M2  E4M3

Products are summed in FP32; O is returned in BF16. Two rules matter more than any format:

- D uses the same dO as dP, read back from FP8, and O in BF16, computed from the same FP8 v. Rounding dP, v or O
  differently breaks sum_j dS_ij = 0 where attention is peaked.
- The largest P of a row is exact: scale 256 on exp(z - max), which is 1 there.

Scales: normed q and k (`model.qk_norm`) have |x| <= sqrt(d), so they have a static power of two as scale, and their
amax is only recorded. Otherwise they are scaled like v, dO and dS: one scale per tensor, delayed or current.

Both passes are operators: graphs hold them, and recomputation keeps the forward result. The reference processes heads
one after the other where the S^2 scores of all of them would be large. The kernels never hold dS: where casts are
observed the reference computes, and a sampled step computes dS of some queries again.

Legend: B batch, H heads, S sequence, d width of a query and key, V of a value.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from precision.attention import attention_core, visible
from precision.backends import get_backend
from precision.formats import BY_NAME, Format, read_back, saturating_cast
from precision.linear import quantize
from precision.max_logits import raise_max_logits
from precision.observe import every, is_observed, is_sampled, report, show
from precision.operand import Operand
from precision.operators import fake, operator
from precision.rotary import StaticCast
from precision.rows import CUDA, CoreRow, GemmRecipe
from precision.scaling import Slot, absolute_max, record_amax, scale_from_amax

P_FORWARD, P_BACKWARD = 256.0, 448.0
_SCORES = 1 << 24  # scores of the heads that are processed together


class AttentionCore(nn.Module):
    """Attention core of a plan row in FP8: softmax(scale q k^T) v."""

    def __init__(self, row: CoreRow):
        super().__init__()
        self.recipe, self.static, self.in_fp8 = row.recipe, row.qk_scale, True
        of_qk = row.recipe.input if row.qk_scale is None else None
        self.q_slot, self.k_slot = Slot([f"{row.name}:q"], of_qk), Slot([f"{row.name}:k"], of_qk)
        self.v_slot = Slot([f"{row.name}:v"], row.recipe.input)
        self.grad_slot = Slot([f"{row.name}:grad"], row.recipe.grad)
        self.scores_slot = Slot([f"{row.name}.scores:grad"], row.recipe.grad)

    def slots(self) -> list[Slot]:
        """Return the arena rows in forward order: q and k (recorded only, if their scale is static), v, dO, dS."""
        return [self.q_slot, self.k_slot, self.v_slot, self.grad_slot, self.scores_slot]

    def forward(
        self,
        q: Tensor | Operand,
        k: Tensor | Operand,
        v: Tensor,
        scale: float,
        mask: Tensor | None = None,
        max_logits_H: Tensor | None = None,
    ) -> Tensor:
        """Compute the same as `attention.attention_core`: q, k [B, H, S, d], v [B, H, S, V] in BF16, or q and k cast by
        `static_cast`; returns [B, H, S, V] BF16."""
        if not self.in_fp8:
            assert isinstance(q, Tensor) and isinstance(k, Tensor)
            return attention_core(q, k, v, scale, mask, max_logits_H)
        operands = [
            *self._cast(q, self.q_slot),
            *self._cast(k, self.k_slot),
            *_quantize_heads(v, self.v_slot, self.recipe),
        ]
        slots = self.grad_slot, self.scores_slot
        rows = [row for slot in slots for row in (slot.scale, slot.amax, slot.place)]
        q, k = (x.carrier if isinstance(x, Operand) else x for x in (q, k))
        return _Core.apply(q, k, v, *operands, mask, *rows, max_logits_H, scale, self.recipe)

    @property
    def static_cast(self) -> StaticCast | None:
        """Return how a kernel may cast q and k for this core; None: the core casts them."""
        q_amax, k_amax = self.q_slot.amax, self.k_slot.amax
        if self.static is None or not self.in_fp8 or self.recipe.backend != CUDA or q_amax is None or k_amax is None:
            return None
        return StaticCast(self.static, q_amax, k_amax)

    def _cast(self, x: Tensor | Operand, slot: Slot) -> tuple[Tensor, Tensor]:
        """Return queries or keys in FP8 and their inverse scale; record the amax."""
        if isinstance(x, Operand):
            return x.data, x.scale_inv
        if self.static is None:
            return _quantize_heads(x, slot, self.recipe)
        scale, given = torch.full((), self.static, device=x.device), self.recipe.with_given_scale
        backend, x_BSHd = get_backend(self.recipe.backend), x.detach().transpose(1, 2)
        data, inv = backend.quantize(x_BSHd, scale, slot.rows[1], self.recipe.input, given)
        return data.transpose(1, 2), inv


def _quantize_heads(x: Tensor, slot: Slot, recipe: GemmRecipe) -> tuple[Tensor, Tensor]:
    """Return x [B, H, S, d] in FP8, in memory [B, S, H, d] as the projections write it, and its inverse scale."""
    data, inv = quantize(x.transpose(1, 2), slot, recipe)
    return data.transpose(1, 2), inv


class _Core(torch.autograd.Function):
    """See the module docstring. q, k, v are the autograd edges; their FP8 data and inverse scales enter the
    products."""

    @staticmethod
    def forward(
        ctx, q, k, v, q8, q_inv, k8, k_inv, v8, v_inv, mask,
        dout_scale, dout_amax, dout_place, ds_scale, ds_amax, ds_place, max_logits_H, scale: float, recipe: GemmRecipe,
    ) -> Tensor:  # fmt: skip
        out, lse = _forward(q8, q_inv, k8, k_inv, v8, v_inv, mask, scale, recipe.backend, recipe.sums_fast)
        if max_logits_H is not None:
            raise_max_logits(max_logits_H, lse)
        ctx.save_for_backward(q8, q_inv, k8, k_inv, v8, v_inv, mask, out, lse)
        # arena rows are not saved for backward: other views of the arena are written in between
        ctx.rows, ctx.scale, ctx.recipe = (
            (dout_scale, dout_amax, dout_place, ds_scale, ds_amax, ds_place),
            scale,
            recipe,
        )
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        recipe, (dout_scale, dout_amax, dout_place, *of_ds) = ctx.recipe, ctx.rows
        backend = get_backend(recipe.backend)
        dout_BSHV = grads[0].transpose(1, 2)
        dout8, dout_inv = backend.quantize(dout_BSHV, dout_scale, dout_amax, recipe.grad, recipe, dout_place)
        how = recipe.grad.name, recipe.scaling.margin, recipe.scaling.power_of_two, recipe.delayed
        by = recipe.backend, recipe.sums_fast
        found = _backward(dout8.transpose(1, 2), dout_inv, *ctx.saved_tensors, *of_ds, ctx.scale, *how, *by)
        return *(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True)), *(None,) * 16


@operator("fp8_attention")
def _forward(
    q8: Tensor,
    q_inv: Tensor,
    k8: Tensor,
    k_inv: Tensor,
    v8: Tensor,
    v_inv: Tensor,
    mask: Tensor | None,
    scale: float,
    backend: str,
    fast: bool,
) -> tuple[Tensor, Tensor]:
    """Return O [B, H, S, V] BF16 (in memory as v8) and the log-sum-exp of each row's scores [B, H, S] FP32.
    fast: kernels sum in the tensor cores alone."""
    operands = q8, q_inv, k8, k_inv, v8, v_inv
    if backend == CUDA and not is_observed():
        from precision.kernels import fp8_attention as kernels

        return kernels.forward(*operands, _bounds(mask, q8), scale, fast)
    return forward(*operands, mask, scale)


@fake(_forward)
def _(q8, q_inv, k8, k_inv, v8, *rest) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v8, dtype=torch.bfloat16), q8.new_empty(q8.shape[:3], dtype=torch.float32)


def forward(
    q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, v8: Tensor, v_inv: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the reference of `_forward`."""
    out = torch.empty_like(v8, dtype=torch.bfloat16)
    lse = torch.empty(q8.shape[:3], device=q8.device)
    seen = visible(mask, q8.shape[2], q8.device)
    for part in _heads(q8):
        z = _scores(q8[:, part], q_inv, k8[:, part], k_inv, seen, scale)
        top = z.amax(-1, keepdim=True)
        p = torch.exp(z - top)
        total = p.sum(-1, keepdim=True)
        out[:, part] = _quantize_probabilities(p, P_FORWARD) @ read_back(v8[:, part], v_inv) / total
        lse[:, part] = (top + total.log()).squeeze(-1)
    return out, lse


@operator("fp8_attention_backward", mutates_args=("ds_amax",))
def _backward(
    dout8: Tensor,
    dout_inv: Tensor,
    q8: Tensor,
    q_inv: Tensor,
    k8: Tensor,
    k_inv: Tensor,
    v8: Tensor,
    v_inv: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ds_scale: Tensor,
    ds_amax: Tensor,
    ds_place: Tensor | None,
    scale: float,
    fmt_name: str,
    margin: int,
    power_of_two: bool,
    delayed: bool,
    backend: str,
    fast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, as the operands are in memory, in FP32, or BF16 as kernels write them;
    raise ds_amax."""
    operands, fmt = (dout8, dout_inv, q8, q_inv, k8, k_inv, v8, v_inv), BY_NAME[fmt_name]
    how = fmt, delayed, margin, power_of_two
    if backend != CUDA or is_observed():
        return backward(*operands, mask, out, lse, ds_scale, ds_amax, *how, scale, ds_place)
    from precision.kernels import fp8_attention as kernels

    bounds = _bounds(mask, q8)
    dq, dk, dv, factor = kernels.backward(
        *operands, bounds, out, lse, ds_scale, ds_amax, kernels.cast_of_scores(*how), scale, fast
    )
    if is_sampled():  # of the first head
        one, rows = slice(0, 1), every(lse[0, 0])
        gradients = _Gradients(*operands, visible(mask, q8.shape[2], q8.device), out, lse, scale)
        ds = gradients(one, one, rows)[2]
        show(ds_place, ds, saturating_cast(ds, factor, fmt), factor.reciprocal(), fmt)
    return dq, dk, dv


@fake(_backward)
def _(dout8, dout_inv, q8, q_inv, k8, k_inv, v8, *rest) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if rest[-2] == CUDA else torch.float32
    dq, dk, dv = (torch.empty_like(t, dtype=dtype) for t in (q8, k8, v8))
    return dq, dk, dv


class _Gradients(NamedTuple):
    """What P and dS are made of. seen: from `visible`."""

    dout8: Tensor
    dout_inv: Tensor
    q8: Tensor
    q_inv: Tensor
    k8: Tensor
    k_inv: Tensor
    v8: Tensor
    v_inv: Tensor
    seen: Tensor
    out: Tensor
    lse: Tensor
    scale: float

    def __call__(
        self, heads: slice, batch: slice = slice(None), rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return P, dO and dS of some heads (of some sequences, of some queries) before P and dS are cast."""
        at, keys = (batch, heads, rows), (batch, heads)
        seen = self.seen[rows] if self.seen.dim() == 2 else self.seen[batch, :, rows]
        z = _scores(self.q8[at], self.q_inv, self.k8[keys], self.k_inv, seen, self.scale)
        p = torch.exp(z - self.lse[at][..., None])
        dout, v = read_back(self.dout8[at], self.dout_inv), read_back(self.v8[keys], self.v_inv)
        total = (dout * self.out[at].float()).sum(-1, keepdim=True)
        return p, dout, p * (dout @ v.mT - total)


def backward(
    dout8: Tensor, dout_inv: Tensor, q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, v8: Tensor, v_inv: Tensor,
    mask: Tensor | None, out: Tensor, lse: Tensor, ds_scale: Tensor, ds_amax: Tensor, fmt: Format, delayed: bool,
    margin: int, power_of_two: bool, scale: float, ds_place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the reference of `_backward`."""
    seen = visible(mask, q8.shape[2], q8.device)
    gradients = _Gradients(dout8, dout_inv, q8, q_inv, k8, k_inv, v8, v_inv, seen, out, lse, scale)
    dq, dk, dv = (torch.empty_like(t, dtype=torch.float32) for t in (q8, k8, v8))
    # a known scale needs one pass; asking a GPU whether it is known would synchronise
    if delayed and ds_scale.device.type == "cpu" and bool(ds_scale > 0):
        factor = ds_scale
    else:
        own = torch.stack([absolute_max(gradients(part)[2]) for part in _heads(q8)]).amax()
        factor = scale_from_amax(own, fmt.max, margin, power_of_two)
        factor = torch.where(ds_scale > 0, ds_scale, factor) if delayed else factor
    inv = factor.reciprocal()
    for part in _heads(q8):
        p, dout, ds = gradients(part)
        record_amax(ds_amax, absolute_max(ds))
        ds8 = saturating_cast(ds, factor, fmt)
        report(ds_place, ds_amax, ds, ds8, inv, fmt)
        ds = read_back(ds8, inv)
        dq[:, part] = ds @ read_back(k8[:, part], k_inv) * scale
        dk[:, part] = ds.mT @ read_back(q8[:, part], q_inv) * scale
        dv[:, part] = _quantize_probabilities(p, P_BACKWARD).mT @ dout
    return dq, dk, dv


def _scores(q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the scores z in FP32; -inf where masked."""
    return (read_back(q8, q_inv) @ read_back(k8, k_inv).mT * scale).masked_fill(~seen, -torch.inf)


def _bounds(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return the bounds [2, B, S] int32 of each position's document for a mask from `document_mask`. None: of its
    sequence."""
    B, _, S, _ = like.shape
    if mask is None:
        bounds = torch.zeros(2, B, S, dtype=torch.int32, device=like.device)
        bounds[1] = S
        return bounds
    if mask.dtype is not torch.bool:
        return mask
    seen = mask[:, 0].int()
    return torch.stack([seen.argmax(-1), S - seen.flip(-2).argmax(-2)]).int()


def _quantize_probabilities(p: Tensor, scale: float) -> Tensor:
    """Cast probabilities to E4M3 under a constant scale and read them back."""
    return saturating_cast(p, p.new_tensor(scale), BY_NAME["e4m3"]).float() / scale


def _heads(q8: Tensor) -> Iterator[slice]:
    """Yield slices of heads whose scores fit `_SCORES`."""
    B, H, S, _ = q8.shape
    each = max(1, min(H, _SCORES // (B * S * S)))
    return (slice(start, min(start + each, H)) for start in range(0, H, each))
