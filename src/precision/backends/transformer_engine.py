"""Transformer Engine's own modules (te.Linear, te.GroupedLinear) behind our layers; TE >= 2.20, imported on first use.

    scaling of the plan            TE's recipe               where the scale comes from
    delayed, per tensor            DelayedScaling            our arena: see below
    current, per tensor            Float8CurrentScaling      TE, from the tensor itself
    current, per block (1 x 128)   Float8BlockScaling        TE, from each block

E4M3 forward; Format.HYBRID if gradients are E5M2, Format.E4M3 if they are E4M3. A BF16 row is the same module outside
`te.autocast`.

*Weights.* The FP32 master is our layer's parameter. TE's module is made on the meta device, is not part of our module
tree and owns no weight. Each call lends it BF16(master), with an autograd edge that takes its BF16 weight gradients to
the master's FP32 sum. So a checkpoint holds no second copy and no pickled `_extra_state`. TE quantises a weight in the
first microbatch of a step and keeps it (`is_first_microbatch`); evaluation quantises it again.

*Scales.* With delayed scaling TE's quantizers read a scale and raise an amax through pointers, which point to ours:
amax is the arena's row itself, the scale a copy of the arena's, made with the step's weights. So history, commit and
drop, checkpoint and logs are the arena's, as for every other backend. TE's own history is never used (TE updates it in
a global list, and the module is not in it). A row without history scales by its own amax, as elsewhere; checking for
history synchronises once per step until all rows have one. TE's cast ignores a NaN in the amax: it appears in the loss
instead. With current and block scaling TE returns no amax and turns a non-finite one into scale 1, so the amax is
measured here, in one more pass over x and dy. (A GroupedLinear with current scaling scales each expert's rows
separately; the arena shows the scale of the whole tensor.)

*Sums.* TE's own defaults are fast in the forward product and promoted to FP32 in the other two. The recipe's
`fp8_gemm_*` sets all three from `precision.accumulation` instead.

*Rows.* FP8 GEMMs need multiples of 16 rows, so rows are padded with zeros, per expert too. GroupedLinear needs its
splits on the host: one synchronisation per call. torch.compile is off in a plan with these modules.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from precision.config import Fp8Format, Granularity, Method, ScalingConfig
from precision.operand import Operand
from precision.rows import GemmRow
from precision.scaling import Slot, absolute_max, record_amax, step_scale

ROW_MULTIPLE = 16
FORWARD_TENSORS, BACKWARD_TENSORS = 3, 2  # per GEMM, in TE's lists: (input, weight, output), (dy, dx)


class TransformerEngineGemm:
    """The TE module that computes one Linear or GroupedLinear of ours. See the module docstring.

    input_slot, weight_slot, grad_slot: the layer's arena rows, None for a BF16 row. weight: BF16(master), after
    `refresh`.
    """

    def __init__(self, row: GemmRow, stacked: bool, slots: tuple[Slot | None, Slot | None, Slot | None]):
        self.input_slot, self.weight_slot, self.grad_slot = slots
        self.weight: Tensor | None = None
        self._shape = (row.groups if stacked else None, row.in_features, row.out_features)
        self._fp8, self._scaling, self._delayed = row.recipe.is_fp8, row.recipe.scaling, row.recipe.delayed
        self._fast = row.recipe.sums_fast
        self._module: Any = None
        self._recipe: Any = None
        self._padding: tuple[Any, Any] | None = None
        self._scales: tuple[Tensor, ...] = ()  # TE reads these for input, weight and gradient; delayed scaling only
        self._bound_to: Tensor | None = None
        self._has_history = False
        self._first = True  # whether the next microbatch quantises the weight

    @torch.no_grad()
    def refresh(self, master: Tensor) -> Tensor:
        """Make the compute weight BF16(master [(G,) N, K]), in place; copy the scales of the step."""
        if self.weight is None or self.weight.device != master.device:
            self.weight = torch.empty_like(master, dtype=torch.bfloat16)
            self._build(master.device)
        self.weight.copy_(master)
        self._first = True
        if self._fp8 and self._delayed:
            self._take_scales()
        if self._fp8 and not self._has_history:
            low, high = torch.aminmax(self.weight.flatten(-2), dim=-1)
            self._note(1, torch.maximum(-low, high).float())
        return self.weight

    def __call__(self, x: Operand | Tensor, master: Tensor, offsets: Tensor | None) -> Tensor:
        """Return y [..., N] BF16 of x [..., K]; offsets [G] int32 of a GroupedLinear. Gradients flow to x and to the
        master."""
        plain = x.tensor if isinstance(x, Operand) else x
        rows = plain.reshape(-1, plain.shape[-1]).to(torch.bfloat16).contiguous()
        if self._fp8 and not self._has_history:
            self._note(0, absolute_max(rows))
        weights = _ComputeWeights.apply(master, self)
        y = self._linear(rows, weights[0]) if offsets is None else self._grouped(rows, weights, offsets)
        if self._fp8 and not self._has_history and y.requires_grad:
            y = _RecordGradientAmax.apply(y, self)
        return y.view(*plain.shape[:-1], y.shape[-1])

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        pad = -x.shape[0] % ROW_MULTIPLE if self._fp8 else 0
        y = self._call({"weight": weight}, F.pad(x, (0, 0, 0, pad)) if pad else x)
        return y[: x.shape[0]] if pad else y

    def _grouped(self, x: Tensor, weights: tuple[Tensor, ...], offsets: Tensor) -> Tensor:
        ends = offsets.tolist()
        splits = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        lent = {f"weight{g}": weight for g, weight in enumerate(weights)}
        if self._padding is None:
            return self._call(lent, x, splits)
        pad, unpad = self._padding
        padded, padded_splits = pad(x, splits)
        return unpad(self._call(lent, padded, padded_splits), splits)

    def _call(self, lent: dict[str, Tensor], x: Tensor, *splits: list[int]) -> Tensor:
        first = self._first if torch.is_grad_enabled() else None
        with _te().autocast(enabled=True, recipe=self._recipe) if self._fp8 else nullcontext():
            y = functional_call(self._module, lent, (x, *splits), {"is_first_microbatch": first})
        if first:
            self._first = False
        return y

    def compute_weights(self) -> tuple[Tensor, ...]:
        """Return the compute weight of each group, sharing its memory."""
        assert self.weight is not None, "compute weights are missing: call precision.refresh_weights(model)"
        return tuple(part.detach() for part in (self.weight.unbind() if self.weight.dim() == 3 else (self.weight,)))

    def record_gradient_amax(self, dy: Tensor) -> None:
        """Record the output gradient's amax, which TE does not report."""
        self._note(2, absolute_max(dy))

    def _note(self, which: int, amax: Tensor) -> None:
        """Record an amax; without a history the scale follows from it."""
        slot = self._slots()[which]
        row_scale, row = slot.rows
        assert slot.format is not None
        amax = amax.view(row.shape)
        record_amax(row, amax)
        scale = step_scale(amax, row_scale, slot.format.max, self._scaling, self._delayed)
        if self._delayed:
            self._scales[which].copy_(scale)

    def _slots(self) -> tuple[Slot, Slot, Slot]:
        assert self.input_slot is not None and self.weight_slot is not None and self.grad_slot is not None
        return self.input_slot, self.weight_slot, self.grad_slot

    def _take_scales(self) -> None:
        """Copy the arena's scales for the next step; a row whose history has become empty keeps its scale."""
        slots = self._slots()
        if self._bound_to is not slots[0].amax:
            self._point_at_arena(slots)
        rows = [slot.rows[0] for slot in slots]
        for ours, row in zip(self._scales, rows, strict=True):
            ours.copy_(torch.where(row > 0, row, ours))
        if not self._has_history:
            self._has_history = bool((torch.cat([row.flatten() for row in rows]) > 0).all())

    def _point_at_arena(self, slots: tuple[Slot, Slot, Slot]) -> None:
        """Make TE's quantizers read our scales and raise the arena's amaxes; experts share those of x and dy."""
        self._scales = tuple(torch.ones_like(slot.rows[0]) for slot in slots)
        forward, backward = (self._module.quantizers[key] for key in ("scaling_fwd", "scaling_bwd"))
        scales, amaxes = ([t.reshape(-1) for t in ts] for ts in (self._scales, (slot.rows[1] for slot in slots)))
        for g in range(self._shape[0] or 1):
            for quantizer, which, row in (
                (forward[FORWARD_TENSORS * g], 0, 0),
                (forward[FORWARD_TENSORS * g + 1], 1, g),
                (backward[BACKWARD_TENSORS * g], 2, 0),
            ):
                quantizer.scale, quantizer.amax = scales[which][row], amaxes[which][row : row + 1]
        self._bound_to, self._has_history = slots[0].amax, False

    def _build(self, device: torch.device) -> None:
        te = _te()
        groups, in_features, out_features = self._shape
        settings = {"bias": False, "params_dtype": torch.bfloat16, "device": "meta"}
        if groups is None:
            self._module = te.Linear(in_features, out_features, **settings)
        else:
            self._module = te.GroupedLinear(groups, in_features, out_features, **settings)
            for g in range(groups):  # no biases, but their empty stand-ins pass through autograd
                setattr(self._module, f"bias{g}", torch.empty(0, dtype=torch.bfloat16, device=device))
        self._bound_to = None
        if self._fp8:
            if groups is not None:
                self._padding = te.Fp8Padding(groups, ROW_MULTIPLE), te.Fp8Unpadding(groups, ROW_MULTIPLE)
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # pyright: ignore

            self._recipe = te_recipe(self._scaling, self._fast)
            # as if it were in TE's list of histories already: ours are in the arena
            self._module.fp8_meta[FP8GlobalStateManager.get_buffer_info()] = []
            with te.autocast(enabled=True, recipe=self._recipe):
                self._module.init_fp8_metadata(num_gemms=groups or 1)


