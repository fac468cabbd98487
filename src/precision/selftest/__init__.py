"""The self-test: every Triton kernel against a twin in plain PyTorch, on small and awkward shapes, on this GPU.

Versions of Triton have compiled right programs into wrong ones (`kernels.common.settled`, `kernels.weights`). So the
kernels are not trusted on a combination of GPU, torch and Triton until they have been right on it once:
`precision.proof` runs this package as a program, keeps what it reports, and refuses what was wrong.

    checks.py     which kernels are checked by what, and which op does without them if the check fails
    operands.py   checks of casts, weights, norms and SwiGLU: bits where rounding is defined, else bounds of the formats
    products.py   checks of routing and of the GEMMs
    muon.py       checks of Muon's kernels
    others.py     checks of what is no GEMM: choice of experts, attention, loss, optimizer, statistics
    twins.py      twins that stand nowhere else, and the two ways to compare
"""
