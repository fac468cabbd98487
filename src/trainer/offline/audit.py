"""The audit: run real steps, write down what happened at each row of the precision plan, compare.

Nothing here asks the plan what it meant to do. What is observed:

- every GEMM, at the backend's door: the dtypes of operands and result, the shapes and values of the scales, and which
  layer it was (by the address of its weight). A sample of rows is multiplied again in float64: FP32 accumulation
  passes, BF16 would not;
- everything else below autograd, as PyTorch dispatches it inside the module of that name: the `rsqrt` of a norm, the
  attention kernel, the permutation to the experts, the sum over a token's experts;
- parameters, gradients and moments, after the step.

Two steps are run, so that delayed scales come from a history; the second one is recorded.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import DeepSeek
from precision import GemmRow, Plan, ScalingArena, begin_step, gemm_layers
from precision.backends import GradOperand, WeightOperand, replaced
from precision.backends.reference import BLOCK, ReferenceBackend
from precision.formats import BY_NAME
from precision.linear import GroupedLinear, Linear
from precision.rows import GemmRecipe
from precision.scaling import Slot
from trainer.optim.adamw import Optimizer

NAME_OF = {fmt.dtype: fmt.name for fmt in BY_NAME.values()} | {torch.uint8: "e4m3"}  # FP8 rows are gathered as bytes
EXPERTS = ".moe.experts"  # the modules inside which tokens become rows and rows a token's sum
SAMPLE = 8  # rows of each product that are checked in float64
GEMM_PARTS = ("input", "weight", "grad", "saved", "output", "scales", "sums")


@dataclass(frozen=True)
class Finding:
    """One row of the plan: what it says and what was seen, in the same words."""

    name: str
    planned: str
    seen: str

    @property
    def agrees(self) -> bool:
        """Whether the plan is what happened."""
        return self.planned == self.seen


class Seen:
    """What was seen, by row (and part of a row)."""

    def __init__(self) -> None:
        self._words: dict[str, set[str]] = defaultdict(set)

    def note(self, row: str, what: str | torch.dtype) -> None:
        """Add an observation."""
        self._words[row].add(NAME_OF.get(what, str(what)) if isinstance(what, torch.dtype) else what)

    def at(self, row: str) -> str:
        """All that was seen at a row."""
        return "+".join(sorted(self._words[row])) or "nothing"


class _Gemms(ReferenceBackend):
    """Stands in for the backend and records each GEMM that passes."""

    def __init__(self, model: nn.Module, arena: ScalingArena, seen: Seen):
        names = {layer: name for name, layer in model.named_modules() if isinstance(layer, Linear | GroupedLinear)}
        self._by_address = {
            layer.operand.data.data_ptr(): (names[layer], layer)
            for layer in gemm_layers(model)
            if layer.operand is not None
        }
        self._rows = {name: i for i, name in enumerate(arena.names)}
        self._arena, self._seen, self.latest = arena, seen, ""

    def forward(
        self, x: Tensor, x_inv: Tensor | None, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe
    ) -> Tensor:
        y = super().forward(x, x_inv, weight, offsets, recipe)
        self.latest, layer = self._by_address[weight.data.data_ptr()]
        for part, tensor in (("input", x), ("weight", weight.data), ("output", y)):
            self._seen.note(f"{self.latest}/{part}", tensor.dtype)
        self._note_scales(x_inv, weight.scale_inv, layer.input_slot)
        self._note_sums(
            y, x, x_inv, weight.data.mT, None if weight.scale_inv is None else _wide(weight.scale_inv).mT, offsets
        )
        return y

    def dgrad(self, dy: GradOperand, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe) -> Tensor:
        dx = super().dgrad(dy, weight, offsets, recipe)
        self.latest, layer = self._by_address[weight.data.data_ptr()]
        self._seen.note(f"{self.latest}/grad", dy.data.dtype)
        self._note_scales(dy.scale_inv, weight.scale_inv, layer.grad_slot)
        w, w_inv = (weight.data, weight.scale_inv) if weight.data_t is None else (weight.data_t, weight.copy_scale_inv)
        self._note_sums(dx, dy.data, dy.scale_inv, w, None if w_inv is None else _wide(w_inv), offsets)
        return dx

    def wgrad(
        self,
        dy: GradOperand,
        x: Tensor,
        x_inv: Tensor | None,
        offsets: Tensor | None,
        recipe: GemmRecipe,
        out: torch.dtype,
    ) -> Tensor:
        self._seen.note(f"{self.latest}/grad", dy.data.dtype)
        self._seen.note(f"{self.latest}/saved", x.dtype)
        return super().wgrad(dy, x, x_inv, offsets, recipe, out)

    def _note_scales(self, inv: Tensor | None, w_inv: Tensor | None, slot: Slot | None) -> None:
        """How the left operand is scaled, told from its scales and its weight's."""
        if inv is None or w_inv is None or slot is None:
            words = "none"
        elif inv.dim() == 0:
            row = self._rows[slot.names[0]]
            history = self._arena.history[row].max() if self._arena.delayed else torch.zeros(())
            scale = self._arena.limit[row] / history  # in force since the last commit
            known = bool(history > 0) and torch.isclose(inv * scale, torch.ones(()), rtol=1e-6)
            words = "tensor, from history" if known else "tensor, from itself"
        else:
            words = "row" if w_inv.shape[-1] == 1 and w_inv.shape[-2] >= 16 else "block"
        self._seen.note(f"{self.latest}/scales", words)

    def _note_sums(
        self, y: Tensor, a: Tensor, a_inv: Tensor | None, w: Tensor, w_inv: Tensor | None, offsets: Tensor | None
    ) -> None:
        """Multiply some rows again in float64; a [R, K], w [(G,) K, N] as they enter the product."""
        for r in range(0, a.shape[0], max(1, a.shape[0] // SAMPLE)):
            group = 0 if offsets is None else int(torch.searchsorted(offsets, offsets.new_tensor(r), right=True))
            matrix = _exact(
                w if offsets is None else w[group], w_inv if w_inv is None or w_inv.dim() < 3 else w_inv[group]
            )
            row = _exact(a[r], a_inv if a_inv is None or a_inv.dim() == 0 else a_inv[r])
            want, size = row @ matrix, row.abs() @ matrix.abs()
            rounding = 2.0**-7 if y.dtype == torch.bfloat16 else 0.0  # of the result, twice where a scale multiplies it
            enough = ((y[r].double() - want).abs() <= rounding * want.abs() + 2e-6 * size + 1e-30).all()
            self._seen.note(f"{self.latest}/sums", "fp32" if enough else "less than fp32")


def _wide(inv: Tensor) -> Tensor:
    """Inverse scales of a weight as a matrix (a stack of them): [] -> [1, 1], [G] -> [G, 1, 1]."""
    return inv.view(*inv.shape, 1, 1) if inv.dim() < 2 else inv


def _exact(data: Tensor, inv: Tensor | None) -> Tensor:
    """The numbers that data stands for, in float64; block scales are spread over their blocks."""
    values = data.double()
    if inv is None:
        return values
    for dim in range(-inv.dim(), 0):
        if inv.shape[dim] not in (1, values.shape[dim]):
            inv = inv.repeat_interleave(BLOCK, dim).narrow(dim, 0, values.shape[dim])
    return values * inv.double()


class _Operations(TorchDispatchMode):
    """Records what is dispatched inside modules, by module name."""

    def __init__(self, model: DeepSeek, gemms: _Gemms, seen: Seen):
        super().__init__()
        self._gemms, self._seen, self._inside = gemms, seen, [""]
        self._hooks = []
        self._width = model.embed.weight.shape[1:]
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda _m, _a, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda _m, _a, _out: self._leave()))
        self._hooks.append(model.embed.register_forward_hook(lambda _m, _a, out: seen.note("embed", out.dtype)))
        for _, block in model.iter_blocks():
            self._hooks.append(block.register_forward_hook(lambda _m, _a, out: seen.note("residual", out[0].dtype)))

    def _leave(self) -> None:
        self._inside.pop()

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inside, op = self._inside[-1], func.overloadpacket.__name__
        if op in ("rsqrt", "rsqrt_"):
            self._seen.note(inside, out.dtype)
        elif op.startswith(("_scaled_dot_product", "document_attention")) and "backward" not in op:
            self._seen.note(f"{inside}.core", args[0].dtype)
        elif inside.endswith(EXPERTS) and op == "index_select" and args[0].shape[1:] == self._width:  # not the scales
            back = self._gemms.latest == f"{inside}.down"
            self._seen.note(f"{inside.removesuffix(EXPERTS)}.moe.{'combine' if back else 'dispatch'}", args[0].dtype)
        elif inside.endswith(EXPERTS) and op in ("add_", "add") and out.dim() == 2:
            self._seen.note(f"{inside.removesuffix(EXPERTS)}.moe.accumulate", out.dtype)
        return out


