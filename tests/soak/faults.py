"""The faults of the soak test (`soak.py`), applied to a run's processes, and to the files of the run and of its data.

Each is a function of (course, place, chance): it changes the copy in `place`, at random, and returns a description.
Raises SoakFailure if a process ends as it must not.
"""

import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from bits import SoakFailure
from courses import Course, Job

from trainer.checkpoint import list_checkpoints

Fault = Callable[[Course, Path, random.Random], str]
RUN_FILES = (
    "recovery.json", "backends.json", "config.yaml", "overrides.txt", "environment.json", "precision_plan.txt",
    "metrics.jsonl", "tensors.jsonl", "events.jsonl", "tokenizer.json", "logs/rank0.log",
)  # fmt: skip
DATA_FILES = (
    "train.bin", "train.json", "validation.bin", "validation.json", "tokenizer.json", "prepared.json", "verified.json",
)  # fmt: skip
LINKED = (*RUN_FILES, ".lock", ".config.yaml.new", "dashboard.html")
DISK_LIMITS = (0, 1000, 20_000, 400_000)
"""Bytes beyond which no file grows. A checkpoint's tensors are larger than the last, everything else is smaller."""


# ------------------------------------------------------------------------------------------------------------ processes


def begin(course: Course, place: Path, chance: random.Random) -> tuple[Job, str]:
    """Start or resume the run, and wait until a random moment; a third of all start from nothing."""
    run, fresh = place / "runs" / "run", chance.random() < 1 / 3
    if fresh:
        shutil.rmtree(place)
        place.mkdir()
    job, saves = course.start(), chance.random() < 1 / 3
    deadline = time.monotonic() + chance.uniform(0, (3 if fresh else 1.1) * course.seconds)
    while not job.over() and time.monotonic() < deadline:
        if saves and any((run / "checkpoints").glob(".writing_*")):
            break
        time.sleep(0.004)
    return job, "while a run starts from nothing" if fresh else "while a run resumes"


def kill(course: Course, place: Path, chance: random.Random) -> str:
    """Kill the run once or twice in a row."""
    times = chance.choice([1, 1, 1, 2])
    for _ in range(times):
        job, when = begin(course, place, chance)
        victim = chance.randrange(course.ranks)
        job.signal(signal.SIGKILL, victim)
        deadline = time.monotonic() + 60
        while not job.over() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not job.over() and "waiting at" in job.printed():  # end those waiting for a killed rank, as srun does
            job.signal(signal.SIGTERM)
        printed = job.end()
        if job.codes[victim] not in (-signal.SIGKILL, 0) or not set(job.codes) <= {-signal.SIGKILL, 0, 1, 143}:
            raise SoakFailure(f"rank {victim} killed, and exit codes {job.codes}: {printed}")
    return f"rank {victim}, {when}, {times} x"


def stop(course: Course, place: Path, chance: random.Random) -> str:
    number, twice = chance.choice([signal.SIGTERM, signal.SIGINT]), chance.random() < 0.3
    job, when = begin(course, place, chance)
    job.signal(number)
    if twice:
        time.sleep(chance.uniform(0, 0.8))
        job.signal(number)
    printed = job.end()
    too_early = {-signal.SIGTERM, -signal.SIGINT} if not printed else set()  # before the first line of train.py
    if not set(job.codes) <= {128 + number, 0, 128 + signal.SIGTERM} | too_early:
        raise SoakFailure(f"stopped by {number.name}, and exit codes {job.codes}: {printed}")
    if "saved; resume" in printed:
        step = int(printed.partition("after step ")[2].split(",")[0])
        newest = list_checkpoints(place / "runs" / "run" / "checkpoints")[-1].name
        if newest != f"step_{step:08d}":
            raise SoakFailure(f"says that it saved step {step}, and the newest checkpoint is {newest}")
    return f"{number.name}{' twice' * twice} {when}"


def fill_disk(course: Course, place: Path, chance: random.Random) -> str:
    """Fill the disk for a while, or until the run ends."""
    job, when = begin(course, place, chance)
    limit, hard = chance.choice(DISK_LIMITS), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for process in job.processes:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, hard))
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, course.seconds))
        for process in job.processes:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))
    printed = job.end()
    if not set(job.codes) <= {0, 1, 2}:
        raise SoakFailure(f"exit codes {job.codes}: {printed}")
    return f"{limit:,} bytes a file {when}; exit codes {job.codes}"


