"""The seven products of an attention core in FP8, as its operators compute them.

P and dS exist inside the operators alone. So O, dV, dQ and dK are computed again in float64, from the operands that
entered, with P and dS cast as the plan says; without a cast they would be 2 to 10 % away. Kernels round P under a
running maximum, and their scores have the precision of the tensor cores. So their results may differ from these as two
roundings differ, if they are as far from those without a cast.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from precision import ScalingArena
from precision.attention import visible
from precision.formats import BY_NAME, E4M3, Format, read_back, saturating_cast
from precision.scaling import scale_from_amax
from trainer.offline.audit.findings import NAME_OF, Observations

AGREES = 2.0**-7
"""Relative distance of results; twice the rounding of O to BF16, a third of the rounding of P to E4M3."""
FORWARD, BACKWARD = "fp8_attention", "fp8_attention_backward"


class CoreRecorder:
    """Records the operands and scales of each product, in the words of `CoreRow.products`."""

    def __init__(self, arena: ScalingArena, seen: Observations):
        self._arena, self._seen = arena, seen
        self._rows = {name: i for i, name in enumerate(arena.names)}
        self._names = {arena.amax[i].data_ptr(): name for name, i in self._rows.items()}

    def forward(self, core: str, args: Sequence[Any], out: Tensor) -> None:
        """Record both products of the forward pass. args, out: of the operator."""
        q, k, v = (self._word(f"{core}:{part}", *args[2 * i : 2 * i + 2]) for i, part in enumerate("qkv"))
        z, _ = _scores(args[:6], args[6], args[7])
        p = torch.exp(z - z.amax(-1, keepdim=True))
        v_read, total = _read(*args[4:6]), p.sum(-1, keepdim=True)
        exact = _cast(p, p.new_tensor(256.0), E4M3) @ v_read / total
        self._note(core, "S = q k^T", "forward", q, k)
        self._note(core, "O = P v", "forward", _said("e4m3 256 / max", out, exact, p @ v_read / total), v)

    def backward(self, args: Sequence[Any], found: Sequence[Tensor]) -> None:
        """Record the five products of the backward pass. args, found: of the operator."""
        dout_pair, operands, (mask, out, lse, ds_scale, ds_amax), scale = args[:2], args[2:8], args[8:13], args[14]
        core = self._names[ds_amax.data_ptr()].removesuffix(".scores:grad")
        q, k, v = (self._word(f"{core}:{part}", *operands[2 * i : 2 * i + 2]) for i, part in enumerate("qkv"))
        dout = self._word(f"{core}:grad", *dout_pair)
        z, (q_read, k_read, v_read) = _scores(operands, mask, scale)
        p, dy = torch.exp(z - lse.double()[..., None]), _read(*dout_pair)
        ds = p * (dy @ v_read.mT - (dy * out.double()).sum(-1, keepdim=True))
        fmt, (margin, power_of_two, delayed) = BY_NAME[args[15]], args[16:19]
        known = delayed and bool(ds_scale > 0)
        own = scale_from_amax(ds.abs().amax().float(), fmt.max, margin, power_of_two)
        ds8 = _cast(ds, ds_scale if known else own, fmt)
        made = f"{fmt.name} {'history' if known else 'own amax'}"
        exact = ds8 @ k_read * scale, ds8.mT @ q_read * scale, _cast(p, p.new_tensor(448.0), E4M3).mT @ dy
        uncast = ds @ k_read * scale, ds.mT @ q_read * scale, p.mT @ dy
        says = (made, made, "e4m3 448 / sum")
        dq, dk, dv = (_said(*each) for each in zip(says, found, exact, uncast, strict=True))
        self._note(core, "S = q k^T", "backward", q, k)
        self._note(core, "dP = dO v^T", "backward", dout, v)
        self._note(core, "dV = P^T dO", "backward", dv, dout)
        self._note(core, "dQ = dS k", "backward", dq, k)
        self._note(core, "dK = dS^T q", "backward", dk, q)

    def _note(self, core: str, product: str, in_pass: str, left: str, right: str) -> None:
        self._seen.note(row_of(core, product, in_pass), f"{left} x {right}")

    def _word(self, name: str, data: Tensor, inv: Tensor) -> str:
        """Return format and origin of the scale of an operand."""
        row = self._rows[name]
        if not bool(self._arena.scaled[row]):
            return f"{NAME_OF[data.dtype]} static {1 / float(inv):g}"
        scale = self._arena.scale[row]
        known = self._arena.delayed and bool(scale > 0) and torch.equal(inv, scale.reciprocal())
        return f"{NAME_OF[data.dtype]} {'history' if known else 'own amax'}"


def row_of(core: str, product: str, in_pass: str) -> str:
    """Return the name of a product's row."""
    return f"{core} {product} {in_pass}"


def _said(says: str, ours: Tensor, exact: Tensor, uncast: Tensor) -> str:
    """Return `says` if a result is what that gives. uncast: what it would be without the cast."""
    size = exact.norm().clamp_min(1e-300)
    cast, own, between = ((a.double() - b).norm() for a, b in ((exact, uncast), (ours, uncast), (ours, exact)))
    agrees = (between <= AGREES * size) | ((own - cast).abs() <= 0.25 * cast) & (between <= 2 * cast)
    return says if bool(agrees) else f"not {says}"


def _scores(operands: Sequence[Tensor], mask: Tensor | None, scale: float) -> tuple[Tensor, list[Tensor]]:
    """Return the scores [B, H, S, S], and q, k and v, in float64."""
    q, k, v = (_read(*operands[i : i + 2]) for i in (0, 2, 4))
    return (q @ k.mT * scale).masked_fill(~visible(mask, q.shape[2], q.device), -torch.inf), [q, k, v]


def _read(data: Tensor, inv: Tensor) -> Tensor:
    return read_back(data, inv).double()


def _cast(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    return _read(saturating_cast(x, scale.float(), fmt), scale.float().reciprocal())
