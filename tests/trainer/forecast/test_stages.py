"""What is forecast of a pipeline's schedule, against the order of passes that torch runs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from trainer.forecast.stages import bubble, kept, owners

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B"}


def played(p: int, v: int, m: int, times: Sequence[float]) -> tuple[float, list[float]]:
    """Share of a step that ranks wait, and most microbatches whose activations each one has, where each pass begins as
    soon as its rank and the pass before it are through. times: of the stages' forward passes; backward twice that."""
    torch_s = SimpleNamespace(n_local_stages=v, pp_group_size=p, _n_microbatches=m)
    torch_s.microbatches_per_round = m // max(1, m // p)
    orders = [ScheduleInterleaved1F1B._calculate_single_rank_operations(torch_s, rank) for rank in range(p)]  # type: ignore[arg-type]
    passes = [[a for a in order if a is not None] for order in orders]
    ends: dict[tuple[str, int, Any], float] = {}
    clock, kept, most = [0.0] * p, [0] * p, [0] * p
    while any(passes):
        for rank, own in enumerate(passes):
            while own:
                kind, stage, i = KINDS[own[0].computation_type.name], own[0].stage_index, own[0].microbatch_index
                before = [("F", stage - 1, i)] if kind == "F" else [("F", stage, i), ("B", stage + 1, i)]
                before = [one for one in before if 0 <= one[1] < p * v]
                if not all(one in ends for one in before):
                    break
                began = max([clock[rank], *(ends[one] for one in before)])
                clock[rank] = ends[kind, stage, i] = began + times[stage] * (1 if kind == "F" else 2)
                kept[rank] += 1 if kind == "F" else -1
                most[rank] = max(most[rank], kept[rank])
                own.pop(0)
    return 1 - m * 3 * sum(times) / p / max(clock), [number / v for number in most]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 6), (4, 2, 10), (8, 4, 64)])
def test_interleaved_stages_wait_and_keep_as_much_as_their_order_says(p: int, v: int, m: int) -> None:
    share, most = played(p, v, m, [1.0] * (p * v))
    assert bubble([3.0] * (p * v), owners(p, v), m) == pytest.approx(share)
    assert [kept(rank, p, v, m) for rank in range(p)] == most
    assert share < bubble([3.0 * v] * p, owners(p, 1), m), "than one stage a rank"
