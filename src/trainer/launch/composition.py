"""Composing the configs of the runs that a command line asks for, with Hydra.

Hydra only composes. Its task function collects the composed configs, so that all runs of a sweep are composed, loaded
and checked before the first one starts, and a training run does not run inside Hydra.

This module imports Hydra only to compose, and never torch.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision.errors import UserError
from trainer.config_diff import is_secret
from trainer.launch.command_line import OK, REFUSED
from trainer.launch.launcher import Launch
from trainer.launch.saved_config import OwnSettings, forced, register, run_section

if TYPE_CHECKING:
    from omegaconf import DictConfig

NO_LAUNCHER = Launch()
FROM_RUN = "--from-run"
HYDRA_FOLDERS = {f"hydra.{key}" for key in ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "job.chdir")}


Own = Callable[[Mapping[str, Any], bool, str | None], OwnSettings | None]
"""`trainer.run.own_settings.own_settings`, which knows run folders."""


@dataclass
class Job:
    """A run to start: its composed config, the user's overrides for it, the settings of a run that they change, and the
    folders of configs that the command line adds to `configs/` (`file://...`)."""

    tree: "DictConfig"
    overrides: list[str]
    settings: OwnSettings | None = None
    folders: tuple[str, ...] = ()


def compose(configs: Path, launch: Launch = NO_LAUNCHER, name: str = "train", own: Own | None = None) -> list[Job]:
    """Return the runs that sys.argv asks for: one, or those of a sweep (-m), each with a name of its own.

    launch: of the processes that do the same. own: settings of a run that exists, for what starts runs.
    """
    arguments, from_run = _from_run(sys.argv[1:]) if own else (sys.argv[1:], None)
    arguments = [_as_text(_ENTRY.sub(r"\1.\2", argument)) for argument in arguments]
    for argument in arguments:
        shown = argument.encode(errors="backslashreplace").decode()
        if shown != argument:
            raise UserError(f"{shown}: not UTF-8, as a run's config has to be; rename the file or folder")
        key, _, value = argument.lstrip("+~").partition("=")
        if argument and not key:  # as of $KEY=VALUE without a KEY
            raise UserError(f"{argument}: it has no key; write KEY=VALUE")
        if key in HYDRA_FOLDERS:
            raise UserError(
                f"{argument}: it makes Hydra write folders of its own; Octet writes below run.dir; set "
                f"run.dir={value if key.endswith('.dir') else 'runs'}"
            )
        if key and (configs / key.partition("@")[0]).is_dir() and not argument.startswith("~"):
            _check_choice(configs, argument)
        if key == "recipe":
            _check_recipes(configs, argument, value)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing several lines of its own

    def settings(overrides: list[str], **more: Any) -> OwnSettings | None:
        run = run_section(configs, name, overrides) | more
        is_of_a_run = own is not None and (from_run or run.get("name") is not None or run.get("resume") is not None)
        return own(run, launch.attempt > 0, from_run) if is_of_a_run and own is not None else None

    base = settings(arguments)
    jobs, is_sweep = _composed(configs, name, arguments, base)
    if not jobs:
        if (glob := next((each for each in arguments if "glob(" in each), None)) is not None:
            raise UserError(f"{glob}: no name matches; it takes the names of a group, as +recipe='glob(fp8_*)'")
        raise SystemExit(OK)  # --cfg and the like: Hydra has printed what was asked for
    for job in jobs:
        _check_sections(job.tree)
    if is_sweep:
        if launch.under_torchrun or launch.size > 1:
            starter = "torchrun" if launch.under_torchrun else "the launcher"
            raise UserError(f"-m: {starter} starts one run; start a sweep without it, or {starter} once for each run")
        _name_runs(jobs)
    for number, job in enumerate(jobs):
        run_name = job.tree.run.name if "run" in job.tree else None
        found = settings(job.overrides, **({} if run_name is None else {"name": run_name}))
        if found is not None and (base is None or found.source != base.source):  # a run's name is known only now
            jobs[number] = job = _compose_one(configs, name, job.overrides, found, job.folders)
            job.tree.run.name = run_name
        if from_run is not None:
            job.overrides.insert(0, f"--from-run={from_run}")
        _replace_length(job)
        _fit_restarts(job.tree, launch)
    if is_sweep:
        _check_resumed(jobs)
    return jobs


_NUMBERS = re.compile(  # a whole value, one of a sweep or of a list, or that of a key in a section; not in quotes
    r"""'[^']*'|"[^"]*"|(?P<before>(?:^|[\[,]|(?P<entry>\w+)\s*:)\s*)"""
    r"(?P<number>[+-]?(?:\.?\d[\d._]*(?:e[+-]?\d+)?|nan|inf))(?=\s*(?:[\],}]|$))",
    re.IGNORECASE,
)


