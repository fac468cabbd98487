"""Targets stop where the sequence does."""

import torch

from models.loss import targets_ahead
from precision import IGNORED


def test_targets_end_with_the_sequence() -> None:
    tokens = torch.arange(5)[None]
    assert targets_ahead(tokens, 1).tolist() == [[1, 2, 3, 4]]
    assert targets_ahead(tokens, 3).tolist() == [[3, 4, IGNORED, IGNORED]]
