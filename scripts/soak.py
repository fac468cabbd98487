"""The soak test: runs that are killed, stopped and damaged must end with the bits of an undisturbed run.

    python scripts/soak.py                            50 rounds, 50 damaged files, some minutes; make soak does the same
    python scripts/soak.py --rounds 200 --seed 3 --ranks 2

It trains a tiny model on the CPU again and again, each time under another name: a *course*. A course has a reference,
which runs undisturbed, and a run that is disturbed in each of its rounds and then started again with run.resume=auto:

    SIGKILL       at any moment: while it starts, after a step, while a checkpoint is being written
    SIGTERM       or SIGINT, at any moment, once or twice in a row
    damage        SIGKILL, and a file of its newest checkpoint is cut off or altered
    full disk     no file can grow beyond a limit that checkpoints exceed (RLIMIT_FSIZE), for a while or to the end

In some courses steps go bad: a NaN or Inf in one step, which is dropped, or in every step that reads some of the data,
so that the run goes back to a checkpoint and leaves these data out. The reference has the same faults. When the run is
done, its weights, moments, scales, counters, data cursor and random numbers, and its metrics loss/ optim/ moe/ fp8/ of
every step, must be the reference's, bit for bit.

Before that, files of a run and of its data are damaged, one at a time (`soak_faults.py`): none may be trained on.

Processes are forked from this one, which has imported everything: what is tested is what comes after that. Exit code 0:
all the same; 1: something was not, and the folder is kept.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: no threads here, which would not survive a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import importlib.util
import json
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from soak_bits import Wrong, compare
from soak_faults import faults, table

import trainer.launch.agreement
import trainer.parallel.fsdp
import trainer.trainer  # noqa: F401
from trainer.checkpoint import DamagedCheckpoint, list_checkpoints, verify_checkpoint

ROOT = Path(__file__).resolve().parents[1]
DISK_LIMIT = 400_000
"""Bytes: less than a checkpoint's tensors, more than anything else that a run writes."""
BATCH = 4
COMMON = [
    "model.vocab_size=320", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.kv_lora_rank=32",
    "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.intermediate_size=96",
    "model.moe_intermediate_size=32", "model.num_experts=4", f"trainer.global_batch_size={BATCH}",
    "trainer.microbatch_size=2", "trainer.sequence_length=24", "trainer.device=cpu", "optim.warmup_steps=4",
    "eval.every=9", "eval.batches=2", "logging.every=1", "logging.console.enabled=false", "checkpoint.every=4",
    "checkpoint.keep=3", "data=text", "run.resume=auto",
    "data.validation_fraction=0.01", "health.dashboard=false",
]  # fmt: skip


@dataclass
class Course:
    """One training, undisturbed as `reference` and disturbed as `run`, under `folder`."""

    number: int
    folder: Path
    words: list[str]
    says: str
    steps: int
    ranks: int = 1
    processes: list[int] = field(default_factory=list)
    """Those that train now; and where they say something."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, name: str) -> None:
        """Start or resume the run of this name."""
        words = [*COMMON, *self.words, f"run.dir={self.folder}", f"run.name={name}", f"trainer.max_steps={self.steps}"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for path in self.folder.glob("said*.txt"):
            path.write_text("")
        for rank in range(self.ranks):
            launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
            launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.processes.append(fork(words, launch if self.ranks > 1 else {}, self.folder / f"said{rank}.txt"))

    def signal(self, number: int, one: int | None = None) -> None:
        for process in self.processes if one is None else [self.processes[one]]:
            os.kill(process, number)  # not yet waited for, so that it is this one still, dead or alive

    def over(self) -> bool:
        """Whether all have ended; does not wait."""
        return all(os.waitid(os.P_PID, p, os.WEXITED | os.WNOHANG | os.WNOWAIT) for p in self.processes)

    def end(self, seconds: float = 120) -> tuple[list[int], str]:
        """Wait until all have ended. Returns their exit codes and output."""
        deadline = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise Wrong(f"did not end in {seconds:.0f} s; output: {self.said()}")
            time.sleep(0.01)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in self.processes]
        said, self.processes = self.said(), []
        if "Traceback" in said:
            raise Wrong(f"ended with a traceback: {said}")
        return codes, said

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("said*.txt")))

    def step(self) -> int:
        """The last step in the metrics of the disturbed run."""
        return last_step(self.run / "metrics.jsonl")

    def wait(self, what: Callable[[], bool], seconds: float = 60) -> bool:
        """Return when it is so (True), or when the processes have ended or time is over (False)."""
        deadline = time.monotonic() + seconds
        while not what():
            if self.over() or time.monotonic() > deadline:
                return False
            time.sleep(0.003)
        return True


def fork(words: list[str], environment: dict[str, Any], output: Path) -> int:
    """python train.py WORDS in a process of its own; its number."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.environ.update({key: str(value) for key, value in environment.items()})
        sys.argv = [str(ROOT / "train.py"), *words]
        train(sys.argv[0])
    finally:
        os._exit(128 + signal.SIGINT)  # interrupted before it had begun


