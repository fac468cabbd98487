"""Compile-time constants of the kernels: the kinds of scales (see `common`), and the capability they run on.

Kernels access these through this module, `const.ROW`. At each launch Triton compares a global that a kernel names
directly with its value at compile time, which takes as long as finding the compiled kernel.
"""

import os

import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = tl.constexpr(not INTERPRETED)

PLAIN = tl.constexpr(0)  # no scales: BF16
TENSOR = tl.constexpr(1)
ROW = tl.constexpr(2)
BLOCK = tl.constexpr(3)
