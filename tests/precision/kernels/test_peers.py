"""Rows that processes write into each other's inboxes, all of them played by one process, and read out of them."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is missing")

from precision.kernels.peers import push, take

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("processes", "slots", "width", "dtype"),
    [(2, 16, 144, torch.uint8), (3, 16, 6, torch.int32), (2, 48, 1040, torch.bfloat16), (4, 1, 2, torch.int64)],
)
def test_rows_in_use_arrive_and_no_others(processes: int, slots: int, width: int, dtype: torch.dtype) -> None:
    P, R, offset = processes, processes * slots, 256
    generator = torch.Generator().manual_seed(0)
    used_PP = torch.randint(0, slots + 1, (P, P), generator=generator)  # [sender, receiver]
    used_PP[0, -1], used_PP[-1, 0] = 0, slots

    def draw() -> Tensor:
        return torch.randint(0, 100, (R, width), generator=generator).to(dtype)

    rows = [draw().to(DEVICE) for _ in range(P)]
    size = rows[0].numel() * rows[0].element_size()
    inboxes = [torch.full((offset + size + 16,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(P)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
    for rank in range(P):
        push(rows[rank], addresses, used_PP[rank].to(DEVICE), offset, rank)
    for rank, inbox in enumerate(inboxes):
        came = inbox[offset : offset + size].view(dtype).view(R, width)
        used = used_PP[:, rank].contiguous()
        kept = take(came, used.to(DEVICE)).unflatten(0, (P, slots))
        assert (inbox[:offset] == 7).all() and (inbox[offset + size :] == 7).all()
        for sender in range(P):
            n, sent = int(used[sender]), rows[sender].unflatten(0, (P, slots))[rank]
            assert torch.equal(kept[sender, :n], sent[:n]) and not kept[sender, n:].any()
            untouched = came.unflatten(0, (P, slots))[sender, n:].contiguous().view(torch.uint8)
            assert (untouched == 7).all()