def train_alone(words: list[str], output: Path) -> tuple[int, str]:
    """As `soak_faults.Train`."""
    process = fork(words, {}, output)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), output.read_text()


def train(path: str) -> NoReturn:
    """What `python train.py` does."""
    code: int = 1
    try:
        spec = importlib.util.spec_from_file_location("train", path)
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        code = program.main()
    except KeyboardInterrupt:  # before the first line
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def last_step(path: Path) -> int:
    try:
        tail = path.read_bytes().splitlines()[-1:]
        return int(json.loads(tail[0])["step"]) if tail else 0
    except (OSError, ValueError):  # not there yet, or being written
        return 0


# ------------------------------------------------------------------------------------------------------- disturbances


def kill(course: Course, chance: random.Random, target: int) -> str:
    moment = chance.choice(["starting", "step", "step", "save"])
    if moment == "starting":
        seconds = chance.uniform(0, 1.5)
        course.wait(lambda: False, seconds)
        where = f"{seconds:.2f} s after its start"
    elif moment == "save":
        checkpoints = course.run / "checkpoints"
        course.wait(lambda: course.step() >= target and any(checkpoints.glob(".writing_*")))
        where = f"while it saved, after step {course.step()}"
    else:
        course.wait(lambda: course.step() >= target)
        course.wait(lambda: False, chance.uniform(0, 0.05))
        where = f"after step {course.step()}"
    victim = chance.randrange(course.ranks) if course.ranks > 1 else 0
    course.signal(signal.SIGKILL, victim)
    codes, _ = course.end()
    if codes[victim] not in (-signal.SIGKILL, 0):
        raise Wrong(f"killed, and exit code {codes[victim]}")
    return f"SIGKILL {f'of rank {victim} ' if course.ranks > 1 else ''}{where}"


def stop(course: Course, chance: random.Random, target: int) -> str:
    number = chance.choice([signal.SIGTERM, signal.SIGINT])
    if chance.random() < 0.2:
        course.wait(lambda: False, chance.uniform(0.2, 2))
    else:
        course.wait(lambda: course.step() >= target)
    at, twice = course.step(), chance.random() < 0.25
    course.signal(number)
    if twice:
        course.wait(lambda: False, chance.uniform(0, 1))
        course.signal(number)
    codes, said = course.end()
    too_early = {-signal.SIGTERM} if not said else set()  # before the first line of train.py
    if not set(codes) <= {128 + number, 0, 128 + signal.SIGTERM} | too_early:
        raise Wrong(f"stopped by {number.name}, and exit codes {codes}: {said}")
    if "saved; resume" in said:
        step = int(said.partition("after step ")[2].split(",")[0])
        newest = list_checkpoints(course.run / "checkpoints")[-1].name
        if newest != f"step_{step:08d}":
            raise Wrong(f"says that it saved step {step}, and the newest checkpoint is {newest}")
    return f"{number.name}{' twice' if twice else ''} after step {at}"


def damage(course: Course, chance: random.Random, target: int) -> str:
    what = kill(course, chance, target)
    checkpoints = [path for path in list_checkpoints(course.run / "checkpoints") if is_whole(path)]
    if len(checkpoints) < 2:  # one must be left to resume from
        return what
    path = chance.choice(sorted(checkpoints[-1].iterdir()))
    if chance.random() < 0.5:
        os.truncate(path, chance.randrange(path.stat().st_size))
    else:
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    return f"{what}, then {checkpoints[-1].name}/{path.name} damaged"


def is_whole(checkpoint: Path) -> bool:
    try:
        verify_checkpoint(checkpoint)
    except DamagedCheckpoint:
        return False
    return True


def fill_disk(course: Course, chance: random.Random, target: int) -> str:
    if not course.wait(lambda: course.step() >= target):
        course.end()
        return "done before its disk was full"
    before, hard = course.step(), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    alarmed = alarms(course.run)
    for process in course.processes:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (DISK_LIMIT, hard))
    heard = course.wait(lambda: alarms(course.run) > alarmed)
    where = f"disk full after step {before}"
    if heard and chance.random() < 0.5:
        for process in course.processes:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))
        full = course.step()
        course.wait(lambda: course.step() >= full + 6)
        return f"{where}, free again after step {full}, then {kill(course, chance, 0)}"
    ending = chance.choice([signal.SIGKILL, signal.SIGTERM])
    course.signal(ending)
    codes, said = course.end()
    if ending == signal.SIGTERM and heard and set(codes) != {1}:
        raise Wrong(f"the last save must have failed, and exit codes {codes}: {said}")
    return f"{where}, then {ending.name}"


