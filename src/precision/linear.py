"""Linear and GroupedLinear: the three GEMMs of a plan row.

    fprop  y [R, N]  = x [R, K] w[N, K]^T
    dgrad  dx [R, K] = dy [R, N] w [N, K]
    wgrad  dw [N, K] = dy [R, N]^T x [R, K]

The path of one FP8 linear, forward (left) and backward (right):

    fused op (norm, SwiGLU, ...)               gradient of y, BF16 [R, N]
      |  its `Feed` lists what the               |
      |  consumers read: FP8, BF16 or both       |
      v                                          v
    `Operand`: carrier, data, scale_inv        `backend.quantize_grad`: dy in FP8, once for two GEMMs,
      |  made by `backend.quantize` under        |  under `grad_slot`'s scale
      |  `input_slot`'s scale; records amax      |
      v                                          v
    `_Gemms.forward`                           `_Gemms.backward`
      |  backend.forward(x, w, recipe)           |  backend.dgrad(dy, w), backend.wgrad(dy, x)
      v                                          v
    y, BF16 [R, N]                             dx to the carrier, dw to the master weight

- The *carrier* is the autograd edge of x: the BF16 tensor itself if a consumer reads it, else a stand-in without
  memory. The gradient of the unquantised x flows into it (straight-through).
- A *Slot* names the arena rows of one quantised tensor. `bind` sets its `scale` and `amax` to views of the
  `ScalingArena`, which holds the scales and amax histories of the whole model. The kernel that casts reads the scale
  and raises the amax.
- The *recipe* (`GemmRecipe`) is the resolved plan row: formats, granularity, accumulation, backend.
- A *backend* (`reference`, `cuda`) computes. `cuda` calls operators registered with torch (`precision.operators`),
  which `torch.compile` keeps whole. Transformer Engine replaces the whole path by its own module (`te`).

The parameter is the FP32 master weight. The compute weight is BF16(master), or FP8 quantised from that BF16. Quantising
from FP32 would change 1.7 % of E4M3 values, and layouts that gather BF16 would compute other numbers. The compute
weight (`operand`) is made once after each change of the masters, not in each microbatch: `refresh_weights` does it, or
the optimizer's kernel together with the master (`made_ahead`), which saves reading the master again.

Where ranks share a weight, each holds a shard of the master, and FSDP gathers the whole compute weight while it is in
use. It gathers either `gather_dtype`, from which `receive` makes the operand, or FP8 that each rank made from its part
with `quantize_part` and that `receive_quantized` takes as it is. Meanwhile the layer's `weight` is an autograd edge: a
tensor of the master's shape and dtype that receives gradients and holds no memory.

A plain tensor x is quantised here. In FP8 only the FP8 x is saved for backward. dw leaves its kernel in the dtype of
the weight that autograd sees, FP32, and is added to FP32 sums.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from precision.backends import GradOperand, WeightOperand, get_backend
from precision.backends.transformer_engine import TransformerEngineGemm
from precision.deferred import WeightGradientQueue
from precision.errors import UserError
from precision.formats import E4M3, read_back
from precision.observe import is_observed, is_sampled, sampling_number, show_weight
from precision.operand import GradRows, Operand
from precision.rows import CUDA, TE, GemmRecipe, GemmRow
from precision.scaling import Slot


class _Gemms(torch.autograd.Function):
    """All three GEMMs. carrier: x's autograd edge; x, x_inv: its operand. weight: the master parameter; w_*: its
    operand. grad_*: scale, amax and place of the output gradient's slot. deferred: takes the weight's gradient."""

    @staticmethod
    def forward(
        ctx,
        carrier: Tensor,
        weight: Tensor,
        x: Tensor,
        x_inv: Tensor | None,
        w: Tensor,
        w_inv: Tensor | None,
        w_t: Tensor | None,
        w_t_inv: Tensor | None,
        offsets: Tensor | None,
        grad_scale: Tensor | None,
        grad_amax: Tensor | None,
        grad_place: Tensor | None,
        recipe: GemmRecipe,
        deferred: WeightGradientQueue | None,
    ) -> Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        x2_inv = x_inv.reshape(-1, x_inv.shape[-1]) if x_inv is not None and x_inv.dim() else x_inv
        operand = WeightOperand(w, w_inv, w_t, w_t_inv)
        y = get_backend(recipe.backend).forward(x2, x2_inv, operand, offsets, recipe)
        ctx.save_for_backward(x2, x2_inv, w, w_inv, w_t, w_t_inv, offsets)
        # arena rows are not saved for backward: other views of the arena are written in between
        ctx.grad_scale, ctx.grad_amax, ctx.grad_place, ctx.recipe = grad_scale, grad_amax, grad_place, recipe
        ctx.carrier_dtype, ctx.weight_dtype, ctx.shape = carrier.dtype, weight.dtype, carrier.shape
        ctx.deferred, ctx.weight = deferred, None if deferred is None else weight
        return y.view(*carrier.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, x_inv, w, w_inv, w_t, w_t_inv, offsets = ctx.saved_tensors
        recipe: GemmRecipe = ctx.recipe
        backend = get_backend(recipe.backend)
        exact = grads[0].reshape(-1, grads[0].shape[-1])
        if recipe.is_fp8:
            dy = backend.quantize_grad(exact, ctx.grad_scale, ctx.grad_amax, recipe, ctx.grad_place)
        else:
            exact = exact.to(recipe.grad.dtype)
            dy = GradOperand(exact, exact)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = backend.dgrad(dy, WeightOperand(w, w_inv, w_t, w_t_inv), offsets, recipe)
            dx = dx.to(ctx.carrier_dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            operands = dy, x, x_inv, offsets, recipe, ctx.weight_dtype
            if ctx.deferred is None:
                dw = backend.wgrad(*operands)
            else:
                ctx.deferred.put(ctx.weight, partial(backend.wgrad, *operands))
        return dx, dw, *(None,) * 12


def quantize(x: Tensor, slot: Slot, recipe: GemmRecipe) -> tuple[Tensor, Tensor]:
    """Return FP8 data and inverse scales of x [..., K] under an input slot, without an autograd edge
    (straight-through); record its amax."""
    backend = get_backend(recipe.backend)
    return backend.quantize(x.detach(), *slot.rows, recipe.input, recipe, slot.place)


def _unchanged(operand: WeightOperand | None) -> AbstractContextManager[None]:
    """Return a context in which an operand may be written that autograd has saved: a pending backward pass gets the
    same numbers again."""
    kept = tuple(t for t in operand or () if t is not None)
    return torch.autograd._unsafe_preserve_version_counter(kept)  # pyright: ignore[reportPrivateImportUsage]


class _GemmLayer(nn.Module):
    """Common part of Linear and GroupedLinear: the master weight, its operand, the slots, the call."""

    def __init__(self, row: GemmRow, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.recipe = row.recipe
        self.operand: WeightOperand | None = None
        self.operand_version = -1
        self._made_ahead: tuple[int, int] | None = None  # versions of master and scales that `mark_ahead` saw
        self._shown = 0
        self.deferred: WeightGradientQueue | None = None  # where the gradients of weights wait, in a pipeline
        self.is_sharded = False  # whether `receive` makes the operand, whenever the weight has been gathered
        self.keeps_transposed = True  # False: each backward pass transposes the weight, instead of once a step
        self.input_slot: Slot | None = None
        self.weight_slot: Slot | None = None
        self.grad_slot: Slot | None = None
        if row.recipe.is_fp8:
            stacked = len(shape) == 3
            weight_names = [f"{row.name}:weight.{g}" for g in range(row.groups)] if stacked else [f"{row.name}:weight"]
            self.input_slot = Slot([f"{row.name}:input"], row.recipe.input)
            self.weight_slot = Slot(weight_names, row.recipe.input, stacked)
            self.grad_slot = Slot([f"{row.name}:grad"], row.recipe.grad)
        self.te: TransformerEngineGemm | None = None
        if row.recipe.backend == TE:
            self.te = TransformerEngineGemm(row, len(shape) == 3, (self.input_slot, self.weight_slot, self.grad_slot))
            self.input_slot = None  # it quantises x itself: a Feed must deliver the plain tensor

    def slots(self) -> list[Slot]:
        """Return this layer's arena rows, in forward order."""
        input_slot = self.input_slot if self.te is None else self.te.input_slot
        return [slot for slot in (input_slot, self.weight_slot, self.grad_slot) if slot is not None]

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which a shared weight is gathered: the compute weight's format, BF16 if it is quantised
        afterwards."""
        return torch.bfloat16 if self.recipe.is_fp8 else self.recipe.input.dtype

    @torch.no_grad()
    def receive(self, weight: Tensor, given: Tensor | None = None) -> list[Tensor]:
        """Make the operand from the whole compute weight [(G,) N, K] in `gather_dtype`, and record its amax. given: a
        0-d scale that replaces the one derived from this amax.

        Returns the tensors made beside `weight`. Their memory may be freed until the next call, which fills it again.
        Empty if the operand is `weight` itself.
        """
        if self.weight_slot is None:
            if self.operand is None or self.operand.data.data_ptr() != weight.data_ptr():
                self.operand = WeightOperand(weight)
            return []
        with _unchanged(self.operand):
            self.operand = made = self._quantize(weight, self.operand, given)
        return [t for t in (made.data, made.data_t) if t is not None]

    @torch.no_grad()
    def quantize_part(self, part: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Return FP8 data and inverse scales of BF16(part): rows of the master, or some of its experts.

        scale: of the whole weight, 0-d or one per expert; not read with blocks. amax: raised to the part's, of scale's
        shape.
        """
        backend = get_backend(self.recipe.backend)
        data, inv = backend.quantize_part(part, scale, amax, self.recipe.input, self.recipe)
        self._show(part, WeightOperand(data, inv))
        return data, inv

    @torch.no_grad()
    def receive_quantized(self, data: Tensor, scale_inv: Tensor) -> list[Tensor]:
        """Take a weight that was quantised in parts as the operand; otherwise as `receive`. data: its bytes [(G,) N,
        K]."""
        old, data = self.operand, data.view(self.recipe.input.dtype)
        if old is not None:
            assert old.scale_inv is not None
            if (old.data.data_ptr(), old.scale_inv.data_ptr()) != (data.data_ptr(), scale_inv.data_ptr()):
                old = None
        with _unchanged(old):
            backend = get_backend(self.recipe.backend)
            self.operand = backend.weight_operand(data, scale_inv, self.recipe, old, self.keeps_transposed)
        return [] if self.operand.data_t is None else [self.operand.data_t]

    @torch.no_grad()
    def refresh_weight(self) -> None:
        """Make the compute weight from the master, in place where it exists, and record its amax."""
        master = self.weight.detach()
        out = self.operand if self.operand is not None and self.operand.data.device == master.device else None
        if self.te is not None:
            self.operand = WeightOperand(self.te.refresh(master))
        elif self.weight_slot is not None:
            self.operand = self._quantize(master, out)
        elif out is None or out.data.data_ptr() == master.data_ptr():
            self.operand = WeightOperand(master.to(self.recipe.input.dtype))
        else:
            out.data.copy_(master)
        self.operand_version = self.weight._version

    def _quantize(self, weight: Tensor, out: WeightOperand | None, given: Tensor | None = None) -> WeightOperand:
        """Return the operand of the whole weight in FP8, in the memory of `out` if given; record its amax. given: as in
        `receive`."""
        assert self.weight_slot is not None
        (scale, amax), recipe = self.weight_slot.rows, self.recipe
        if given is not None:
            scale, recipe = given, recipe.with_given_scale
        backend = get_backend(recipe.backend)
        made = backend.quantize_weight(weight, scale, amax, recipe.input, recipe, out, self.keeps_transposed)
        self._show(weight, made)
        return made

    def made_ahead(self) -> tuple[Tensor, ...] | None:
        """Return what an optimizer must write to make the compute weight together with the master: BF16 data, or E4M3
        data, the scales to use, and inverse scales and amaxes to write. None: it cannot; scales are not known before.
        """
        recipe, operand, slot = self.recipe, self.operand, self.weight_slot
        if self.te is not None or self.is_sharded or operand is None or not operand.data.is_contiguous():
            return None
        if slot is None:
            return (operand.data,) if operand.data.dtype == torch.bfloat16 else None
        if recipe.input != E4M3 or recipe.backend != CUDA or not (recipe.delayed and recipe.scales_tensors):
            return None
        assert slot.next_scale is not None and operand.scale_inv is not None and slot.next_amax is not None
        return operand.data, slot.next_scale, operand.scale_inv, slot.next_amax

    def mark_ahead(self) -> None:
        """Note that the optimizer has made the compute weight for the next step."""
        self.operand_version = self.weight._version
        self._made_ahead = self._versions()

    def forget_ahead(self) -> None:
        """Note that master or scales are others: they were loaded."""
        self._made_ahead = None

    def is_made_ahead(self) -> bool:
        """Return whether `mark_ahead` was called, and neither master nor scales have changed since."""
        return self._made_ahead is not None and self._made_ahead == self._versions()

    def _versions(self) -> tuple[int, int]:
        scales = None if self.weight_slot is None else self.weight_slot.scales
        return self.weight._version, 0 if scales is None else scales._version

    @torch.no_grad()
    def take_ahead(self) -> None:
        """Complete an operand that was made ahead."""
        operand = self.operand
        assert operand is not None
        if operand.data_t is not None and operand.scale_inv is not None:
            get_backend(self.recipe.backend).weight_operand(
                operand.data, operand.scale_inv, self.recipe, operand, self.keeps_transposed
            )
        self._show(self.weight.detach(), operand)

    def _show(self, weight: Tensor, made: WeightOperand) -> None:
        """Show a weight to the sampler, once per step."""
        if is_sampled() and self._shown != sampling_number():
            self._shown = sampling_number()
        elif not is_observed():
            return
        if self.weight_slot is not None and made.scale_inv is not None:
            show_weight(self.weight_slot.place, weight, made.data, made.scale_inv, self.recipe.input)

    def _gemms(self, x: Tensor | Operand, offsets: Tensor | None, grad: GradRows | None = None) -> Tensor:
        weight = self.operand
        assert weight is not None, "compute weights are missing: call precision.refresh_weights(model)"
        if self.te is not None:
            return self.te(x, self.weight, offsets)
        if not self.recipe.is_fp8:
            plain = x.tensor if isinstance(x, Operand) else x
            data = plain.detach().to(self.recipe.input.dtype)
            return _Gemms.apply(
                plain, self.weight, data, None, *weight, offsets, None, None, None, self.recipe, self.deferred
            )
        assert self.input_slot is not None and self.grad_slot is not None
        if isinstance(x, Operand):
            carrier, data, inv = x.carrier, x.data, x.scale_inv
        else:
            carrier = x
            data, inv = quantize(x, self.input_slot, self.recipe)
        rows, recipe = (self.grad_slot.scale, self.grad_slot.amax, self.grad_slot.place), self.recipe
        if grad is not None:  # it was shown where it was cast first
            rows, recipe = (grad.scale, grad.amax, None), recipe.with_given_scale
        return _Gemms.apply(carrier, self.weight, data, inv, *weight, offsets, *rows, recipe, self.deferred)


