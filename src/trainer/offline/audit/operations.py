"""Operations other than GEMMs, as PyTorch dispatches them inside the module of that name."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models import DeepSeek
from precision import ScalingArena
from precision.backends.products import truncated_matmul
from precision.formats import fp8_values, read_back
from trainer.offline.audit.core import BACKWARD, FORWARD, CoreRecorder
from trainer.offline.audit.findings import Observations
from trainer.offline.audit.gemms import CUDA, EXPERTS, GemmRecorder

SCORES, SOFTMAX, STATISTICS = " scores", " softmax", " statistics"
"""Observed beside the plan's rows: all of it is FP32 in every recipe."""
ATTENTION = "_scaled_dot_product", "document_attention"
FUSED = {
    "_scaled_dot_product_cudnn_attention": 1.0,
    "_scaled_dot_product_efficient_attention": 1.0,
    "_scaled_dot_product_flash_attention_for_cpu": 1.0,
    "document_attention": 1 / math.log(2),
}
"""Attention operators whose second result is the log-sum-exp of each row's scores, and its unit."""


class Operations(TorchDispatchMode):
    """Records the operations dispatched inside modules, by module name."""

    def __init__(self, model: DeepSeek, gemms: GemmRecorder, arena: ScalingArena, seen: Observations):
        super().__init__()
        self._gemms, self._seen, self._inside = gemms, seen, [""]
        self._core = CoreRecorder(arena, seen)
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

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inside, op = self._inside[-1], func.overloadpacket.__name__
        if op in ("rsqrt", "rsqrt_"):
            self._seen.note(inside, out.dtype)
        elif op == "rms_norm":
            self._note_norm(inside, args[0], args[2], out[3])
        elif op == "norm_and_rotate_heads":
            q, kv, k_rope = args[:3]
            k_nope = kv[..., : q.shape[-1] - k_rope.shape[-1]]
            k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, q.shape[2], -1)], -1)
            for which, x, rstd in (("q", q, out[2]), ("k", k, out[3])):
                self._note_norm(f"{inside}.{which}_head_norm", x, args[4], rstd.flatten())
        elif op.startswith(ATTENTION) and "backward" not in op:
            self._seen.note(f"{inside}.core", args[0].dtype)
            if op in FUSED:
                self._note_softmax(f"{inside}.core", args, kwargs or {}, out[1], FUSED[op], op)
        elif op == FORWARD:
            self._seen.note(inside, args[0].dtype)
            self._core.forward(inside, args, out[0])
            q, k = (read_back(data, inv) for data, inv in (args[0:2], args[2:4]))
            slack = _tensor_core_error(*args[:4]) * args[7] if args[8] == CUDA else 0.0
            self._note_softmax(inside, (q, k), {"scale": args[7]}, out[1], 1.0, op, slack)
        elif op == BACKWARD:
            self._core.backward(args, out)
        elif inside.endswith(".moe.gate") and op in ("sigmoid", "_softmax"):
            self._seen.note(inside + SCORES, out.dtype)
        elif inside.endswith(EXPERTS) and op == "index_select" and args[0].shape[1:] == self._width:  # not the scales
            back = self._gemms.latest == f"{inside}.down"
            self._seen.note(f"{inside.removesuffix(EXPERTS)}.moe.{'combine' if back else 'dispatch'}", args[0].dtype)
        elif inside.endswith(EXPERTS) and op in ("add_", "add") and out.dim() == 2:
            self._seen.note(f"{inside.removesuffix(EXPERTS)}.moe.accumulate", out.dtype)
        return out

    def _note_norm(self, inside: str, x: Tensor, eps: float, rstd: Tensor) -> None:
        """Compare the statistic that a fused norm returns with float64. The rest stays in registers."""
        exact = (x.double().square().mean(-1) + eps).rsqrt().flatten()
        self._seen.note(inside, rstd.dtype)
        self._seen.note_error(inside + STATISTICS, rstd, exact)

    def _note_softmax(
        self, row: str, args: Any, kwargs: dict, lse: Tensor, unit: float, op: str, slack: float = 0.0
    ) -> None:
        """Compare the log-sum-exp of the last query of a head with float64, over the scores that it attends to. slack:
        error of the scores."""
        q, k = args[0], args[1]
        scale = args[4] if op == "document_attention" else kwargs["scale"]
        first = int(args[3][0, 0, -1]) if op == "document_attention" else 0
        scores = (k[0, 0, first:].double() @ q[0, 0, -1].double()) * scale
        ours, exact = lse[0, 0, q.shape[2] - 1].flatten() / unit, scores.logsumexp(0)[None]
        one = torch.ones_like(exact)  # the sum that an error is relative to if its logarithm is near 0
        self._seen.note_error(row + SOFTMAX, torch.cat([ours.to(one.dtype), one]), torch.cat([exact, one]), slack)


def _tensor_core_error(q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor) -> float:
    """Return the largest error of the scores of the last query of a head, as FP8 tensor cores sum them over its
    features; a log-sum-exp then errs by as much or less."""
    query, keys = fp8_values(q8[0, 0, -1:]), fp8_values(k8[0, 0])
    exact = query.double() @ keys.double().T
    return float((truncated_matmul(query, keys.T) - exact).abs().max() * q_inv * k_inv)