def alarms(run: Path) -> int:
    """Alerts about checkpoints so far."""
    try:
        return sum(
            '"checkpoint"' in line and '"alert"' in line for line in (run / "events.jsonl").read_text().splitlines()
        )
    except OSError:
        return 0


DISTURBANCES = [kill, kill, stop, stop, damage, fill_disk]


# ------------------------------------------------------------------------------------------------------------- rounds


def write_corpus(folder: Path) -> None:
    """Some text, always the same; little of it is for validation, which takes time."""
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text("".join(f"def f{i * j % 17}(x): return x + {j}\n" for j in range(90)))


def courses(folder: Path, chance: random.Random, steps: int, ranks: int) -> Course:
    """The next course, at random."""
    number = len(list(folder.glob("course*")))
    recipe = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block", "fp16"][number % 5]
    words, says = [f"+recipe={recipe}", f"trainer.seed={chance.randrange(100)}"], [recipe]
    words += [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'data'}"]
    value, where = chance.choice(["nan", "inf"]), chance.choice(["loss", "activation", "gradient", "weight"])
    bad = chance.randint(steps // 2, steps - 4)
    kind = ["clean", "skip", "rewind"][number % 3]
    if kind == "skip":
        words.append(f"debug.inject={{step: {bad}, where: {where}, value: {value}}}")
        says.append(f"{value} in {where} of step {bad}")
    if kind == "rewind":
        span = [(bad - 1) * BATCH, (bad + 2) * BATCH]
        words.append(f"debug.inject={{step: 1, where: {where}, value: {value}, steps: 10000, windows: {span}}}")
        words.append("recovery.max_consecutive_skips=2")
        says.append(f"{value} in {where} wherever the data of steps {bad} to {bad + 2} is read")
    many = ranks if ranks > 1 and number % 3 == 1 else 1
    if many > 1:
        words.append("parallel=fsdp")
        says.append(f"{many} ranks")
    place = folder / f"course{number}"
    place.mkdir()
    return Course(number, place, words, ", ".join(says), steps, many)


def soak(folder: Path, rounds: int, seed: int, steps: int, ranks: int) -> None:
    """All rounds. Wrong, if something is."""
    chance, done = random.Random(seed), 0
    while done < rounds:
        course = courses(folder, chance, steps, ranks)
        course.start("reference")
        codes, said = course.end(600)
        if set(codes) != {0}:
            raise Wrong(f"course {course.number}: the reference ended with {codes}: {said}")
        here = min(rounds - done, chance.randint(4, 9))
        for left in range(here, 0, -1):
            if any(path.name == f"step_{steps:08d}" for path in list_checkpoints(course.run / "checkpoints")):
                here -= left
                break  # it is done already
            began, at = time.monotonic(), course.step()
            target = min(steps - 1, at + chance.randint(1, max(1, 2 * (steps - at) // (left + 1))))
            course.start("run")
            what = chance.choice(DISTURBANCES)(course, chance, target)
            done += 1
            seconds = time.monotonic() - began
            print(f"round {done}/{rounds}  course {course.number} ({course.says})  {what}  {seconds:.1f} s", flush=True)
        course.start("run")
        codes, said = course.end(600)
        if set(codes) != {0}:
            raise Wrong(f"course {course.number}: it ended with {codes}: {said}")
        compare(course.run, course.folder / "reference")
        print(f"course {course.number}: {here} rounds later the same bits in {steps} steps", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="times that a run is disturbed (default 50)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of what happens when (default 1); moments also vary by themselves"
    )
    parser.add_argument("--steps", type=int, default=48, help="of each run (default 48, at least 16)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes of every third run, started without torchrun (default 2)"
    )
    parser.add_argument("--faults", type=int, default=50, help="files that are damaged (default 50)")
    options = parser.parse_args()
    if options.steps < 16 or min(options.rounds, options.faults) < 0 or options.ranks < 1:
        parser.error("--steps is 16 or more, --ranks 1 or more, --rounds and --faults 0 or more")
    torch.set_num_threads(1)
    folder, began = Path(tempfile.mkdtemp(prefix="octet-soak-")), time.monotonic()
    try:
        write_corpus(folder / "corpus")
        words = [*COMMON, "+recipe=fp8_delayed", f"data.path={folder / 'corpus'}"]
        tally = faults(folder, options.faults, options.seed, words, train_alone) if options.faults else {}
        if tally:
            print(table(tally), flush=True)
        if any(found["lost"] for found in tally.values()):
            raise Wrong("files were damaged, and it was not noticed")
        soak(folder, options.rounds, options.seed, options.steps, options.ranks)
    except Wrong as wrong:
        print(f"soak: WRONG (--seed {options.seed}): {wrong}\nsee {folder}", flush=True)
        return 1
    minutes = (time.monotonic() - began) / 60
    print(
        f"soak: {options.rounds} rounds in {minutes:.1f} minutes, each run ended with the bits of the undisturbed one"
    )
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
