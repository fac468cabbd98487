"""How blocks are run: recomputation and compilation, applied in one order by `parallelize`."""

from trainer.parallel.blocks import parallelize

__all__ = ["parallelize"]
