"""The runs of the soak test (`soak.py`): forked from one process, in copies of a course. Not a command of its own."""

import gc
import importlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from bits import SoakFailure, differs, metrics, state

import trainer.run.run_folder as run_folder
from trainer.checkpoint import list_checkpoints
from trainer.files import parse_line

ROOT = Path(__file__).resolve().parents[2]
STEPS, COPIED_AT = 8, 6
COMMON = [
    "model.vocab_size=320", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.kv_lora_rank=32",
    "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.intermediate_size=96",
    "model.moe_intermediate_size=32", "model.num_experts=4", "trainer.global_batch_size=4", "trainer.microbatch_size=2",
    "trainer.sequence_length=24", f"trainer.max_steps={STEPS}", "trainer.device=cpu", "optim.warmup_steps=4",
    "eval.every=0", "eval.at_end=4", "logging.every=1", "logging.console.enabled=false", "checkpoint.every=2",
    "checkpoint.keep=0", "data=text", "data.validation_fraction=0.01", "health.dashboard=false", "run.resume=auto",
]  # fmt: skip


def write_corpus(folder: Path) -> None:
    """Write some text, always the same."""
    (folder / "corpus").mkdir()
    for i in range(12):
        text = "".join(f"def f{i * j % 17}(x): return x + {j}\n" for j in range(90))
        (folder / "corpus" / f"{i}.txt").write_text(text)


def warm_up(folder: Path) -> None:
    """Import what a run imports, so that no fork has to."""
    known, names = set(sys.modules), folder / "modules.txt"

    def list_modules() -> None:
        names.write_text("\n".join(sys.modules))

    words = [*COMMON, "parallel=fsdp", "run.name=run", f"data.path={folder / 'corpus'}", f"run.dir={folder / 'warm'}"]
    os.waitpid(fork(words, {}, folder / "printed.txt", list_modules), 0)
    for name in names.read_text().split():
        if name not in known and name not in sys.modules:
            importlib.import_module(name)
    environment = run_folder.environment()
    run_folder.environment = lambda: environment
    gc.freeze()  # else each fork copies what it collects


@dataclass
class Job:
    """The processes of one run, and their output files."""

    processes: list[int]
    outputs: list[Path]
    codes: list[int] = field(default_factory=list)

    def signal(self, number: int, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            os.kill(process, number)  # not yet waited for, so its number is still valid, dead or alive

    def over(self) -> bool:
        """Return whether all have ended; does not wait."""
        return all(os.waitid(os.P_PID, p, os.WEXITED | os.WNOHANG | os.WNOWAIT) for p in self.processes)

    def end(self, seconds: float = 300) -> str:
        """Wait until all have ended, and fill `codes`. Returns their output. Raises SoakFailure for a traceback."""
        deadline = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise SoakFailure(f"did not end in {seconds:.0f} s; it printed: {self.printed()}")
            time.sleep(0.02)
        self.codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in self.processes]
        if "Traceback" in (printed := self.printed()):
            raise SoakFailure(f"ended with a traceback: {printed}")
        return printed

    def printed(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.outputs)


class Course:
    """One training: its undisturbed reference, and copies of its folder that are disturbed.

    place: a copy's folder, with `runs/run` and `data`. words: the command line of a start. A run that has a config is
    resumed by its name, with `debug.inject`, which holds for one start.
    """

    def __init__(self, folder: Path, words: list[str], ranks: int) -> None:
        self.folder, self.ranks, self.base, place = folder, ranks, folder / "base", folder / "copy"
        folder.mkdir()
        self.config, named = place / "runs" / "run" / "config.yaml", ["run.name=run", f"run.dir={place / 'runs'}"]
        self.by_name = [*named, *(word for word in words if word.startswith("debug."))]
        data = [f"data.path={folder.parent / 'corpus'}", f"data.cache_dir={place / 'data'}"]
        self.words = [*COMMON, *words, *named, *data]
        job = self.start()
        printed = job.end()
        if any(job.codes):
            raise SoakFailure(f"{folder.name}: the reference ended with {job.codes}: {printed}")
        place.rename(self.base)
        run = self.base / "runs" / "run"
        self.state, self.metrics = state(run, STEPS), metrics(run)
        for checkpoint in list_checkpoints(run / "checkpoints"):
            if int(checkpoint.name[5:]) > COPIED_AT:
                shutil.rmtree(checkpoint)
        self.events: set[str] = set()
        place, began = self.copy(), time.monotonic()
        if self.verdict(place, refusable=False) != "noticed":  # by its new events, which are normal for a resume
            raise SoakFailure(f"{folder.name}: a resume has no event")
        self.seconds, self.events = time.monotonic() - began, new_events(place, self.base)

    def copy(self) -> Path:
        """Copy the base, in place of the last copy."""
        place = self.folder / "copy"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.base, place, symlinks=True)
        return place

    def start(self) -> Job:
        """Start the run in the copy or resume it, with as many processes as the course has."""
        words = self.by_name if self.config.exists() else self.words
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = Job([], [self.folder / f"printed{rank}.txt" for rank in range(self.ranks)])
        for rank, output in enumerate(job.outputs):
            launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
            launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            job.processes.append(fork(words, launch if self.ranks > 1 else {}, output))
        return job

    def verdict(self, place: Path, refusable: bool) -> str:
        """Resume the run in `place` to its end: return noticed or same, or raise SoakFailure. refusable: it may
        refuse."""
        job = self.start()
        printed = job.end()
        if any(job.codes):
            lines = [line for line in printed.splitlines() if line]
            if refusable and len(lines) == 1 and lines[0].startswith("octet: error: "):
                return "noticed"
            raise SoakFailure(f"exit codes {job.codes}: {printed}")
        run, noticed = place / "runs" / "run", "octet: " in printed or bool(new_events(place, self.base) - self.events)
        if (where := differs(state(run, STEPS), self.state)) is not None:
            raise SoakFailure(f"{where} has other bits{', though damage was reported' * noticed}: {printed}")
        if not refusable:
            ours, wanted = metrics(run), self.metrics
            if "metrics.jsonl can be written again; " in (run / "logs" / "rank0.log").read_text(errors="replace"):
                wanted = {step: wanted[step] for step in ours}  # a full disk lost lines, and the run has reported it
            if (where := differs(ours, wanted)) is not None:
                raise SoakFailure(f"metrics: {where} has other bits")
        return "noticed" if noticed else "same"


def new_events(place: Path, base: Path) -> set[str]:
    """Return the events of a copy beyond those of the base, without numbers and damaged lines."""

    def messages(path: Path) -> Counter[str]:
        lines = path.read_bytes().splitlines() if path.is_file() else []
        found = [entry for line in lines if (entry := parse_line(line)) is not None]
        return Counter(re.sub(r"[\d.,]+", "#", f"{entry.get('kind')} {entry.get('message')}") for entry in found)

    return set(messages(place / "runs/run/events.jsonl") - messages(base / "runs/run/events.jsonl"))


def fork(words: list[str], environment: dict[str, Any], output: Path, after: Callable[[], None] | None = None) -> int:
    """Run python train.py with these words in its own process. Returns the process number."""
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
        train(after)
    finally:
        os._exit(128 + signal.SIGINT)  # interrupted before it had begun


def train(after: Callable[[], None] | None) -> NoReturn:
    """Run what `python train.py` runs, then `after`."""
    code: int = 1
    try:
        spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        code = program.main()
        if after is not None:
            after()
    except KeyboardInterrupt:  # before the first line
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
