"""GEMMs as they reach a backend, or a kernel inside an operator that is a whole feed-forward layer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from precision import ScalingArena, fused, gemm_layers, head
from precision.backends import Backend, GradOperand, WeightOperand, get_backend, replaced
from precision.config import Granularity
from precision.linear import GroupedLinear, Linear
from precision.plan import SWIGLU
from precision.rows import GemmRecipe
from precision.scaling import Slot
from trainer.offline.audit.accumulation import check_sums
from trainer.offline.audit.findings import Observations

EXPERTS = ".moe.experts"  # the modules inside which tokens become rows, and rows are summed by token
REFERENCE, CUDA = "reference", "cuda"


class GemmRecorder:
    """Records what reaches the GEMMs of a model. `latest`: the last layer seen.

    A weight gradient comes without its weight. It belongs to the layer of the input gradient before it, by the order of
    the backward pass; inside a feed-forward layer, where both follow the input gradients, to the linear of its shape.
    """

    def __init__(self, model: nn.Module, arena: ScalingArena, seen: Observations):
        names = {layer: name for name, layer in model.named_modules() if isinstance(layer, Linear | GroupedLinear)}
        self._by_address = {}
        for layer in gemm_layers(model):
            if layer.operand is not None:
                for copy in (layer.operand.data, layer.operand.data_t):
                    if copy is not None:
                        self._by_address[copy.data_ptr()] = names[layer], layer
        self._rows = {name: i for i, name in enumerate(arena.names)}
        self._arena, self.seen, self.latest = arena, seen, ""

    def product(self, x: Tensor, x_inv: Tensor | None, w: Tensor, y: Tensor, is_forward: bool) -> None:
        """Record a forward product or an input gradient: left operand, its scales, the weight as read, the result."""
        self.latest, layer = self._by_address[w.data_ptr()]
        self._note("input" if is_forward else "grad", x.dtype)
        if is_forward:
            self._note("weight", w.dtype)
            self._note("output", y.dtype)
        self._note_scales(x_inv, layer, layer.input_slot if is_forward else layer.grad_slot)

    def weight_gradient(self, dy: Tensor, x: Tensor, dw: Tensor | None = None) -> None:
        """Record its two operands, in either order in memory. dw: the result, inside a feed-forward layer."""
        if dw is not None:
            parent = self.latest.rpartition(".")[0]
            layers = {name: layer for name, layer in self._by_address.values() if name.rpartition(".")[0] == parent}
            self.latest = next(name for name, layer in layers.items() if layer.weight.shape == dw.shape)
        self._note("grad", dy.dtype)
        self._note("saved", x.dtype)

    def sums(
        self, recipe: GemmRecipe, y: Tensor, a: Tensor, a_inv: Tensor | None, w: Tensor, w_inv: Tensor | None,
        offsets: Tensor | None,
    ) -> None:  # fmt: skip
        """Record which sums the latest product's rows agree with, see `check_sums`: of both, those that are planned."""
        fast = recipe.sums_fast and recipe.scaling.granularity is not Granularity.block
        with _disable_current_modes():  # its operations are none of the model's
            agree = check_sums(y, a, a_inv, w, w_inv, offsets, fast)
        self._note("sums", "fast" if agree == fast else "fp32")

    def rows_of_tokens(self, rows: Tensor) -> None:
        """Record tokens on their way to the experts of the latest layer."""
        self.seen.note(f"{self._experts}.dispatch", rows.dtype)

    def sum_of_rows(self, rows: Tensor, position: Tensor, add: Tensor | None, total: Tensor) -> None:
        """Record the weighted sum over a token's experts. In FP32 it is rounded once: half a unit of the last place of
        BF16, plus FP32's own rounding of the terms."""
        self.seen.note(f"{self._experts}.combine", rows.dtype)
        terms = rows.double()[position.long().clamp_min(0)] * (position >= 0)[..., None]
        if add is not None:
            terms = torch.cat([terms, add.double()[:, None]], 1)
        exact = terms.sum(1)
        error, allowed = (total.double() - exact).abs(), 2.0**-8 * exact.abs() + 2.0**-20 * terms.abs().sum(1) + 1e-30
        fp32 = total.dtype == torch.float32 or bool((error <= allowed).all())
        self.seen.note(f"{self._experts}.accumulate", torch.float32 if fp32 else rows.dtype)

    def saved_by_swiglu(self, saved: Tensor) -> None:
        """Record gate and up as saved in FP8. (Where a layer computes in BF16 they are saved as they are.)"""
        self.seen.note(SWIGLU, saved.dtype)

    @property
    def _experts(self) -> str:
        return self.latest.rpartition(".")[0].removesuffix(EXPERTS) + ".moe"

    def _note(self, part: str, what: str | torch.dtype) -> None:
        self.seen.note(f"{self.latest}/{part}", what)

    def _note_scales(self, inv: Tensor | None, layer: Linear | GroupedLinear, slot: Slot | None) -> None:
        """Record the granularity of the left operand's scales, from these and its weight's."""
        w_inv = None if layer.operand is None else layer.operand.scale_inv
        if inv is None or not inv.numel() or w_inv is None or slot is None:
            words = "none"
        elif inv.dim() == 0:
            row = self._rows[slot.names[0]]
            history = self._arena.history[row].max() if self._arena.delayed else torch.zeros((), device=inv.device)
            scale = self._arena.limit[row] / history  # in force since the last commit
            known = not slot.scales_itself and bool(history > 0)
            known = known and torch.isclose(inv * scale, torch.ones_like(inv), rtol=1e-6)
            words = "tensor, from history" if known else "tensor, from itself"
        else:
            words = "row" if w_inv.shape[-1] == 1 and w_inv.shape[-2] >= 16 else "block"
        self._note("scales", words)