# ---------------------------------------------------------------------------------------------------------------- files


def spoil(path: Path, chance: random.Random) -> str:
    """Flip a bit (half of the time), truncate, remove or empty the file, or write a stretch of zeros."""
    how = chance.choice(["bit", "bit", "bit", "cut", "removed", "zeros"])
    content = bytearray(path.read_bytes())
    if how == "removed" or not content:
        path.unlink()
        return f"{path.name} removed"
    at = chance.randrange(len(content))
    if how == "bit":
        content[at] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[at:]
    else:
        stretch = min(len(content) - at, 512)
        content[at : at + stretch] = bytes(stretch)
    path.write_bytes(content)
    return f"{path.name}: {how} at byte {at}"


def spoil_run(name: str) -> Fault:
    def fault(course: Course, place: Path, chance: random.Random) -> str:
        path = place / "runs" / "run" / name
        return spoil(path, chance) if path.exists() else f"{name}: there is none"

    return fault


def spoil_data(name: str) -> Fault:
    return lambda course, place, chance: spoil(next((place / "data").glob(f"*/{name}")), chance)


def spoil_checkpoint(course: Course, place: Path, chance: random.Random) -> str:
    newest = list_checkpoints(place / "runs" / "run" / "checkpoints")[-1]
    return spoil(chance.choice(sorted(path for path in newest.rglob("*") if path.is_file())), chance)


def kill_and_spoil(course: Course, place: Path, chance: random.Random) -> str:
    """Damage the newest checkpoint of a killed run."""
    what = kill(course, place, chance)
    left = list_checkpoints(place / "runs" / "run" / "checkpoints")
    return f"{what}; {spoil_checkpoint(course, place, chance)}" if len(left) > 1 else what


def rename(course: Course, place: Path, chance: random.Random) -> str:
    """Rename a checkpoint to another step's name, perhaps exchanging the two."""
    folder = place / "runs" / "run" / "checkpoints"
    one = chance.choice(list_checkpoints(folder))
    other = folder / chance.choice([name for i in (2, 4, 6, 8) if (name := f"step_{i:08d}") != one.name])
    one.rename(aside := folder / "aside")
    if other.exists():
        other.rename(one)
    aside.rename(other)
    return f"{one.name} and {other.name}"


def plant_link(course: Course, place: Path, chance: random.Random) -> str:
    """Plant a link in place of a file of the run: to a file elsewhere, which must stay unchanged."""
    path, victim = place / "runs" / "run" / (name := chance.choice(LINKED)), course.folder / "elsewhere"
    content = path.read_bytes() if path.is_file() and chance.random() < 0.5 else b"precious\n"
    victim.write_bytes(content)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    job = course.start()
    printed = job.end()
    if victim.read_bytes() != content:
        raise SoakFailure(f"{name} was a link, and what it points to was written: {printed}")
    if path.is_symlink():
        path.unlink()
    return f"{name}; exit code {job.codes[0]}"


def move_and_link(course: Course, place: Path, chance: random.Random) -> str:
    """Move a checkpoint, all of them, or the data to another disk and link it back."""
    checkpoints = place / "runs" / "run" / "checkpoints"
    path = chance.choice([*list_checkpoints(checkpoints), checkpoints, place / "data"])
    elsewhere = place / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return path.name


FAULTS: list[tuple[str, Fault]] = [
    *[("processes killed (SIGKILL)", kill)] * 6,
    *[("processes stopped (SIGTERM, SIGINT)", stop)] * 4,
    *[("processes on a full disk", fill_disk)] * 3,
    *[("killed, then the newest checkpoint damaged", kill_and_spoil)] * 2,
    *[("a file of the newest checkpoint", spoil_checkpoint)] * 8,
    *[("checkpoints renamed or exchanged", rename)] * 2,
    *[(f"`{name}` of the run", spoil_run(name)) for name in RUN_FILES],
    *[(f"`{name}` of the data", spoil_data(name)) for name in DATA_FILES],
    *[("a link in place of a file of the run", plant_link)] * 3,
    ("a checkpoint or the data moved and linked back", move_and_link),
]