# data.mix[0].path=X and optim.betas[1]=X, as messages name them, are data.mix.0.path=X and optim.betas.1=X for Hydra
_ENTRY = re.compile(r"^(\+*\w[\w.]*)\[(\d+)\](?=[\w.]*=)")


def _as_text(argument: str) -> str:
    """Return KEY=VALUE with quotes around what looks like a number, where the key, or one in a list of sections, takes
    text, or texts: Hydra would read the name 2026_01_02 as 20260102, and 1e5 as 100000.0."""
    key, equals, value = argument.partition("=")
    if not any(found["number"] for found in _NUMBERS.finditer(value)):
        return argument
    from trainer.config import Config
    from trainer.config.schema import keys_of

    kinds, name = keys_of(Config), key.lstrip("+")

    def quoted(found: re.Match[str]) -> str:
        kind = kinds.get(f"{name}[].{found['entry']}" if found["entry"] else name)
        is_text = found["number"] and kind in (str, str | None, list[str])
        return f"{found['before']}'{found['number']}'" if is_text else found[0]

    return f"{key}{equals}{_NUMBERS.sub(quoted, value)}"


def _check_choice(configs: Path, argument: str) -> None:
    """Raise UserError for a choice that is no name, where Hydra would end in an error of its own or a traceback."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        given = OverridesParser.create().parse_override(argument)
    except HydraException:  # it is explained with those of other keys
        return
    value = given.value()
    names = value if isinstance(value, list) else [value]
    if given.is_sweep_override() or all(isinstance(name, str | dict) for name in names):
        return
    group = given.key_or_group
    options = ", ".join(sorted(file.stem for file in (configs / group).glob("*.yaml")))
    raise UserError(f"{argument}: {group} is chosen by a name, or a list of names ({options})")


def _check_recipes(configs: Path, argument: str, value: str) -> None:
    """Raise UserError if one of Octet's recipes in a list replaces the whole choice, or the model, of one before it."""
    files = {name: configs / "recipe" / f"{name}.yaml" for name in re.findall(r"[\w.-]+", value)}
    if not re.fullmatch(r"\[[^][]*\]", value) or not all(file.is_file() for file in files.values()):
        return
    chosen = {name: set(re.findall(r"override /(\w+):", file.read_text())) for name, file in files.items()}

    def replaces(later: str, earlier: str) -> bool:
        return "model" in chosen[later] & chosen[earlier] or chosen[earlier] <= chosen[later]

    for earlier, later in combinations(files, 2):
        if replaces(later, earlier):
            swapped = "" if replaces(earlier, later) else f", or the whole run first: +recipe=[{later},{earlier}]"
            what = " and ".join(sorted(chosen[earlier] & chosen[later]))
            raise UserError(f"{argument}: {later} replaces the {what} of {earlier}; write +recipe={later}{swapped}")


def _check_sections(tree: "DictConfig") -> None:
    """Raise now what `load` would raise about the sections that are read before it: a value in place of one, or an
    interpolation of nothing."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        sections = [tree[name] for name in ("run", "trainer") if name in tree]
        if all(isinstance(section, DictConfig) for section in sections):
            for section in sections:
                OmegaConf.to_container(section, resolve=True)
            return
    except OmegaConfBaseException:
        pass
    from trainer.config import load

    load(tree)


def _from_run(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--from-run RUN`, and RUN."""
    rest, run, words = [], None, iter(arguments)
    for word in words:
        option, _, value = word.partition("=")
        if option != FROM_RUN:
            rest.append(word)
        elif run is not None:
            raise UserError(f"{FROM_RUN}: given twice; name one run")
        elif not (run := value or next(words, "")):
            raise UserError(f"{FROM_RUN}: the run is missing; give its folder, as {FROM_RUN} runs/NAME")
    return rest, run


