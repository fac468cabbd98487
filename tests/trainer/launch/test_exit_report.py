"""What a process that waits in vain can say about what it waits in."""

import json
import time

import pytest
import torch

from trainer.launch.liveness.exit_report import _first_pending, pending_operation, timed_out_operation

DONE = {"profiling_name": "nccl:all_reduce", "state": "completed", "retired": True, "time_created_ns": 1}
FIRST = {"profiling_name": "nccl:_all_gather_base", "state": "started", "retired": False, "time_created_ns": 2}
LATER = {"profiling_name": "nccl:_reduce_scatter_base", "state": "scheduled", "retired": False, "time_created_ns": 3}


def record(*entries: object) -> str:
    """As torch's flight recorder writes it."""
    return json.dumps({"version": "2.10", "entries": entries})


def test_the_operation_that_was_begun_first_is_the_one_that_hangs() -> None:
    assert _first_pending(record(DONE, LATER, {**FIRST, "input_sizes": [[16, 64], []]})) == (
        "nccl all_gather_base of [16, 64]"
    )


def test_an_operation_that_has_just_begun_is_not_overdue() -> None:
    begun = {**FIRST, "time_created_ns": time.time_ns() - int(5e9)}
    assert _first_pending(record(begun), 4.0) and _first_pending(record(begun), 60.0) is None


@pytest.mark.parametrize("text", [record(DONE), record(), "", "[]", "{}", record(3)])
def test_a_record_without_one_names_none(text: str) -> None:
    assert _first_pending(text) is None


def test_a_process_by_itself_waits_in_none() -> None:
    assert pending_operation() is None


def test_a_traceback_names_the_function_of_torch_distributed() -> None:
    with pytest.raises(ValueError, match="process group") as raised:
        torch.distributed.all_reduce(torch.ones(1))
    assert timed_out_operation(raised.value).endswith(", at ?")  # not from our own code
