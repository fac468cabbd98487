"""Reading ahead gives the same batches, and leaves no trace in the cursor, in a rewind or at the end."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small import steady

from trainer.data import Bins, DamagedShard, Loader
from trainer.data.prefetch import ReadThread


@pytest.fixture
def bins(make_bins: Callable[[Path], Bins], tmp_path: Path) -> Bins:
    """Of the test's own."""
    return make_bins(tmp_path)


def ahead(bins: Bins, count: int = 2) -> Loader:
    return Loader(bins, steady(16, 12), seed=5, ahead=count)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data" and thread.is_alive()]


@pytest.mark.parametrize("count", [1, 3])
def test_batches_and_states_are_those_without(bins: Bins, count: int) -> None:
    plain, loader = Loader(bins, steady(16, 12), seed=5), ahead(bins, count)
    early = loader.state_dict()
    for step in range(40):
        if step == 9:
            for each in (plain, loader):
                each.leave_out([[115, 130], [150, 151]])
        if step == 20:  # a rewind: back to a state of step 3, and over what broke the run
            for each in (plain, loader):
                each.load_state_dict(early)
                each.leave_out([[60, 99]])
        if step == 30:
            for each in (plain, loader):
                each.cursor -= 12
        if step == 3:
            early = loader.state_dict()
        assert torch.equal(loader.next(), plain.next())
        assert loader.served.tolist() == plain.served.tolist()
        assert loader.state_dict() == plain.state_dict()
    for rank in (0, 1, 1):
        assert torch.equal(loader.next(rank, 2), plain.next(rank, 2))
    loader.close()


def test_a_batch_is_there_before_it_is_asked_for(bins: Bins) -> None:
    loader = ahead(bins)
    loader.next()
    deadline = time.monotonic() + 30
    while not all(reading.tokens.done() for reading in loader._readings):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(loader._readings) == 2
    loader.close()


def test_a_file_that_is_cut_off_is_named_when_its_batch_is_wanted(bins: Bins) -> None:
    loader, plain = ahead(bins), Loader(bins, steady(16, 12), seed=5)
    expected = [plain.next() for _ in range(3)]
    assert torch.equal(loader.next(), expected[0])
    loader._readings[-1].tokens.result()
    os.truncate(bins.path, 60)
    assert torch.equal(loader.next(), expected[1])  # was read before
    assert torch.equal(loader.next(), expected[2])
    for _ in range(2):
        with pytest.raises(DamagedShard, match=r"bins .*train\.bin: ends at byte 60; it was whole when the run began"):
            loader.next()
        assert loader.cursor == 36
    loader.close()


def test_the_thread_ends_with_the_loader(bins: Bins) -> None:
    before = len(readers())
    closed, dropped, idle = ahead(bins), ahead(bins), ahead(bins)
    for loader in (closed, dropped):
        loader.next()
    assert len(readers()) == before + 2
    closed.close()
    closed.close()
    idle.close()
    assert len(readers()) == before + 1
    loader = idle
    thread = dropped._thread._thread
    assert thread is not None
    del dropped
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_an_end_does_not_wait_for_a_disk_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.prefetch.PATIENCE", 0.01)
    reader, answer = ReadThread(), threading.Event()
    future = reader.submit(answer.wait)
    reader.close()
    assert not future.done()
    answer.set()
    assert future.result(30)
