"""Numbers, layouts and tables as reports print them."""

from collections.abc import Collection, Sequence

from trainer.parallel.mesh import Degrees


def short(number: float) -> str:
    """671026419200 -> '671.03 G'."""
    for power, letter in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Format a time span in one unit: `11.6 days`."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    text = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
    return f"{text} second{'s' * (text != '1')}"


def ranks(d: Degrees) -> str:
    """Return `one process`, or `each of 8 ranks (replicate 1, shard 8, expert 1)`."""
    if d.world == 1:
        return "one process"
    axes = f"replicate {d.replicate}, shard {d.shard}, expert {d.expert}"
    others = {"context": d.context, "tensor": d.tensor, "pipeline": d.pipeline}
    more = "".join(f", {axis} {n}" for axis, n in others.items() if n > 1)
    return f"each of {d.world} ranks ({axes}{more})"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines of columns: those of `left` aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]
