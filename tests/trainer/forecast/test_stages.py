"""What is forecast of a pipeline's schedule, against the order of passes that torch runs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from composed import config_of
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from trainer.forecast.dry_run import report
from trainer.forecast.preflight import check
from trainer.forecast.stages import bubble, bubble_of_v, kept, owners

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
Schedule = type[ScheduleInterleaved1F1B] | type[ScheduleZBVZeroBubble]


def played(
    p: int, v: int, m: int, times: Sequence[float], schedule: Schedule = ScheduleInterleaved1F1B, weights: float = 0.0
) -> tuple[float, list[float]]:
    """Share of a step that ranks wait, and most microbatches whose activations each one has, where each pass begins as
    soon as its rank and the pass before it are through. times: of the stages' forward passes; backward twice that.
    weights: the part of a forward pass's time that gradients of weights take, where they are separate."""
    torch_s = SimpleNamespace(n_local_stages=v, pp_group_size=p, num_stages=p * v, _n_microbatches=m)
    torch_s.microbatches_per_round = m // max(1, m // p)
    orders = [schedule._calculate_single_rank_operations(torch_s, rank) for rank in range(p)]  # type: ignore[arg-type]
    takes = {"F": 1.0, "B": 2.0 - weights, "W": weights}
    passes = [[a for a in order if a is not None] for order in orders]
    ends: dict[tuple[str, int, Any], float] = {}
    clock, kept, most = [0.0] * p, [0] * p, [0] * p
    while any(passes):
        for rank, own in enumerate(passes):
            while own:
                kind, stage, i = KINDS[own[0].computation_type.name], own[0].stage_index, own[0].microbatch_index
                before = {
                    "F": [("F", stage - 1, i)],
                    "B": [("F", stage, i), ("B", stage + 1, i)],
                    "W": [("B", stage, i)],
                }[kind]
                before = [one for one in before if 0 <= one[1] < p * v]
                if not all(one in ends for one in before):
                    break
                began = max([clock[rank], *(ends[one] for one in before)])
                clock[rank] = ends[kind, stage, i] = began + times[stage] * takes[kind]
                kept[rank] += {"F": 1, "B": -1, "W": 0}[kind]
                most[rank] = max(most[rank], kept[rank])
                own.pop(0)
    return 1 - m * 3 * sum(times) / p / max(clock), [number / v for number in most]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 6), (4, 2, 10), (8, 4, 64)])
def test_interleaved_stages_wait_and_keep_as_much_as_their_order_says(p: int, v: int, m: int) -> None:
    share, most = played(p, v, m, [1.0] * (p * v))
    assert bubble([3.0] * (p * v), owners(p, v), m) == pytest.approx(share)
    assert [kept(rank, p, v, m) for rank in range(p)] == most
    assert share < bubble([3.0 * v] * p, owners(p, 1), m), "than one stage a rank"


V = (2, 2, 1), (2, 8, 0.75), (4, 7, 1), (4, 12, 0.5), (8, 64, 0), (8, 8, 1)


@pytest.mark.parametrize(("p", "m", "weights"), V)
def test_stages_in_a_v_wait_and_keep_as_much_as_their_order_says(p: int, m: int, weights: float) -> None:
    share, most = played(p, 2, m, [1.0] * (2 * p), ScheduleZBVZeroBubble, weights)
    assert bubble_of_v([1.0] * (2 * p), [weights] * (2 * p), m) == pytest.approx(share)
    assert max(most) == p and (m < 2 * p - 1 or set(most) == {p})
    if weights == 1 and m >= 2 * p - 1:
        assert share == pytest.approx((p - 1) / (6 * m + p - 1)), "with equal times"


def test_a_v_with_unequal_stages_waits_for_the_slowest_rank() -> None:
    """Its forecast is at most a stage's forward pass off."""
    times, m = [1.0, 1.2, 1.0, 0.5], 16
    share, _ = played(2, 2, m, times, ScheduleZBVZeroBubble, 1.0)
    assert bubble_of_v(times, times, m) == pytest.approx(share, abs=1 / (6 * m))


@pytest.mark.parametrize("more", [["parallel.stages=[2,1]"], ["parallel.stages=[3]", "parallel.schedule=zbv"]])
def test_without_a_pipeline_stages_change_no_time(more: list[str]) -> None:
    """They are reported as without effect."""
    said = []
    for keys in ([], more):
        config = config_of(["dry_run=true", "gpu=h200", *keys])
        said.append(next(line for line in report(config, check(config)).splitlines() if line.startswith("time: ")))
    assert said[0] == said[1]
