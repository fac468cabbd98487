"""Tests that need a GPU: skipped without one."""

import gc
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where torch sees no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """What a test leaves in this process's cache, the GPU has again for other workers."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def large(shared_memory: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of tests that take tens of GiB, one runs at a time, whichever worker has it."""
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
    with FileLock((shared or tmp_path_factory.getbasetemp()) / "large.lock"):
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def alone() -> None:
    """Skip what measures time or power while other workers use the GPU."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("several workers share the GPU, so that no time or power means anything: run this without -n")


@pytest.fixture(scope="session")
def milliseconds(alone: None) -> Callable[[Callable[[], object]], float]:
    """milliseconds(run): median time of the GPU for one call; meaningful only while no other process uses the GPU."""

    def measure(run: Callable[[], object]) -> float:
        run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(10)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    return measure
