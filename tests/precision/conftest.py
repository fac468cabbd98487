"""What a version of torch cannot compute on a CPU skips a test of the kernels in the interpreter."""

from collections.abc import Iterator

import pytest

NO_ROW_SCALES = "_scaled_mm only supports per-tensor scaling for CPU"  # torch 2.11; on GPUs it has them


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip tests whose product with a scale per row needs a GPU."""
    try:
        return (yield)
    except RuntimeError as error:
        if NO_ROW_SCALES in str(error):
            pytest.skip("torch multiplies with scales per row on GPUs only")
        raise
