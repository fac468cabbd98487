"""What all tests share: one thread each, since several processes run tests at once; the same examples in every run.

Without a GPU, Triton's kernels run in its interpreter. It must be told before Triton is imported, by whatever test is
collected first.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; programs that tests start inherit it

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("octet", deadline=None, derandomize=True)
settings.load_profile("octet")
