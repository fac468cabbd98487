"""The command line: each mistake ends in one clear line and leaves nothing behind."""

import importlib.util
import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import trainer.trainer
from precision.errors import UserError
from trainer.config import Config
from trainer.config.paths import kept_tree
from trainer.digests import stamped
from trainer.launch.command_line import guarded
from trainer.launch.composition import compose
from trainer.launch.launcher import Launch
from trainer.launch.world import World
from trainer.sinks import Summary

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """Stands in for the Trainer: notes what it was given."""

    def __init__(self) -> None:
        self.runs: list[tuple[Config, list[str]]] = []

    def __call__(self, config: Config, overrides: list[str], world: World) -> "Recorder":
        assert not world.is_distributed
        self.runs.append((config, overrides))
        self.run = SimpleNamespace(config=replace(config, eval=replace(config.eval, sample=0)))
        return self

    def train(self) -> Summary:
        return Summary(Path("runs/x"), 270, 3.5, 3.7, 1000.0, 0.5, 0)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(trainer.trainer, "Trainer", recorder)
    return recorder


Call = Callable[..., int]


@pytest.fixture
def call(program: ModuleType, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """python train.py ARGUMENTS in an empty folder, in this process; its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return program.main()

    return run


MISTAKES = {
    # a key that does not exist, however it is added
    "model.dimm=3": "model.dimm=3: there is no such key; did you mean model.",
    "+model.dimm=3": "model.dimm=3: there is no such key; did you mean model.",
    "++model.dimm=3": "model.dimm=3: there is no such key; did you mean model.",
    "-m model.dimm=3,4": "model.dimm=3,4: there is no such key; did you mean model.",
    "~optim.lrr": "~optim.lrr: there is no such key to delete",
    "~optim.lr": "optim.lr: has no value; it must be a number",
    "hydra.foo=3": "hydra.foo=3: Hydra has no such setting",
    "precision.scaling.history=3": "write ++precision.scaling.history=3",
    "+optim.lr=3": "+optim.lr=3: the key exists already; write it without +",
    # a choice that does not exist, or is chosen the wrong way
    "+recipe=fp8_delayd": "recipe=fp8_delayd: there is no such recipe; did you mean fp8_delayed?",
    "-m +recipe=bf16,fp8_delayd": "there is no such recipe; did you mean fp8_delayed?",
    "recipe=bf16": "write +recipe=bf16",
    "+recpe=bf16": "did you mean +recipe=bf16?",
    "+recipe=bf16 +recipe=fp8_jit": "recipe is chosen twice; write +recipe=NAME once, or a whole run with a precision: "
    "+recipe=[RUN,PRECISION]",
    "+recipe=[fp8_block,moonlight_16b_8xh200]": "moonlight_16b_8xh200 replaces the precision of fp8_block; write "
    "+recipe=moonlight_16b_8xh200, or the whole run first: +recipe=[moonlight_16b_8xh200,fp8_block]",
    "+recipe=[300m_h100,1b_8xh100]": "1b_8xh100 replaces the model and precision of 300m_h100; write +recipe=1b_8xh100",
    "+recipe=[bf16,fp8_jit]": "fp8_jit replaces the precision of bf16; write +recipe=fp8_jit",
    "+recipe=[cpu_demo,fp8_delayd]": "recipe=fp8_delayd: there is no such recipe; did you mean fp8_delayed?",
    "model=[1]": "model=[1]: model is chosen by a name, or a list of names (deepseek_100m,",
    "optim=[[a]]": "optim=[[a]]: optim is chosen by a name, or a list of names (adamw_cosine,",
    "model=null": "model=null: model is chosen by a name",
    "+recipe=3": "+recipe=3: recipe is chosen by a name, or a list of names (",
    "model=deepseek_tny": "did you mean deepseek_tiny?",
    "+model=deepseek_300m": "model is chosen twice",
    "+model=deepseek_tiny": "model is chosen twice",
    "++recipe=bf16": "++recipe=bf16: ++ is for keys; choose with +recipe=bf16",
    # a wrong type or value
    "run.resume=true": "run.resume=true: must be never, auto, or the path of a run or of one of its checkpoints",
    "debug.inject={step: 3}": 'quote the whole argument, as "debug.inject=[...]" or "debug.inject={a: 1, b: 2}"',
    "hydra.run.dir=x dry_run=true": "Octet writes below run.dir; set run.dir=x",
    "hydra.job.chdir=true": "Octet writes below run.dir; set run.dir=runs",
    "-m optim.lr=1e-3,fast": "optim.lr=fast: must be a number",
    "trainer.global_batch_size=0": "trainer.global_batch_size=0: out of range; set 1 or more",
    # what Hydra cannot read
    "fp8_delayed": "fp8_delayed: cannot be read as KEY=VALUE; write KEY=VALUE",
    "dry_run": "dry_run: cannot be read as KEY=VALUE; write dry_run=VALUE",
    "run.name=(": "run.name=(: cannot be read as KEY=VALUE",
    "optim.lr=1e-3,1e-4": "several values; add -m",
    "run.name=${nothing}": "run.name: Interpolation key 'nothing' not found",
    "trainer.max_steps=${nothing}": "trainer.max_steps: Interpolation key 'nothing' not found",
    "~precision": "precision=null: must be a section with the keys name,",
    "run=foo": "run=foo: must be a section with the keys name, dir",
    "--config-name=nope": "Cannot find primary config 'nope'",
    "=3": "=3: it has no key; write KEY=VALUE",  # $KEY=3 without a KEY
    "+=x": "+=x: it has no key; write KEY=VALUE",
    "run.dir=~/runs": "run.dir=~/runs: ~ is not expanded after =; write $HOME",
    "run.name=größe": "or letters beyond a to z",
    "data.path='bad\udcff'": r"data.path='bad\udcff': not UTF-8",
    "trainer.phases[0].until=5": "trainer.phases[0]: there is no such entry; write the whole list, as",
    "optim.betas[1]=x": "optim.betas[1]=x: must be a number",
    "data.mix={name:a}": "data.mix={name:a}: must be a list of sections, as [a,b]",
    "precision.rules=[]": "precision.rules=[]: must be a section with the keys first_blocks, last_blocks, exceptions",
    # options
    "--max_steps 3": "--max_steps: there is no such option, and keys are written KEY=VALUE, without dashes; did you "
    "mean trainer.max_steps=VALUE?",
    "--recipe=bf16": "did you mean +recipe=VALUE?",
    "--ouput z": "--ouput: there is no such option, and keys are written KEY=VALUE, without dashes; --help and",
    "trainer.max_steps=3 -x": "-x: there is no such option",
    "optim.lr=1e-3 -m trainer.seed=1,2": "trainer.seed=1,2: an option stands between KEY=VALUE arguments",
    "--from-run runs/a --from-run runs/b": "--from-run: given twice",
    "--cfg": "--cfg/-c: expected one argument; see --hydra-help",
    "--resolve": "The --resolve flag can only be used in conjunction with --cfg or --help",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_ends_in_one_line_and_leaves_nothing_behind(
    arguments: str, call: Call, recorder: Recorder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert call(*arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("octet: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert MISTAKES[arguments] in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [] and recorder.runs == []


@pytest.mark.parametrize("form", ["{}=PRIVATE(", "{}=[PRIVATE]", "{}.x=PRIVATE", "health.alerts={{webhook: PRIVATE("])
@pytest.mark.parametrize("key", ["health.alerts.webhook", "health.alerts.command"])
def test_a_mistake_in_a_secret_does_not_print_it(
    form: str, key: str, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(form.format(key)) == 2
    assert "PRIVATE" not in "".join(capfd.readouterr())


def test_the_trainer_gets_the_config_and_what_the_user_gave(call: Call, recorder: Recorder):
    assert call("+recipe=fp8_jit", "optim.lr=0.25", "debug.inject={step: 2, where: loss, value: inf}") == 0
    ((config, overrides),) = recorder.runs
    assert config.precision.name == "fp8_jit" and config.optim.lr == 0.25
    assert config.debug.inject is not None and config.debug.inject.value == float("inf")
    assert overrides == ["+recipe=fp8_jit", "optim.lr=0.25", "debug.inject={step: 2, where: loss, value: inf}"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"optim: {lr: 1e-3}",
            "recipe.optim.lr=0.001: there is no such key; the first line of a recipe's file is # @pac",
        ),
        (b"", "recipe={}: there is no such key; the first line of a recipe's file is # @package _global_"),
        (
            b"# @package _global_\n# caf\xe9 au lait",
            "a file of configs is not UTF-8 text, after '# caf'; save it as UTF-8",
        ),
        (b"# @package _global_\noptim: {lr: 1e-3", 'mine.yaml", line 2'),
        (b"# @package _global_\noptim: {lrr: 1e-3}", "optim.lrr=0.001: there is no such key; did you mean optim.lr?"),
    ],
)
def test_a_mistake_in_a_recipe_of_ones_own_is_named(
    content: bytes, says: str, call: Call, recorder: Recorder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "mine.yaml").write_bytes(content)
    assert call("--config-dir", str(tmp_path / "own"), "+recipe=mine") == 2 and recorder.runs == []
    error = capfd.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize("recipes", ["cpu_demo,fp8_block", "fp8_block,cpu_demo"])
def test_recipes_compose_where_neither_replaces_the_other(recipes: str, call: Call, recorder: Recorder) -> None:
    assert call(f"+recipe=[{recipes}]") == 0
    ((config, _),) = recorder.runs
    assert (config.precision.name, config.trainer.max_steps) == ("fp8_block", 220)


def test_a_sweep_trains_one_after_the_other_and_writes_nothing_itself(call: Call, recorder: Recorder, tmp_path: Path):
    assert call("-m", "+recipe=bf16,fp8_delayed", "optim.lr=0.5") == 0
    assert [config.precision.name for config, _ in recorder.runs] == ["bf16", "fp8_delayed"]
    assert [overrides for _, overrides in recorder.runs] == [
        ["+recipe=bf16", "optim.lr=0.5"],
        ["+recipe=fp8_delayed", "optim.lr=0.5"],
    ]
    assert [config.run.name for config, _ in recorder.runs] == [None, None]  # named by time and recipe, later
    assert list(tmp_path.iterdir()) == []


def test_the_runs_of_a_named_sweep_get_names_of_their_own(call: Call, recorder: Recorder):
    assert call("-m", "+recipe=bf16,fp8_jit", "optim.lr=1e-3,0.5", "run.name=x", "trainer.seed=3") == 0
    assert [config.run.name for config, _ in recorder.runs] == [
        "x_0_recipe-bf16_lr-0.001",
        "x_1_recipe-bf16_lr-0.5",
        "x_2_recipe-fp8_jit_lr-0.001",
        "x_3_recipe-fp8_jit_lr-0.5",
    ]


def test_the_runs_of_a_sweep_over_names_have_those_names(call: Call, recorder: Recorder):
    assert call("-m", "run.name=x,y") == 0
    assert [config.run.name for config, _ in recorder.runs] == ["x", "y"]
    assert call("-m", "run.name=x,y", "trainer.seed=1,2") == 0
    assert len({config.run.name for config, _ in recorder.runs[2:]}) == 4
    long = "x" * 125
    assert call("-m", f"run.name={long}", "trainer.seed=1,2") == 0
    assert [config.run.name for config, _ in recorder.runs[6:]] == [f"{long}_0", f"{long}_1"]


def test_a_sweep_whose_second_run_has_no_place_trains_none(
    call: Call, recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    taken = tmp_path / "runs" / "x_1_seed-3"
    taken.mkdir(parents=True)
    (taken / "config.yaml").touch()
    assert call("-m", "trainer.seed=2,3", "run.name=x") == 2
    assert "run.name=x_1_seed-3: runs/x_1_seed-3 exists; choose another run.name" in capsys.readouterr().err
    assert recorder.runs == []


def test_ranks_train_no_sweep(monkeypatch: pytest.MonkeyPatch):
    """Nor those that srun or mpirun starts, with the variables of torchrun."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "trainer.seed=2"])
    for under_torchrun, starter in ((True, "torchrun"), (False, "the launcher")):
        launch = Launch(size=2, local_size=2, under_torchrun=under_torchrun)
        with pytest.raises(UserError, match=f"-m: {starter} starts one run; start a sweep without it"):
            compose(ROOT / "configs", launch, "train")


def test_a_sweep_over_nothing_is_refused(call: Call, recorder: Recorder, capsys: pytest.CaptureFixture[str]):
    assert call("-m", "+recipe=glob(fp9_*)") == 2
    assert "octet: error: +recipe=glob(fp9_*): no name matches; " in capsys.readouterr().err
    assert call("-m", "+recipe=glob(fp8_j*)") == 0 and len(recorder.runs) == 1


def test_runs_of_a_sweep_do_not_share_a_folder(call: Call, recorder: Recorder, capsys: pytest.CaptureFixture[str]):
    assert call("run.name=x") == 0
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text(stamped(yaml.safe_dump(kept_tree(recorder.runs.pop()[0]))))
    assert call("-m", "trainer.seed=2,3", "run.resume=runs/x") == 2
    assert "run.resume=runs/x: 2 runs of the sweep would continue in one folder; " in capsys.readouterr().err
    saved = Path("runs/x/checkpoints/step_00000001")
    saved.mkdir(parents=True)
    assert call("-m", f"run.resume={saved},./runs/x/") == 2
    assert "2 runs of the sweep would continue in one folder; " in capsys.readouterr().err
    assert recorder.runs == []


def test_a_dry_run_prints_and_trains_nothing(
    call: Call, recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert call("-m", "+recipe=bf16,fp8_delayed", "dry_run=true") == 0
    out = capsys.readouterr().out
    assert "precision plan: bf16" in out and "precision plan: fp8_delayed" in out
    assert "gemm flops in fp8: 0.0%" in out and "parameters" in out and "flops" in out and "activations" in out
    assert recorder.runs == [] and list(tmp_path.iterdir()) == []


def test_a_dry_run_has_the_microbatch_of_a_run(call: Call):
    """One no larger than the batch."""
    assert call("trainer.global_batch_size=8", "dry_run=true") == 0


def test_a_dry_run_refuses_a_name_that_a_run_would(call: Call, capsys: pytest.CaptureFixture[str]):
    assert call("dry_run=true", "run.name=a/b") == 2
    assert "run.name=a/b: must be a plain folder name" in capsys.readouterr().err


def test_the_program_itself_exits_with_the_code_and_one_line(tmp_path: Path):
    command = [sys.executable, str(ROOT / "train.py"), "+model.dimm=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("octet: error: model.dimm=3: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_current_folder_that_was_deleted_is_named_as_such(tmp_path: Path):
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, str(ROOT / "scripts/sample.py"), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = "octet: error: the current folder was deleted; change to one that exists\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize(
    ("when", "number"), [("import", signal.SIGINT), ("exit", signal.SIGINT), ("exit", signal.SIGTERM)]
)
def test_a_signal_in_an_import_or_at_the_exit_leaves_no_traceback(when: str, number: int, tmp_path: Path):
    code = f"""
import atexit, runpy, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "trainer.launch.command_line" and {when == "import"}:
            signal.raise_signal({number:d})
sys.meta_path.insert(0, Finder())
atexit.register(signal.raise_signal, {number:d})
sys.argv = ["train.py", "--cfg", "job"]
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-number, "")


def test_the_exception_that_a_refusal_advises_is_accepted(call: Call, capsys: pytest.CaptureFixture[str]):
    arguments = ["model.moe_intermediate_size=100", "+recipe=fp8_jit", "dry_run=true"]
    assert call(*arguments) == 2
    (advice,) = re.findall("'(precision.rules.exceptions=.*)'", capsys.readouterr().err)
    assert call(*arguments, advice) == 0


def test_output_that_the_caller_has_closed_is_discarded(monkeypatch: pytest.MonkeyPatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert guarded(lambda: print(sys.stdout.write("text"), sys.stderr.fileno())) == 0


def test_a_letter_that_the_terminal_lacks_ends_no_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown := io.BytesIO(), "ascii", write_through=True))
    assert guarded(lambda: print("runs/\u00fc")) == 0 and shown.getvalue() == b"runs/?\n"


def test_a_run_does_not_end_because_its_errors_cannot_be_printed(
    call: Call, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    """Unbuffered, as in a container, where writing nothing to a full disk fails, too."""
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        assert call() == 0 and len(recorder.runs) == 1


QUICK = {
    "--help": "python train.py +recipe=fp8_delayed",
    "--cfg job +recipe=fp8_jit": "num_experts_per_token",
    "optim.lrr=1": "octet: error: optim.lrr=1: there is no such key; did you mean optim.lr?",
    "optim.lr=-1": "octet: error: optim.lr=-1.0: out of range",
    "trainer.microbatch_size=3": "octet: error: trainer.microbatch_size=3: it does not divide",
    "parallel.tensor=2": "octet: error: parallel.tensor=2: it does not divide the one process",
    "model.num_experts=1": "octet: error: model.num_experts_per_token=2: only 1 expert;",
    "+recipe=fp8_jit precision.scaling.margin=9": "octet: error: precision.scaling.margin=9",
}


def test_help_cfg_and_mistakes_are_quick_they_import_no_torch(tmp_path: Path):
    program = """
import runpy, sys
path, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [path, *line.split()]
    try: runpy.run_path(path, run_name="__main__")
    except SystemExit as stop: print("\\nended", stop.code, "torch" in sys.modules, flush=True)
"""
    command = [sys.executable, "-c", program, str(ROOT / "train.py"), *QUICK]
    pipe, together = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=tmp_path, stdout=pipe, stderr=together, text=True, check=False)
    printed = re.split(r"ended (\d) (\w+)\n", done.stdout)
    assert printed[1::3] == ["0", "0", *["2"] * 6] and printed[2::3] == ["False"] * 8
    for said, (line, expected) in zip(printed[::3], QUICK.items(), strict=False):
        assert expected in said, line
    assert "bf16, cpu_demo, fp16, fp8_block, fp8_delayed, fp8_full, fp8_jit" in printed[0] and "max_steps" in printed[0]
    assert list(tmp_path.iterdir()) == []