class Linear(_GemmLayer):
    """y = x w^T without bias, computed as its plan row states. weight: FP32 master [out_features, in_features]."""

    def __init__(self, row: GemmRow):
        super().__init__(row, (row.out_features, row.in_features))

    def forward(self, x: Tensor | Operand) -> Tensor:
        """Apply the layer to x [..., in_features]; return [..., out_features] in the row's output format."""
        return self._gemms(x, None)

    @torch.no_grad()
    def plain_weight(self) -> Tensor:
        """Return the weight as multiplied, [out_features, in_features]; an FP8 weight is read back into FP32."""
        assert self.operand is not None, "compute weights are missing: call precision.refresh_weights(model)"
        data, scale_inv = self.operand.data, self.operand.scale_inv
        return data if scale_inv is None else read_back(data, scale_inv)


class GroupedLinear(_GemmLayer):
    """One linear per group: rows offsets[g-1] to offsets[g] are multiplied by weight[g]. weight: FP32 master [groups,
    out, in].

    experts: the groups of the plan row held here; all of them, except with expert parallelism.
    """

    def __init__(self, row: GemmRow):
        super().__init__(row, (row.groups, row.out_features, row.in_features))
        self.experts = range(row.groups)

    def keep(self, experts: range) -> None:
        """Keep only these groups: weight [len(experts), out, in]. Call it before the arena is made; the masters may be
        on the meta device. UserError for Transformer Engine."""
        if self.te is not None:
            raise UserError(
                "precision.backend=transformer_engine: its experts stay in one process; set parallel.expert=1 or "
                "precision.backend=auto"
            )
        self.experts, self.operand = experts, None
        self.weight = nn.Parameter(self.weight.detach()[experts.start : experts.stop].clone())
        if self.weight_slot is not None:
            self.weight_slot.part = experts

    def forward(self, x: Tensor | Operand, offsets: Tensor, grad: GradRows | None = None) -> Tensor:
        """Apply the groups to x [R, in_features]; return [R, out_features].

        offsets [groups] int32: cumulative ends, the last is R. grad: scale and amax row for the output gradient, where
        they are not the layer's own.
        """
        return self._gemms(x, offsets, grad)


def gemm_layers(model: nn.Module) -> list[Linear | GroupedLinear]:
    """Return every Linear and GroupedLinear of a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, Linear | GroupedLinear)]


def refresh_weights(model: nn.Module, force: bool = False) -> None:
    """Update the compute weights from their masters: those whose master changed, or all with `force`.

    A training step calls it once with force, which also records the amaxes again. A model calls it before each forward
    pass, where it costs one comparison per layer.
    """
    for layer in gemm_layers(model):
        if layer.is_sharded:  # the operand is made again whenever the weight is gathered
            continue
        if force or layer.operand_version != layer.weight._version:
            layer.refresh_weight()
