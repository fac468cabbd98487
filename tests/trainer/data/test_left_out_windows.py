"""Windows that are left out are never read, and nothing else changes."""

import pytest
from small import steady

from trainer.data import Bins, Loader
from trainer.data.loader import merge_ranges

RANGES = [[9, 14], [2, 3], [14, 15], [40, 90], [330, 360]]  # one batch, less, more, over the end of an epoch


@pytest.mark.parametrize("world_size", [1, 2])
def test_left_out_windows_are_never_read(bins: Bins, world_size: int) -> None:
    plain, loader = Loader(bins, steady(9, 1), seed=3), Loader(bins, steady(9, 4), seed=3)
    assert loader.num_windows < 340
    loader.leave_out(RANGES[:2])
    loader.leave_out(RANGES[2:])
    windows = {n: plain.next() for n in range(400)}
    expected = iter([n for n in windows if not any(begin <= n < end for begin, end in RANGES)])
    for _ in range(60):
        cursor, rows = loader.cursor, []
        for rank in range(world_size):
            loader.cursor = cursor
            tokens, size = loader.next(rank, world_size), 4 // world_size
            rows += zip(tokens.split(1), loader.served[rank * size : (rank + 1) * size], strict=True)
            assert len(loader.served) == 4
        for tokens, number in rows:
            assert number == next(expected)
            assert (tokens == windows[int(number)]).all()


def test_left_out_windows_survive_a_resume(bins: Bins) -> None:
    loader, other = Loader(bins, steady(9, 4), seed=3), Loader(bins, steady(9, 4), seed=3)
    loader.leave_out(RANGES)
    for _ in range(3):
        loader.next()
    other.leave_out([[0, 300]])  # of another course of events
    other.load_state_dict(loader.state_dict())
    assert other.state_dict() == loader.state_dict()
    assert all((loader.next() == other.next()).all() for _ in range(20))


def test_a_state_from_before_there_was_such_a_thing(bins: Bins) -> None:
    loader = Loader(bins, steady(9, 4), seed=3)
    state = loader.state_dict()
    del state["left_out"]
    loader.load_state_dict(state)
    assert loader.state_dict()["left_out"] == []


def test_ranges_are_put_together() -> None:
    assert merge_ranges([[5, 7], [0, 2], [7, 9], [1, 3], [20, 21]]) == [[0, 3], [5, 9], [20, 21]]
    assert merge_ranges([]) == []
