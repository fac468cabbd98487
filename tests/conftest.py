"""What all tests share: one thread each, since several processes run tests at once; the same examples in every run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; programs that tests start inherit it

from hypothesis import settings

settings.register_profile("octet", deadline=None, derandomize=True)
settings.load_profile("octet")
