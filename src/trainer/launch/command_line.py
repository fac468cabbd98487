"""The command line: composing the config with Hydra, and errors in one line.

Hydra only composes. Its task function collects the composed configs, so that all runs of a sweep are composed, loaded
and checked before the first one starts, and a training run does not run inside Hydra.

A `precision.errors.UserError` ends in one line, `octet: error: KEY=VALUE: what is wrong; what to do`. Hydra's own
errors take several, and advise to add a mistyped key to the config: they are reworded here. Everything else is a bug
and keeps its traceback. With several processes, one prints it.

This module imports torch only after an error, and Hydra only to compose: `--help` is quick, and Ctrl-C reaches
`guarded`.
"""

import argparse
import contextlib
import io
import os
import re
import select
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO

from trainer.config_diff import is_secret
from trainer.files import FULL, SOURCE
from trainer.launch.launcher import Launch, user_error
from trainer.launch.liveness.rank_group import RankGroup, Terminated
from trainer.launch.saved_base import forced, register, run_section

if TYPE_CHECKING:
    from omegaconf import DictConfig

OK, FAILED, REFUSED, INTERRUPTED, CUT_OFF, TERMINATED = 0, 1, 2, 130, 141, 143
NO_LAUNCHER = Launch()
FROM_RUN = "--from-run"
LONGEST_MESSAGE = 4000
HYDRA_FOLDERS = {f"hydra.{key}" for key in ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "job.chdir")}


class Settings(Protocol):
    """The config of a run that the command line changes: `trainer.run.own_settings.OwnSettings`."""

    @property
    def tree(self) -> dict[str, Any]: ...
    @property
    def source(self) -> str: ...
    def line(self, config: Mapping[str, Any]) -> str: ...


Own = Callable[[Mapping[str, Any], bool, str | None], Settings | None]
"""`trainer.run.own_settings.own_settings`, which knows run folders."""


@dataclass
class Job:
    """A run to start: its composed config, the user's overrides for it, and the settings of a run that they change."""

    tree: "DictConfig"
    overrides: list[str]
    settings: Settings | None = None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows its help as written, and raises UserError: one line, as for all other errors."""

    def __init__(self, description: str | None = None, **settings: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as UserError."""
        raise user_error(f"{message.removeprefix('argument ')}; {self.prog} --help says what it takes")


def compose(configs: Path, launch: Launch = NO_LAUNCHER, name: str = "train", own: Own | None = None) -> list[Job]:
    """Return the runs that sys.argv asks for: one, or those of a sweep (-m), each with a name of its own.

    launch: of the processes that do the same. own: settings of a run that exists, for what starts runs.
    """
    arguments, from_run = _from_run(sys.argv[1:]) if own else (sys.argv[1:], None)
    for argument in arguments:
        shown = argument.encode(errors="backslashreplace").decode()
        if shown != argument:
            raise user_error(f"{shown}: not UTF-8, as which a run keeps what produced it; rename what this names")
        key, _, value = argument.lstrip("+~").partition("=")
        if key in HYDRA_FOLDERS:
            raise user_error(
                f"{argument}: Hydra makes folders of its own with it, and Octet's are below run.dir; set "
                f"run.dir={value if key.endswith('.dir') else 'runs'}"
            )
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing several lines of its own

    def settings(overrides: list[str], **more: Any) -> Settings | None:
        run = run_section(configs, name, overrides) | more
        is_of_a_run = own is not None and (from_run or run.get("name") is not None or run.get("resume") is not None)
        return own(run, launch.attempt > 0, from_run) if is_of_a_run and own is not None else None

    base = settings(arguments)
    jobs, is_sweep = _composed(configs, name, arguments, base)
    if not jobs:  # --cfg and the like: Hydra has printed what was asked for
        raise SystemExit(OK)
    if is_sweep:
        if launch.under_torchrun:
            raise user_error("-m: torchrun starts one run; start a sweep without it, or torchrun once for each run")
        _name_runs(jobs)
        _check_resumed(jobs)
    for number, job in enumerate(jobs):
        run_name = _run_name(job.tree)
        found = settings(job.overrides, **({} if run_name is None else {"name": run_name}))
        if found is not None and (base is None or found.source != base.source):  # a run's name is known only now
            jobs[number] = job = _compose_one(configs, name, job.overrides, found)
            job.tree.run.name = run_name
        if from_run is not None:
            job.overrides.insert(0, f"--from-run={from_run}")
        _replace_length(job)
        _fit_restarts(job.tree, launch)
    return jobs


def _run_name(tree: "DictConfig") -> str | None:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return (tree.get("run") or {}).get("name")
    except OmegaConfBaseException:  # an interpolation of nothing: load() reports it
        return None


