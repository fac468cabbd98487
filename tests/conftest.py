"""What all tests share: one thread each, since several processes run tests at once; the same examples in every run.

Without a GPU, Triton's kernels run in its interpreter. That is set before Triton is imported, whichever test is
collected first.
"""

import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; programs that tests start inherit it

import pytest
import torch
import yaml_once  # noqa: F401 (it does so)
from composed import SHARED
from hypothesis import settings
from omegaconf import OmegaConf
from ports import free_port

# Tests of these folders use GPUs; to all others a machine with GPUs is one without, whose kernels are interpreted.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    on_gpus = [Path(__file__).parent / name for name in ("gpu", "precision/kernels")]
    words = (word for before, word in itertools.pairwise(sys.argv) if before not in ("--ignore", "--deselect"))
    asked = [Path.cwd(), *(Path(word).absolute() for word in words)]
    if not any(place.is_relative_to(folder) for place in asked for folder in on_gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        import triton_interpreter  # noqa: F401 (it corrects and hastens the interpreter)

from precision import PrecisionConfig

# ranks that run a test's file as a program import from there, too
SUPPORT = str(Path(__file__).with_name("support"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))

# A run freezes what lives long, and looks at all of it before: in a process of many runs, once in a while is enough.
_unfreeze, _runs = gc.unfreeze, itertools.count(1)
gc.unfreeze = lambda: _unfreeze() if next(_runs) % 25 == 0 else None

settings.register_profile("octet", deadline=None, derandomize=True)
settings.load_profile("octet")

CONFIGS = Path(__file__).parents[1] / "configs" / "precision"
NO_FP8_PRODUCT = {
    "_scaled_mm only supports per-tensor scaling for CPU": "torch 2.11 multiplies with scales per row on GPUs only",
    # torch 2.13 takes oneDNN's product if the CPU has AMX, even where make test-elsewhere denies oneDNN the use of AMX
    "could not create a primitive descriptor for the matmul primitive": "oneDNN may not use this CPU's instructions",
}


# of the shell that the tests run in, not of what they look at
for name in ("COLUMNS", "FORCE_COLOR", "PYTHONWARNINGS"):
    os.environ.pop(name, None)


def pytest_configure(config: pytest.Config) -> None:
    """What processes of this run compose, they compose once for all."""
    if SHARED not in os.environ:  # a worker has the folder of who started it
        folder = os.environ[SHARED] = tempfile.mkdtemp(prefix="composed_")
        config.add_cleanup(partial(shutil.rmtree, folder))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test of the kernels in the interpreter if torch has no such FP8 product on this CPU."""
    try:
        return (yield)
    except RuntimeError as error:
        why = next((why for text, why in NO_FP8_PRODUCT.items() if text in str(error)), None)
        frames = traceback.extract_tb(error.__traceback__)
        if why is not None and any(frame.filename.endswith("scaled_mm.py") for frame in frames):
            pytest.skip(why)
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With -n auto: one worker more than CPUs, since some tests wait for processes that give up or die; 4 GiB for each;
    at most 26, since more have not been tried."""
    from trainer.launch.device import host_cpus, host_memory

    return max(2, min(host_cpus() + 1, int(host_memory()) >> 32, 26))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (-n 2), tests of a file that makes something once for all of them, such as runs on ranks, go
    to one worker; other tests to whichever is free. Not where --dist says otherwise."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if makes_once(config.rootpath / file) else nodeid

    @cache
    def makes_once(file: Path) -> bool:
        return '(scope="module"' in file.read_text()

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, or a worker has one of them left when the others are done."""
    long = "test_docs.py", "test_launched_ranks.py", "test_hopper.py", "test_operators.py", "test_blocks.py"
    items.sort(key=lambda item: item.path.name not in long)


def pytest_collection_finish() -> None:
    """What is imported by now lives as long as this process: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What inductor compiles for a CPU takes a C++ compiler."""
    backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler (g++), which torch.compile needs on a CPU")
    if backend == "inductor" and " " in torch.__file__:
        pytest.skip("torch is in a folder with a space in its name, which Inductor does not quote for the linker")


def load(name: str, **overrides: object) -> PrecisionConfig:
    """A precision config by file name; overrides by dotted key with __ for dots, e.g. scaling__method='current'."""
    merged = OmegaConf.merge(OmegaConf.structured(PrecisionConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"))
    for key, value in overrides.items():
        OmegaConf.update(merged, key.replace("__", "."), value)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, PrecisionConfig)
    return config


@pytest.fixture
def recipe() -> Callable[..., PrecisionConfig]:
    return load


class Program:
    """A program that a `Programs` has started; like a subprocess.Popen whose outputs are texts."""

    def __init__(self, programs: "Programs", words: Sequence[str], pid: int, outputs: Sequence[Path]):
        self.args, self.pid, self.returncode = words, pid, None
        self._programs, self._outputs = programs, outputs

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._programs.ask({"codes": [self.pid]})[0]
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for its end. Returns stdout and stderr."""
        began = time.monotonic()
        while self.poll() is None:
            if (waited := time.monotonic() - began) > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(max(0.005, min(0.1, waited / 30)))  # each poll takes CPU time that the program could have
        out, err = (path.read_text() for path in self._outputs)
        return out, err

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """By SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Programs:
    """Starts Python programs in processes that have imported torch already; see `forks`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._count = itertools.count()

    def start(self, *words: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> Program:
        """`python WORDS` in a folder, with more variables of the environment."""
        number = next(self._count)
        outputs = [self._folder / f"{number}.{name}" for name in ("out", "err")]
        job = {
            "words": [str(word) for word in words],
            "folder": str(cwd or Path.cwd()),
            "outputs": [str(path) for path in outputs],
            "environment": {**os.environ, **(environment or {})},
        }
        return Program(self, job["words"], self.ask({"start": job}), outputs)

    def run(
        self, *words: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        program = self.start(*words, cwd=cwd, environment=environment)
        out, err = program.communicate()
        return subprocess.CompletedProcess(program.args, cast(int, program.returncode), out, err)

    def run_ranks(self, program: str, size: int, *words: object, patience: float = 540) -> None:
        """A program in so many processes, which meet by torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

        All have to end well, within `patience` seconds. When one fails, the others, which may wait for it, are killed
        after a moment."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        who = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        ranks = [self.start(program, *words, environment=place) for place in who]
        began = time.monotonic()
        while None in (codes := [rank.poll() for rank in ranks]):
            if any(codes) or time.monotonic() - began > patience:
                time.sleep(5)
                for rank in ranks:
                    rank.kill()
            time.sleep(max(0.005, min(0.1, (time.monotonic() - began) / 30)))
        printed = ["".join(text[-3000:] for text in rank.communicate()) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(printed)

    def ask(self, what: dict[str, Any]) -> Any:
        """What the server says to that."""
        if self._server is None:
            pipe, command = subprocess.PIPE, [sys.executable, str(Path(__file__).with_name("forks.py"))]
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(what), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Where tests run programs."""
    made = Programs(tmp_path_factory.mktemp("programs"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_python(programs: Programs) -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_python(*words, cwd=..., environment=...): see `Programs.run`."""
    return programs.run


@pytest.fixture(scope="session")
def start_ranks(programs: Programs) -> Callable[..., None]:
    """start_ranks(program, size, *arguments): see `Programs.run_ranks`."""
    return programs.run_ranks


@pytest.fixture(scope="session")
def ask_ranks(
    start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[int, Any]]:
    """ask_ranks(program, sizes, *words): what a program that runs as so many ranks writes as JSON into the file that it
    is given, by their number."""

    def ask(program: str, sizes: Iterable[int], *words: str, patience: float = 540) -> dict[int, Any]:
        said = {}
        for size in sizes:
            out = tmp_path_factory.mktemp("ranks") / "said.json"
            start_ranks(program, size, out, *words, patience=patience)
            said[size] = json.loads(out.read_text())
        return said

    return ask
