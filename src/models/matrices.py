"""Logical matrices: the independent linear maps within stored weights.

A weight that one GEMM reads may hold several maps that share nothing but that GEMM: gate and up of a feed-forward
layer, the heads of attention, the experts of a stack. An optimizer that works on whole matrices (Muon) must treat each
map separately. Together they would share one spectrum and take their scale from the wrong shape.

    weight                     stored            logical matrices
    attn.q, attn.q_b           [H (N + R), .]    one a head [N + R, .]
    attn.kv_b                  [H (N + V), C]    a head's k_nope [N, C] and v [V, C]
    attn.kv_a                  [C + R, D]        latent [C, D], rotary key [R, D]
    gate_up (FFN, experts)     [2F, D]           gate [F, D], up [F, D]; of each expert
    mtp.proj                   [D, 2D]           one an input [D, D]
    attn.q_a, attn.o, down,    whole; down of each expert
    router

GLM-5 (arXiv 2602.15763, table 1) measures the heads, DeepSeek-V4 (arXiv 2606.19348) orthogonalises "each logically
independent weight"; no source measures kv_a and mtp.proj, which follow the rule.

Legend: H heads, N nope, R rope, V value width of a head, C key-value latent, D hidden, F intermediate, E experts.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from models.config import ModelConfig
from precision.rows import GemmRow


class Box(NamedTuple):
    """A matrix within its group: first row, first column, and its shape."""

    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Division:
    """How a weight [..., R, K] divides: into equal groups of rows, each with matrices of `rows` rows, and into
    `columns` equal parts of K."""

    rows: tuple[int, ...]
    columns: int = 1

    @property
    def period(self) -> int:
        """Rows per group."""
        return sum(self.rows)

    def boxes(self, width: int) -> list[Box]:
        """Return the matrices of a group of a weight with `width` columns."""
        starts, each = accumulate(self.rows, initial=0), width // self.columns
        return [
            Box(row, i * each, rows, each)
            for row, rows in zip(starts, self.rows, strict=False)
            for i in range(self.columns)
        ]

    def shapes(self, weight: tuple[int, int]) -> list[tuple[int, int, int]]:
        """Return count, rows and columns of the matrices of a weight [R, K]."""
        count = weight[0] // self.period * self.columns
        return [(count, rows, weight[1] // self.columns) for rows in self.rows]


def division(c: ModelConfig, row: GemmRow) -> Division:
    """Return the division of the weight of a plan's row. ValueError for an op that no rule names."""
    match row.op:
        case "attn.q" | "attn.q_b":
            return Division((c.qk_head_dim,))
        case "attn.kv_b":
            return Division((c.qk_nope_head_dim, c.v_head_dim))
        case "attn.kv_a":
            return Division((c.kv_lora_rank, c.qk_rope_head_dim))
        case "mtp.proj":
            return Division((row.out_features,), columns=2)
        case "attn.q_a" | "attn.o" | "moe.router":
            return Division((row.out_features,))
        case "ffn" | "moe.shared" | "moe.experts":
            parts = 2 if row.name.endswith(".gate_up") else 1
            return Division((row.out_features // parts,) * parts)
    raise ValueError(f"{row.name}: no rule lists the logical matrices in the weight of {row.op!r}")
