"""How blocks are run (recomputed, compiled: applied in one order by `parallelize`), and how microbatches are."""

from trainer.parallel.blocks import parallelize
from trainer.parallel.microbatch import Eager, Graphed, Microbatch

__all__ = ["Eager", "Graphed", "Microbatch", "parallelize"]
