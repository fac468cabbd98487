"""Each token is a target once an epoch, in an order that depends on seed and cursor and on nothing else."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import steady

from trainer.data import Bins, Loader, validation_batches
from trainer.data.bins import Shard
from trainer.data.order import permute


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 2**63))
def test_order_is_a_permutation_of_any_number(count: int, epoch: int, seed: int) -> None:
    windows = permute(np.arange(count), np.full(count, epoch), count, seed)
    assert np.array_equal(np.sort(windows), np.arange(count))


def test_order_looks_random() -> None:
    """Neighbours, distances from home and different epochs and seeds are uncorrelated within four standard errors."""
    count = 20_000
    orders = [permute(np.arange(count), np.full(count, e), count, s) for e, s in ((0, 0), (1, 0), (0, 1))]
    for first, second in [(orders[0], orders[1]), (orders[0], orders[2]), (orders[0], np.arange(count))]:
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 4 / count**0.5
    steps = np.bincount((np.diff(orders[0]) % count) * 20 // count, minlength=20)
    expected = (count - 1) / 20
    assert ((steps - expected) ** 2 / expected).sum() < 44  # chi-squared, 19 degrees of freedom, p = 0.001


def test_order_stays_what_it_was() -> None:
    assert permute(np.arange(8), np.zeros(8, int), 1000, 7).tolist() == [175, 624, 607, 383, 292, 166, 161, 750]


@pytest.mark.parametrize("sequence_length", [7, 16, 100])
def test_each_token_is_a_target_exactly_once_an_epoch(bins: Bins, sequence_length: int) -> None:
    num_windows = bins.num_windows(sequence_length)
    divisors = [size for size in range(1, 20) if num_windows % size == 0]
    loader = Loader(bins, steady(sequence_length, max(divisors)), seed=3)
    for _epoch in (1, 2):
        targets: Counter[int] = Counter()
        for _ in range(num_windows // max(divisors)):
            tokens = loader.next()
            assert tokens.shape == (max(divisors), sequence_length + 1)
            assert tokens.dtype == torch.int64
            assert (tokens.diff(dim=1) == 1).all()
            targets.update(tokens[:, 1:].flatten().tolist())
        assert targets == Counter(range(1, num_windows * sequence_length + 1))
    assert bins.num_tokens - 1 - num_windows * sequence_length < sequence_length


def test_a_batch_over_the_end_of_an_epoch_continues_with_the_next(bins: Bins) -> None:
    whole, parts = Loader(bins, steady(16, 187), seed=0), Loader(bins, steady(16, 100), seed=0)
    assert bins.num_windows(16) == 187
    first, second = whole.next(), whole.next()
    stream = torch.cat([parts.next() for _ in range(3)])
    assert torch.equal(stream, torch.cat([first, second])[:300])
    assert not torch.equal(first, second)


@settings(max_examples=20)
@given(st.integers(0, 100), st.integers(1, 5))
def test_resume_at_any_cursor_equals_the_uninterrupted_run(bins: Bins, steps: int, more: int) -> None:
    loader = Loader(bins, steady(16, 12), seed=5)
    for _ in range(steps):
        loader.next()
    resumed = Loader(bins, steady(16, 12), seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert loader.state_dict()["cursor"] == 12 * steps
    for _ in range(more):
        assert torch.equal(loader.next(), resumed.next())
    assert resumed.state_dict() == loader.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_ranks_together_read_the_batch_of_one_process(
    bins: Bins, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Loader(bins, steady(16, 12), seed=0)
    ranks = [Loader(bins, steady(16, 12), seed=0) for _ in range(world_size)]
    read, plain = list[int](), Bins.read
    monkeypatch.setattr(Bins, "read", lambda self, *of: (read.append(1), plain(self, *of))[1])
    for _ in range(20):
        together = torch.cat([loader.next(rank, world_size) for rank, loader in enumerate(ranks)])
        assert len(read) == 12, "windows: each is read by its rank alone"
        assert torch.equal(together, alone.next())
        read.clear()
    assert all(loader.state_dict() == alone.state_dict() for loader in ranks)


def test_another_batch_size_continues_the_same_stream(bins: Bins) -> None:
    reference = Loader(bins, steady(16, 24), seed=0)
    stream = torch.cat([reference.next() for _ in range(2)])
    first, second = Loader(bins, steady(16, 12), seed=0), Loader(bins, steady(16, 36), seed=0)
    head = first.next()
    second.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat([head, second.next()]), stream)


def test_a_cursor_of_other_data_is_refused(bins: Bins) -> None:
    state = Loader(bins, steady(16, 12), seed=0).state_dict()
    other = Bins([Shard(bins.path, replace(bins.sidecar, sha256="0" * 64))])
    for loader, name in [
        (Loader(bins, steady(17, 12), seed=0), r"trainer\.sequence_length=17: the run to resume has 16"),
        (Loader(bins, steady(16, 12), seed=1), r"trainer\.seed=1: the run to resume has 0"),
        (Loader(other, steady(16, 12), seed=0), r"data: .*train\.bin is not the text of the run to resume"),
    ]:
        with pytest.raises(ValueError, match=name):
            loader.load_state_dict(state)
        assert loader.cursor == 0


def test_too_little_text_and_uneven_ranks_are_named(bins: Bins) -> None:
    with pytest.raises(
        ValueError, match=r"trainer\.sequence_length=3000: .* has only 3000 tokens, a sequence takes 3001"
    ):
        Loader(bins, steady(3000, 1), seed=0)
    with pytest.raises(ValueError, match=r"trainer\.sequence_length=3000"):
        next(validation_batches(bins, 3000, 1))
    with pytest.raises(ValueError, match=r"trainer\.global_batch_size=188: .* has only 187 sequences of 16 tokens"):
        Loader(bins, steady(16, 188), seed=0)
    with pytest.raises(ValueError, match=r"trainer\.global_batch_size=12: does not divide among 5 processes"):
        Loader(bins, steady(16, 12), seed=0).next(0, 5)
    with pytest.raises(ValueError, match=r"trainer\.seed=-1"):
        Loader(bins, steady(16, 12), seed=-1)


def test_validation_covers_every_window_once(bins: Bins) -> None:
    batches = list(validation_batches(bins, 16, 10))
    assert [len(batch) for batch in batches] == [10] * 18 + [7]
    assert torch.cat(batches)[:, 1:].flatten().tolist() == list(range(1, 187 * 16 + 1))


@given(st.integers(1, 240), st.integers(1, 12))
def test_a_limited_validation_is_spread_over_all_the_text(bins: Bins, max_windows: int, batch_size: int) -> None:
    tokens = torch.cat(list(validation_batches(bins, 16, batch_size, max_windows)))
    windows = tokens[:, 0].numpy() // 16
    assert len(windows) == min(187, max_windows)
    gaps = np.diff([*windows, 187])
    assert windows[0] == 0
    assert gaps.min() >= 1
    assert gaps.max() <= 187 / len(windows) + 1
