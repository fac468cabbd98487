"""What leaves the device in one copy is what was there."""

import torch

from trainer.metrics import copy_to_host


def test_numbers_of_any_shape_and_format_keep_their_names_and_order() -> None:
    tensors = {
        "b": torch.tensor(1.5),
        "count": torch.tensor([[2**40 + 1, 2], [3, 4]]),
        "a": torch.tensor(0.1, dtype=torch.float64),
        "ok": torch.tensor(True),
        "none": torch.zeros(0, 4),
        "c": torch.tensor([2.5, -1.0], requires_grad=True),
    }
    told = copy_to_host(tensors)
    assert list(told) == list(tensors)
    assert told == {
        "b": 1.5, "count": [[2**40 + 1, 2], [3, 4]], "a": 0.1, "ok": 1.0, "none": [], "c": [2.5, -1.0]
    }  # fmt: skip
    assert copy_to_host({}) == {}