def _from_run(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without `--from-run RUN`, and RUN."""
    rest, run, words = [], None, iter(arguments)
    for word in words:
        option, _, value = word.partition("=")
        if option != FROM_RUN:
            rest.append(word)
        elif not (run := value or next(words, "")):
            raise user_error(f"{FROM_RUN}: of which run? Give its folder, as {FROM_RUN} runs/NAME")
    return rest, run


def _composed(configs: Path, name: str, arguments: list[str], base: Settings | None) -> tuple[list[Job], bool]:
    """What Hydra composes, and whether it is a sweep, whose config Hydra writes: into a folder that disappears."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if not any(argument.lstrip("+~").startswith(("-", "hydra")) for argument in arguments):
        return [_compose_one(configs, name, arguments, base)], False
    jobs: list[Job] = []
    sweeps: list[bool] = []

    def collect(tree: "DictConfig") -> None:
        settings = HydraConfig.get()
        sweeps.append(settings.mode is RunMode.MULTIRUN)
        overrides = [str(override) for override in OmegaConf.to_container(settings.overrides.task) or []]
        jobs.append(Job(tree, overrides if base is None else [o.removeprefix("++") for o in overrides], base))

    primary = name if base is None else register(configs, name, base.tree)
    typed, sys.argv[1:] = sys.argv[1:], arguments if base is None else forced(configs, arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
            _read_by_hydra(hydra.main(version_base="1.3", config_path=str(configs), config_name=primary)(collect))
    finally:
        sys.argv[1:] = typed
    return jobs, any(sweeps)


def _compose_one(configs: Path, name: str, arguments: list[str], base: Settings | None = None) -> Job:
    """Return what hydra.main composes for one run. hydra.main composes twice, first for `hydra.mode`: 0.2 s more."""
    import hydra

    primary, words = name, arguments
    if base is not None:
        primary, words = register(configs, name, base.tree), forced(configs, arguments)
    trees: list[DictConfig] = []
    with hydra.initialize_config_dir(str(configs), job_name=name, version_base="1.3"):
        _read_by_hydra(lambda: trees.append(hydra.compose(primary, words)))
    return Job(trees[0], list(arguments), base)


def _read_by_hydra(task: Callable[[], None]) -> None:
    """Run a task that reads sys.argv. Raises UserError for options that do not exist, for which Hydra prints its usage,
    and for Hydra's own failures."""
    from omegaconf.errors import OmegaConfBaseException

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            task()
    except SystemExit as end:
        if end.code != REFUSED:
            sys.stderr.write(said.getvalue())
            raise
        raise user_error(_explain_option(said.getvalue())) from None
    except OmegaConfBaseException:  # some are ValueErrors, too
        raise
    except ValueError as error:
        raise user_error(f"the command line cannot be read ({error}); write KEY=VALUE, as --help shows") from error
    sys.stderr.write(said.getvalue())


def _explain_option(usage: str) -> str:
    """Return the error in argparse's output: `usage: ... error: unrecognized arguments: --x 3`."""
    problem = usage.rpartition(" error: ")[2].strip()
    _, unknown, words = problem.partition("unrecognized arguments: ")
    if not unknown:
        return f"{problem.removeprefix('argument ')}; --hydra-help says what it takes"
    from trainer.config import meant_by

    option = next((word for word in words.split() if word.startswith("-")), None)
    if option is None:
        return f"{words}: separated from the other KEY=VALUE by an option; write options such as -m before all of them"
    meant = meant_by(option.lstrip("-").partition("=")[0])
    hint = f"did you mean {meant}=VALUE?" if meant else "--help and --hydra-help list what there is"
    return f"{option}: there is no such option, and keys are written KEY=VALUE, without dashes; {hint}"


def _replace_length(job: Job) -> None:
    """Keep one length of a run: of steps and tokens, the one on the command line replaces the other."""
    trainer = job.tree.get("trainer") or {}
    given = {override.lstrip("+").partition("=")[0] for override in job.overrides}
    for key, other in (("max_tokens", "max_steps"), ("max_steps", "max_tokens")):
        replaces = f"trainer.{key}" in given and f"trainer.{other}" not in given
        if replaces and trainer.get(key) is not None and other in trainer:
            job.tree.trainer[other] = None


def _fit_restarts(tree: "DictConfig", launch: Launch) -> None:
    """Let a run that torchrun restarts resume from its newest checkpoint, whatever it started from."""
    if launch.max_restarts and tree.run.name is None:
        raise user_error(
            f"--max-restarts={launch.max_restarts}: a run without a name cannot continue after a restart; set run.name"
        )
    if launch.attempt:
        tree.run.resume = "auto"


def _name_runs(jobs: list[Job]) -> None:
    """Give each run of a sweep with one run.name its own: that name, a number, and the run's overrides.

    Without a name, a run is named by its time and recipe anyway.
    """
    common = set.intersection(*(set(job.overrides) for job in jobs))
    for number, job in enumerate(jobs):
        own = [override.partition("=") for override in job.overrides if override not in common]
        own = [pair for pair in own if not is_secret(pair[0])]
        words = [re.sub(r"[^\w.-]+", "-", f"{key.split('.')[-1]}-{value}").strip("-") for key, _, value in own]
        if job.tree.run.name is not None:
            job.tree.run.name = "_".join([str(job.tree.run.name), str(number), *words])[:120]


def _check_resumed(jobs: list[Job]) -> None:
    """Raise UserError if runs of a sweep would resume in one folder, one after the other."""
    from trainer.config.paths import NO_PATHS

    given = [str(job.tree.run.resume) for job in jobs]
    for path in given:
        if path not in NO_PATHS and given.count(path) > 1:
            raise user_error(
                f"run.resume={path}: {given.count(path)} runs of the sweep would continue in one folder; "
                f"start each from its weights with run.init_from={path}, or leave out -m"
            )


def guarded(main: Callable[[], None], rank_group: RankGroup | None = None) -> int:
    """Run main() and return its exit code. Expected errors become one line on stderr, bugs keep their traceback.

    rank_group: of the processes that do the same. An error of all is reported by one; an error of one ends all.
    """
    handlers = {}
    if rank_group is None:  # a script; train.py's listens after it has read the environment
        rank_group = RankGroup()
        handlers = rank_group.listen()

    def judge(error: BaseException) -> tuple[str | None, int] | None:
        end = _judge(error, rank_group.stop_signal)
        return None if end.orderly or end.by_signal else (end.message, end.code)

    rank_group.judge = judge
    try:
        with _own_warnings_in_one_line():
            main()
    except (Exception, KeyboardInterrupt) as error:
        if (
            isinstance(error, BrokenPipeError) and not rank_group.connected and _has_no_reader(sys.stdout)
        ):  # `--help | head`
            return CUT_OFF
        rank_group.decided()
        end = _judge(error, rank_group.stop_signal)
        if rank_group.connected and end.by_signal:
            rank_group.stopped(end.message or "", end.code)
        if rank_group.connected and not end.orderly:
            rank_group.failed(error, end.code, end.message, of_all=end.code == REFUSED)
        first = (
            rank_group.launch.is_first
            if rank_group.connected
            else rank_group.first_to_say(end.message or repr(error), end.code)
        )
        if end.message is None and first:
            if rank_group.launch.size > 1:
                error.add_note(f"on rank {rank_group.launch.rank}")
            raise
        if end.message is not None and first:
            with contextlib.suppress(OSError):  # its terminal may be closed
                print(f"octet: {end.message}", file=sys.stderr, flush=True)
        rank_group.leave()
        return rank_group.exit(end.code)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return OK


@contextlib.contextmanager
def _own_warnings_in_one_line() -> Iterator[None]:
    """Print our warnings, which are about the user's input, without the place in the code that Python adds."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], file: str, number: int, line: str | None = None) -> str:
        ours = Path(file).is_relative_to(SOURCE)
        return f"octet: {message}\n" if ours else usual(message, category, file, number, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream's reader is gone. If so, its buffer is discarded instead of raising at exit."""
    state = select.poll()
    state.register(stream.fileno(), 0)  # report errors only
    if not state.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return True


@dataclass
class _End:
    """How main ended. message: None for a bug. orderly: all processes end like this, each on its own. by_signal: a
    signal ended this process."""

    message: str | None
    code: int
    orderly: bool = False
    by_signal: bool = False


def _judge(error: BaseException, stop_signal: int) -> _End:
    """Classify the error that ended main. stop_signal: number of the signal that asked main to end; 0: none."""
    if isinstance(error, KeyboardInterrupt):
        return _by_signal(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from trainer.launch.composition_errors import explain

    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        return _End(_one_line(f"error: {explain(error, sys.argv[1:])}"), REFUSED)
    from precision.errors import RunError, UserError

    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return _End("error: out of GPU memory; lower trainer.microbatch_size, or set recompute=full", FAILED)
    if isinstance(error, UserError | RunError | OSError):
        code = REFUSED if isinstance(error, UserError) else getattr(error, "exit_code", FAILED)
        word = "error: " if code < 128 else ""  # a run stopped by a signal has saved, as it should
        text = _of_a_file(error) if isinstance(error, OSError) else str(error)
        return _End(_one_line(f"{word}{text}"), code, orderly=hasattr(error, "exit_code"))
    if stop_signal:  # an interrupt during an import of torch, say, may surface as any error
        return _by_signal(stop_signal)
    return _End(None, FAILED)


def _by_signal(number: int) -> _End:
    if number == signal.SIGINT:
        return _End("interrupted", INTERRUPTED, by_signal=True)
    return _End("terminated", TERMINATED, by_signal=True)


def _of_a_file(error: OSError) -> str:
    """Format a file error: the system's own message names the path last, and no fix."""
    if error.filename is None:
        return str(error)
    fix = "free space" if error.errno in FULL else "correct the path or its permissions"
    return f"{error.filename}: {error.strerror}; {fix}, or name another place"


def _one_line(text: str) -> str:
    """Return a message, which may quote files, without cursor control, on one line of bounded length."""
    line = " ".join(text.split())
    line = (
        line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
    )
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
