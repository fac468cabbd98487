"""The self-test: every Triton kernel against a reference in plain PyTorch, on small and awkward shapes, on this GPU.

Versions of Triton have compiled correct programs into wrong ones (`kernels.common.settled`, `kernels.weights`). So the
kernels are trusted on a combination of GPU, torch and Triton only after they have passed there once. `precision.proof`
runs this package as a program, caches its report, and refuses the kernels that failed.

    checks.py     which kernels are checked by what, and which op does without them if the check fails
    operands.py   checks of casts, weights, norms and SwiGLU: bits where rounding is defined, else bounds of the formats
    products.py   checks of routing and of the GEMMs
    muon.py       checks of Muon's kernels
    others.py     checks of the rest: choice of experts, attention, loss, optimizer, statistics
    twins.py      references that are defined nowhere else, and the two comparisons
"""