class _ComputeWeights(torch.autograd.Function):
    """master [(G,) N, K] -> its compute weights, one per group; their gradients become one tensor of its dtype."""

    @staticmethod
    def forward(ctx, master: Tensor, gemm: TransformerEngineGemm) -> tuple[Tensor, ...]:
        ctx.shape, ctx.dtype, ctx.device = master.shape, master.dtype, master.device
        return gemm.compute_weights()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        dw = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        torch._foreach_copy_(list(dw.unbind()) if dw.dim() == 3 else [dw], list(grads))  # pyright: ignore
        return dw, None


class _RecordGradientAmax(torch.autograd.Function):
    """Identity on y that records the amax of the gradient before TE's backward pass."""

    @staticmethod
    def forward(ctx, y: Tensor, gemm: TransformerEngineGemm) -> Tensor:
        ctx.gemm = gemm
        return y.view_as(y)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.gemm.record_gradient_amax(grads[0])
        return grads[0], None


def te_recipe(scaling: ScalingConfig, fast: bool = False) -> Any:
    """Return TE's recipe for a scaling that `availability.te_refusal` accepts; fast: how all three GEMMs sum."""
    recipe = _scaling_recipe(scaling)
    if scaling.granularity is not Granularity.block:  # TE always promotes there
        from transformer_engine.common.recipe import MMParams  # pyright: ignore

        for gemm in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):  # TE's modules look for these in any recipe
            setattr(recipe, gemm, MMParams(use_split_accumulator=not fast))
    return recipe


def _scaling_recipe(scaling: ScalingConfig) -> Any:
    from transformer_engine.common import recipe as recipes  # pyright: ignore

    fmt = recipes.Format.HYBRID if scaling.backward is Fp8Format.e5m2 else recipes.Format.E4M3
    if scaling.method is Method.delayed:
        return recipes.DelayedScaling(
            margin=scaling.margin, fp8_format=fmt, amax_history_len=scaling.history, reduce_amax=False
        )
    if scaling.granularity is Granularity.block:
        return recipes.Float8BlockScaling(fp8_format=fmt)
    recipe = recipes.Float8CurrentScaling(fp8_format=fmt)
    for tensor in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, tensor, recipes.QParams(power_2_scale=scaling.power_of_two))
    return recipe


def _te() -> Any:
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    return te
