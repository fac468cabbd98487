"""The plan as text: equal rows of consecutive blocks on one line, and the share of GEMM FLOPs in FP8."""

import re
from collections.abc import Iterable, Mapping

from precision.config import Method, PrecisionConfig
from precision.rows import CoreRow, GemmRow, TensorRow

_BLOCK = re.compile(r"^(layers|mtp)\.(\d+)(\..+)$")


def plan_text(
    config: PrecisionConfig,
    gemms: Mapping[str, GemmRow],
    tensors: Mapping[str, TensorRow],
    cores: Mapping[str, CoreRow],
    notes: Iterable[str],
    fp8_shares: tuple[float, float],
) -> str:
    """Return the whole plan, one line per row. fp8_shares: of the GEMM FLOPs of the model, and of its blocks."""
    scaling = config.scaling
    lines = [f"precision plan: {config.name}"]
    if any(row.recipe.is_fp8 for row in (*gemms.values(), *cores.values())):
        history = f", history {scaling.history}" if scaling.method is Method.delayed else ""
        rounding = ", power-of-two scales" if scaling.power_of_two else ""
        kind = f"{scaling.method.value}, per {scaling.granularity.value}"
        lines.append(f"fp8 scaling: {kind}{history}, margin {scaling.margin}{rounding}")
    lines.append(f"gemm flops in fp8: {fp8_shares[0]:.1%} of the model, {fp8_shares[1]:.1%} of its blocks")
    lines += [f"note: {note}" for note in notes]
    merged = _merge((row.name, _gemm_cells(row)) for row in gemms.values())
    head = ("gemm", "op", "in -> out", "forward", "gradient", "kept", "sums", "result", "backend", "decided by")
    lines += ["", *_columns([head, *merged])]
    others = _merge((row.name, (row.op, row.format.name, row.decided_by)) for row in tensors.values())
    lines += ["", *_columns([("tensor", "op", "format", "decided by"), *others])]
    products = _merge(
        (name, (*product, row.recipe.accumulation.value, row.recipe.backend, row.decided_by))
        for name, row in cores.items()
        if row.recipe.is_fp8
        for product in row.products
    )
    if products:
        heads = ("attention", "product", "left, scale", "right, scale", "pass", "sums", "backend", "decided by")
        lines += ["", *_columns([heads, *products])]
    return "\n".join(lines) + "\n"


def _gemm_cells(row: GemmRow) -> tuple[str, ...]:
    recipe = row.recipe
    shape = f"{row.in_features} -> {row.out_features}" + (f" x {row.groups}" if row.groups > 1 else "")
    formats = recipe.input.name, recipe.grad.name, recipe.saved.name, recipe.accumulation.value, recipe.output.name
    return (row.op, shape, *formats, recipe.backend, row.decided_by)


def _merge(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Merge rows that differ only in a run of block numbers into one: layers.3-60.attn.o. Order: by first
    appearance."""
    runs: dict[tuple[str, ...], list[list[int]]] = {}
    for name, cells in rows:
        match = _BLOCK.match(name)
        if not match:
            runs[(name, "", *cells)] = []
            continue
        spans = runs.setdefault((match[1], match[3], *cells), [])
        number = int(match[2])
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    merged = []
    for (stem, tail, *cells), spans in runs.items():
        numbers = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
        merged.append((f"{stem}.{numbers}{tail}" if spans else stem, *cells))
    return merged


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