def _composed(configs: Path, name: str, arguments: list[str], base: OwnSettings | None) -> tuple[list[Job], bool]:
    """Return the runs that Hydra composes, and whether they are a sweep. Of a sweep Hydra writes a config: into a
    temporary folder."""
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
        sources = settings.runtime.config_sources
        folders = tuple(f"{each.schema}://{each.path}" for each in sources if each.provider.endswith("command-line"))
        jobs.append(Job(tree, overrides if base is None else [o.removeprefix("++") for o in overrides], base, folders))

    primary = name if base is None else register(configs, name, base.tree)
    typed, sys.argv[1:] = sys.argv[1:], arguments if base is None else forced(configs, arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
            _read_by_hydra(
                configs, hydra.main(version_base="1.3", config_path=str(configs), config_name=primary)(collect)
            )
    finally:
        sys.argv[1:] = typed
    return jobs, any(sweeps)


def _compose_one(
    configs: Path, name: str, arguments: list[str], base: OwnSettings | None = None, folders: tuple[str, ...] = ()
) -> Job:
    """Return what hydra.main composes for one run. hydra.main composes twice, first for `hydra.mode`: 0.2 s more."""
    import hydra
    from hydra.core.override_parser.types import Quote, QuotedString

    primary, words = name, arguments
    if base is not None:
        primary, words = register(configs, name, base.tree), forced(configs, arguments)
    if folders:
        quoted = ",".join(QuotedString(folder, Quote.single).with_quotes() for folder in folders)
        words = [*words, f"hydra.searchpath=[{quoted}]"]
    trees: list[DictConfig] = []
    with hydra.initialize_config_dir(str(configs), job_name=name, version_base="1.3"):
        _read_by_hydra(configs, lambda: trees.append(hydra.compose(primary, words)))
    return Job(trees[0], list(arguments), base)


def _read_by_hydra(configs: Path, task: Callable[[], None]) -> None:
    """Run a task that reads sys.argv. Raises UserError for options that do not exist, for which Hydra prints its usage,
    and for Hydra's own failures."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            task()
    except SystemExit as end:
        if end.code != REFUSED:
            sys.stderr.write(stderr.getvalue())
            raise
        raise UserError(_explain_option(stderr.getvalue())) from None
    except MissingConfigException as error:
        if error.options is None and error.missing_cfg_file and "/" in error.missing_cfg_file:  # one of a list
            error.options = sorted(file.stem for file in (configs / error.missing_cfg_file).parent.glob("*.yaml"))
        raise
    except OmegaConfBaseException:  # some are ValueErrors, too
        raise
    except UnicodeDecodeError as error:
        near = error.object[: error.start].decode(errors="replace").split("\n")[-1]
        raise UserError(f"a file of configs is not UTF-8 text, after {near!r}; save it as UTF-8") from error
    except ValueError as error:
        raise UserError(f"the command line cannot be read ({error}); write KEY=VALUE, as --help shows") from error
    with contextlib.suppress(OSError):  # its disk may be full, or its terminal closed: unbuffered, "" fails there, too
        sys.stderr.write(stderr.getvalue())


def _explain_option(usage: str) -> str:
    """Return the error in argparse's output: `usage: ... error: unrecognized arguments: --x 3`."""
    problem = usage.rpartition(" error: ")[2].strip()
    _, unknown, words = problem.partition("unrecognized arguments: ")
    if not unknown:
        return f"{problem.removeprefix('argument ')}; see --hydra-help"
    from trainer.config import suggestion_for

    option = next((word for word in words.split() if word.startswith("-")), None)
    if option is None:
        typed = " ".join(word.removeprefix("++") for word in words.split())  # added to keys of a saved config
        return f"{typed}: an option stands between KEY=VALUE arguments; write options such as -m first"
    meant = suggestion_for(option.lstrip("-").partition("=")[0])
    hint = f"did you mean {meant}=VALUE?" if meant else "--help and --hydra-help list the options"
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
        raise UserError(
            f"--max-restarts={launch.max_restarts}: a run without a name cannot continue after a restart; set run.name"
        )
    if launch.attempt:
        tree.run.resume = "auto"


def _name_runs(jobs: list[Job]) -> None:
    """Give each run of a sweep with one run.name its own: that name, a number, and the run's overrides.

    Without a name, a run is named by its time and recipe anyway; names that differ (run.name=a,b) stay.
    """
    names = [job.tree.run.name for job in jobs]
    if None not in names and len(set(names)) == len(names):
        return
    common = set.intersection(*(set(job.overrides) for job in jobs))
    for number, job in enumerate(jobs):
        own = [override.partition("=") for override in job.overrides if override not in common]
        own = [pair for pair in own if not is_secret(pair[0])]
        words = [re.sub(r"[^\w.-]+", "-", f"{key.split('.')[-1]}-{value}").strip("-") for key, _, value in own]
        if job.tree.run.name is not None:
            first = f"{job.tree.run.name}_{number}"
            job.tree.run.name = "_".join([first, *words])[: max(120, len(first))]


def _check_resumed(jobs: list[Job]) -> None:
    """Raise UserError if runs of a sweep would resume in one folder, one after the other."""
    from trainer.config.paths import NO_PATHS, as_typed

    def folder_of(path: str, job: Job) -> str:
        """The run's, where the path is that of a checkpoint, too."""
        run = {} if job.settings is None else job.settings.tree["run"]
        return path if path in NO_PATHS else os.path.realpath(os.path.join(run["dir"], run["name"]) if run else path)

    given = [str(job.tree.run.resume) for job in jobs]
    places = [folder_of(path, job) for path, job in zip(given, jobs, strict=True)]
    for path, place in zip(given, places, strict=True):
        if path not in NO_PATHS and places.count(place) > 1:
            raise UserError(
                f"run.resume={path}: {places.count(place)} runs of the sweep would continue in one folder; "
                f"start each from its weights with {as_typed('run.init_from', path)}, or leave out -m"
            )
