"""How a process ended, whether another rank caused an error, and the operation that a process waits for."""

import contextlib
import fcntl
import json
import os
import platform
import signal
import struct
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.files import SOURCE

SAVING = "saving"
"""Description of a process group that waits for disks: it has a time limit of its own, and main may wait as long."""

_OWN_FILES = ("rank_group.py", "exit_report.py", "blame.py", "job_store.py")


def this_process() -> list[Any]:
    """Return host, process number, and the namespace in which that number is valid."""
    namespace = "-"
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return [platform.node(), os.getpid(), namespace]


def describe_exit(process: int, descriptor: int | None) -> str:
    """Describe the end of a process from its wait status: the last field of /proc/PROCESS/stat, until the parent has
    reaped it; after that, from Linux 6.15 on, from the process's descriptor."""
    try:
        status = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[-1])
    except (OSError, ValueError):
        status = _wait_status(descriptor)
    if status is None:
        return "has died"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"was killed by {name}" + (" (out of memory? see dmesg)" if name == "SIGKILL" else "")
    return f"has died with exit code {os.waitstatus_to_exitcode(status)}"


def _wait_status(descriptor: int | None) -> int | None:
    """linux/pidfd.h: struct pidfd_info {u64 mask, cgroup; u32 pid, ... [11]; s32 exit_code}, PIDFD_INFO_EXIT = 8."""
    layout = "<QQ11Ii"
    request = 3 << 30 | struct.calcsize(layout) << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
    if descriptor is None:
        return None
    try:
        mask, *_, status = struct.unpack(layout, fcntl.ioctl(descriptor, request, struct.pack(layout, 8, *[0] * 13)))
    except OSError:
        return None
    return status if mask & 8 else None


def classify_collective_error(error: BaseException) -> tuple[bool, bool]:
    """Return whether an error is that of a collective operation, which others may have caused, and a timeout."""
    from torch.distributed import DistError

    says = str(error).lower()
    is_one = isinstance(error, DistError) or (
        isinstance(error, RuntimeError)
        and any(word in says for word in ("gloo", "nccl", "closed by peer", "connection"))
    )
    return is_one, is_one and ("timed out" in says or "timeout" in says)


def pending_operation(seconds: float = 0.0) -> str | None:
    """Return the first collective operation that this process began at least `seconds` ago and has not finished:
    `all_gather of [16, 64]`.

    It reads torch's flight recorder, which keeps the last two thousand or so of each backend. NCCL's come first, since
    only the recorder knows the operation that a GPU waits in. None if there is no such operation (those of `SAVING`
    do not count), or torch does not record.
    """
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # private names; a CPU build has only the second
        dump = getattr(c10d, name, None)
        if dump is not None and (found := _first_pending(dump(True, False), seconds)) is not None:
            return found
    return None


def _first_pending(record: bytes | str, seconds: float = 0.0) -> str | None:
    try:
        entries = [entry for entry in json.loads(record)["entries"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return None
    waiting = [entry for entry in entries if not entry.get("retired") and entry.get("state") != "completed"]
    waiting = [entry for entry in waiting if SAVING not in entry.get("process_group", ())]
    if not waiting:
        return None
    first = min(waiting, key=lambda entry: entry.get("time_created_ns", 0))
    if seconds and time.time_ns() - first.get("time_created_ns", 0) < seconds * 1e9:
        return None
    backend, _, operation = str(first.get("profiling_name", "?")).rpartition(":")
    sizes = ", ".join(str(size) for size in first.get("input_sizes", [])[:2] if size)
    return f"{backend} {operation.lstrip('_')}".strip() + (f" of {sizes}" if sizes else "")


def timed_out_operation(error: BaseException) -> str:
    """Return the collective operation that timed out, from the traceback: `all_reduce, at totals.py:33 in all_sum`.

    The operation is the innermost function of torch.distributed, the line the innermost one of our own code.
    """
    operation, where = "", "?"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if file.is_relative_to(SOURCE) and file.name not in _OWN_FILES:
            operation, where = "", f"{file.name}:{line} in {function}"
        elif "torch/distributed/" in file.as_posix() and function not in ("wrapper", "wait"):
            operation = f"{function}, at "
    return operation + where


def place(frame: FrameType | None) -> str:
    """Return the innermost line of our own code on a thread's stack: `trainer.py:57 in train`."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE) and file.name not in _OWN_FILES:
            return f"{file.name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
