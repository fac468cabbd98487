"""The audit: run real steps, record what happens at each row of the precision plan, compare.

It does not ask the plan for its intentions. It observes:

    gemms.py          every GEMM, where its operands enter a backend or, in layers that are one operator, a kernel:
                      dtypes of operands and result, shapes and values of the scales, and the layer (by the address of
                      its weight)
    accumulation.py   how each of these GEMMs adds up: on a GPU by coherent operands that the same kernel multiplies,
                      elsewhere by a sample of rows that is multiplied again in float64
    core.py           the products of attention in FP8, multiplied again in float64
    operations.py     everything else below autograd, as PyTorch dispatches it inside the module of that name: the
                      statistics of a norm, the attention kernel and its softmax, scores, tokens to the experts and back
    steps.py          the steps, and parameters, gradients, moments and the optimizer's arithmetic after them
"""

from trainer.offline.audit.findings import Finding
from trainer.offline.audit.steps import Audit, audit