@contextmanager
def recorded(recorder: GemmRecorder, backends: list[str]) -> Iterator[None]:
    """Let the recorder see the GEMMs of these backends of ours inside."""
    with ExitStack() as stack:
        for name in backends:
            stack.enter_context(replaced(name, _recording(get_backend(name), recorder)))
        stack.enter_context(_intercept(head, "_add_wgrad", _after_head(recorder)))
        stack.enter_context(_intercept(fused, "swiglu_to_fp8", lambda result, x: recorder.saved_by_swiglu(result[0])))
        if CUDA in backends:
            from precision.kernels import ffn_ops

            for name, after in _inside_layers(recorder).items():
                stack.enter_context(_intercept(ffn_ops, name, after))
        yield


def _recording(backend: Backend, recorder: GemmRecorder) -> Backend:
    """Wrap a backend for the recorder. The reference's rows are multiplied again in float64."""
    base: Any = type(backend)
    exactly = backend.name == REFERENCE

    class Recording(base):
        def forward(
            self, x: Tensor, x_inv: Tensor | None, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe
        ) -> Tensor:
            y = super().forward(x, x_inv, weight, offsets, recipe)
            recorder.product(x, x_inv, weight.data, y, True)
            if exactly:
                inv = None if weight.scale_inv is None else _wide(weight.scale_inv).mT
                recorder.sums(recipe, y, x, x_inv, weight.data.mT, inv, offsets)
            return y

        def dgrad(self, dy: GradOperand, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe) -> Tensor:
            dx = super().dgrad(dy, weight, offsets, recipe)
            recorder.product(dy.data, dy.scale_inv, weight.data, dx, False)
            if exactly:
                own = weight.data_t is None
                w, inv = (weight.data, weight.scale_inv) if own else (weight.data_t, weight.copy_scale_inv)
                assert w is not None
                recorder.sums(recipe, dx, dy.data, dy.scale_inv, w, None if inv is None else _wide(inv), offsets)
            return dx

        def wgrad(
            self, dy: GradOperand, x: Tensor, x_inv: Tensor | None, offsets: Tensor | None, recipe: GemmRecipe,
            out: torch.dtype,
        ) -> Tensor:  # fmt: skip
            recorder.weight_gradient(dy.data, x)
            return super().wgrad(dy, x, x_inv, offsets, recipe, out)

    return Recording()


def _after_head(recorder: GemmRecorder) -> Callable[..., None]:
    """Return a recorder of the head's weight gradient, which skips its backend if cuBLAS accumulates in place."""

    def add_wgrad(result: Tensor, dw: Tensor | None, dz: GradOperand, x: Tensor, *rest: Any) -> None:
        recorder.weight_gradient(dz.data, x)

    return add_wgrad


def _inside_layers(recorder: GemmRecorder) -> dict[str, Callable[..., None]]:
    """Return what to record after each function through which `kernels.ffn_ops` calls its kernels."""

    def product(y: Tensor, a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor, casts: Any, to: Any, *rest: Any) -> None:
        mode, (name, layer) = casts.mode, recorder._by_address[w.data_ptr()]
        is_forward = w.shape == layer.weight.shape and (mode == 0 or w.data_ptr() == _data(layer).data_ptr())
        if mode == 0 and w.shape[-1] == w.shape[-2]:
            is_forward = w.is_contiguous()
        recorder.product(a, a_inv if mode else None, w, y, is_forward)
        if to is not None and is_forward and name.endswith("gate_up"):
            recorder.rows_of_tokens(a)

    def in_order(copy: Tensor, w: Tensor) -> None:
        recorder._by_address[copy.data_ptr()] = recorder._by_address[w.data_ptr()]

    def weight_gradient(dw: Tensor, a: Tensor, a_inv: Tensor, b: Tensor, *rest: Any) -> None:
        recorder.weight_gradient(a, b, dw)

    def weight_gradient_bf16(dw: Tensor, a: Tensor, b: Tensor, *rest: Any) -> None:
        recorder.weight_gradient(a, b, dw)

    def combine(result: tuple[Tensor, Tensor | None], rows: Tensor, to: Any, *rest: Any, **more: Any) -> None:
        add = more.get("add", rest[0] if rest else None)
        recorder.sum_of_rows(rows, to.position, add, result[0])

    def swiglu(result: tuple[Tensor, Tensor, Tensor, Tensor], *rest: Any) -> None:
        if result[3].numel():
            recorder.saved_by_swiglu(result[2])

    products = {"_in_order": in_order, "_nt": product, "_wgrad": weight_gradient, "_wgrad_bf16": weight_gradient_bf16}
    return products | {"combine": combine, "swiglu": swiglu}


def _data(layer: Linear | GroupedLinear) -> Tensor:
    assert layer.operand is not None
    return layer.operand.data


@contextmanager
def _intercept(module: Any, name: str, after: Callable[..., None]) -> Iterator[None]:
    """Call `after` with result and arguments of a module's function inside. Raises AttributeError if it is missing."""
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, function)


def _wide(inv: Tensor) -> Tensor:
    """Return inverse scales of a weight as a matrix (or a stack of them): [] -> [1, 1], [G] -> [G, 1, 1]."""
    return inv.view(*inv.shape, 1, 1) if inv.dim() < 2 else inv
