"""Tokens are sorted by expert, with experts that get none, and find their way back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.permutation import permutation


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2**16))
def test_permutation_sorts_by_expert_and_knows_the_way_back(tokens: int, chosen: int, idle: int, seed: int) -> None:
    experts = chosen + idle
    generator = torch.Generator().manual_seed(seed)
    expert_TK = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)])
    order, index, inverse, offsets = permutation(expert_TK, experts)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == expert_TK.flatten().bincount(minlength=experts).cumsum(0).tolist()
    rows = expert_TK.flatten()[order]
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(index, order // chosen)
    assert torch.equal(index[inverse], torch.arange(tokens)[:, None].expand(-1, chosen))
    assert torch.equal(rows[inverse], expert_TK)
    for e in range(experts):
        start = int(offsets[e - 1]) if e else 0
        mine = index[start : int(offsets[e])].tolist()
        assert mine == sorted(mine), "tokens keep their order within an expert"
