"""What can be learnt of a process that has ended, of an error that others have caused, and of a thread that waits."""

import fcntl
import os
import signal
import struct
from pathlib import Path
from types import FrameType

OWN_CODE = Path(__file__).resolve().parents[1]
_WATCHES = ("crew.py", "postmortem.py")


def how_it_ended(process: int, descriptor: int | None) -> str:
    """From a wait status: the last field of /proc/PROCESS/stat, until the parent has asked for it; then, from Linux
    6.15 on, what the descriptor of the process knows."""
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


def of_a_collective(error: BaseException) -> tuple[bool, bool]:
    """Whether an error is that of a collective operation, which others may have caused; whether it ran out of time."""
    from torch.distributed import DistError

    says = str(error).lower()
    is_one = isinstance(error, DistError) or (
        isinstance(error, RuntimeError)
        and any(word in says for word in ("gloo", "nccl", "closed by peer", "connection"))
    )
    return is_one, is_one and ("timed out" in says or "timeout" in says)


def place(frame: FrameType | None) -> str:
    """The innermost line of our own code that a thread is at: `trainer.py:57 in train`."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(OWN_CODE) and file.name not in _WATCHES:
            return f"{file.name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
