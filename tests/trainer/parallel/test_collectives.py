"""What ranks exchange in a step keeps non-finite numbers."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from trainer.parallel.collectives import all_max


def test_an_amax_that_is_not_a_number_is_sent_as_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum with NaN may be the other number, and the step would pass for finite."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, how: tensor)
    amax = torch.tensor([1.0, torch.nan, -torch.inf, torch.inf])
    all_max([amax], cast(Any, SimpleNamespace(is_distributed=True)))
    assert amax.tolist() == [1.0, torch.inf, -torch.inf, torch.inf]
