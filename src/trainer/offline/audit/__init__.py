"""The audit: run real steps, write down what happened at each row of the precision plan, compare.

Nothing here asks the plan what it meant to do. What is observed:

    gemms.py          every GEMM, where its operands enter a backend or, in layers that are one operator, a kernel:
                      dtypes of operands and result, shapes and values of the scales, and which layer it was (by the
                      address of its weight)
    accumulation.py   how each of these GEMMs adds up: on a GPU by coherent operands that the very kernel multiplies,
                      elsewhere by a sample of rows that is multiplied again in float64
    operations.py     everything else below autograd, as PyTorch dispatches it inside the module of that name: the
                      statistics of a norm, the attention kernel and its softmax, scores, tokens to the experts and back
    steps.py          the steps, and parameters, gradients, moments and the optimizer's arithmetic after them
"""

from trainer.offline.audit.findings import Finding
from trainer.offline.audit.steps import Audit, audit

__all__ = ["Audit", "Finding", "audit"]