def audit(
    model: DeepSeek, plan: Plan, arena: ScalingArena, optimizer: Optimizer, batches: list[Tensor]
) -> list[Finding]:
    """Train on each of `batches` [B, S+1]; every row of the plan beside what was seen at it in the last step."""
    seen = Seen()
    for tokens in batches:
        begin_step(model, arena)
        seen = Seen()
        gemms = _Gemms(model, arena, seen)
        operations = _Operations(model, gemms, seen)
        with replaced("reference", gemms), operations:
            model(tokens).total.backward()
        operations.remove_hooks()
        for parameter in model.parameters():
            seen.note("optim.master", parameter.dtype)
            for row in ("grad.accumulate", "grad.reduce"):  # one process: nothing to reduce, the sum is the gradient
                seen.note(row, parameter.grad.dtype if parameter.grad is not None else "no gradient")
        optimizer.step(arena.finite(), torch.zeros(()))
        for state in optimizer.state_dict().values():
            seen.note("optim.moments", state["exp_avg"].dtype)
            seen.note("optim.moments", state["exp_avg_sq"].dtype)
        arena.commit(arena.finite())
        optimizer.zero_grad()
    found = [Finding(name, _planned(row), _seen_at(seen, name)) for name, row in plan.gemms.items()]
    return found + [Finding(name, row.format.name, seen.at(name)) for name, row in plan.tensors.items()]


def _planned(row: GemmRow) -> str:
    """A GEMM's row of the plan in the words of the audit."""
    recipe, scales = row.recipe, "none"
    if recipe.is_fp8:
        scales = recipe.scaling.granularity.value
        scales += (", from history" if recipe.delayed else ", from itself") if scales == "tensor" else ""
    parts = recipe.input, recipe.input, recipe.grad, recipe.saved, recipe.output, scales, "fp32"
    return "  ".join(f"{part} {value}" for part, value in zip(GEMM_PARTS, parts, strict=True))


def _seen_at(seen: Seen, name: str) -> str:
    return "  ".join(f"{part} {seen.at(f'{name}/{part}')}" for part in GEMM_PARTS)
