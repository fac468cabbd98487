"""Runs a share of the self-test on a GPU, for `precision.proof`:  python -m precision.selftest [--share 0/8]

Writes a line of JSON before each check and one after it; see `precision.proof.read_report`. Without --share all checks
run in turn, and the lines report how long each took.
"""

import argparse
import json
import time

import torch

from precision.backends.availability import HOPPER
from precision.selftest.checks import CHECKS, Check, share_of
from precision.selftest.twins import Mismatch


def main() -> int:
    """Run the checks; return exit code 0 if all of the share have run, whatever they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", default="0/1", help="which of how many equal shares")
    options = parser.parse_args()
    share, count = map(int, options.share.split("/"))
    device = torch.device("cuda", 0)
    hopper = torch.cuda.get_device_capability(device) == HOPPER
    torch.backends.cuda.matmul.allow_tf32 = False  # the references' own products
    for check in share_of([check for check in CHECKS if hopper or not check.hopper], share, count):
        if not run(check, device):
            return 3
    return 0


def run(check: Check, device: torch.device) -> bool:
    """Run one check; return whether the GPU is still usable: a kernel that raises may have left it unusable."""
    head = {"op": check.op, "check": check.run.__name__}
    print(json.dumps(head), flush=True)
    began, outcome, usable = time.perf_counter(), {"failure": None}, True
    try:
        check.run(device)
    except Mismatch as mismatch:
        outcome = {"failure": str(mismatch)}
    except Exception as error:  # from Triton's compiler or the driver
        said, usable = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False
        # the driver's error is not a torch.OutOfMemoryError
        unproved = isinstance(error, torch.OutOfMemoryError) or "out of memory" in said
        outcome = {"unproved": said} if unproved else {"failure": f"{check.run.__name__} raises {said}"}
    print(json.dumps({**head, **outcome, "seconds": round(time.perf_counter() - began, 2)}), flush=True)
    return usable


if __name__ == "__main__":
    raise SystemExit(main())
