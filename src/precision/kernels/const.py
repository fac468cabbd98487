"""What the kernels know at compile time: the kinds of scales (see `common`), and where they run.

Kernels name these by way of this module, `const.ROW`: one that a kernel names directly is compared, at each launch,
with what it was when Triton compiled the kernel. That takes as long as finding the compiled kernel does.
"""

import os

import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = tl.constexpr(not INTERPRETED)

PLAIN = tl.constexpr(0)  # no scales: BF16
TENSOR = tl.constexpr(1)
ROW = tl.constexpr(2)
BLOCK = tl.constexpr(3)
