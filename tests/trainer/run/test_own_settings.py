"""A command line that names a run that exists changes that run's settings, and not those of configs/."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composed import CONFIGS, config_of
from omegaconf import OmegaConf
from run_folders import save

from precision.config import Precision
from precision.errors import UserError
from trainer.checkpoint import Checkpointer
from trainer.config import Config, load
from trainer.config.paths import kept_tree
from trainer.config_diff import without_secrets
from trainer.digests import accept_stamped, stamped
from trainer.launch.command_line import guarded
from trainer.launch.composition import Job, _as_text, compose
from trainer.launch.launcher import Launch
from trainer.run.names import CHECKPOINTS
from trainer.run.own_settings import own_settings

STARTED = (
    "model.num_layers=2",
    "data=text",
    "data.path=/texts",
    "optim=muon_wsd",
    "optim.muon.steps=4",
    "optim.lr=0.5",
)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """What a command line asks for, in a folder whose runs/a was started with STARTED."""
    monkeypatch.chdir(tmp_path)
    start("a", *STARTED, "run.resume=never", "debug.inject={step: 3, where: loss, value: nan}")

    def compose_one(*arguments: str, attempt: int = 0) -> Job:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        jobs = compose(CONFIGS, Launch(attempt=attempt), "train", own_settings)
        assert sys.argv[1:] == list(arguments)
        return jobs[-1]

    return compose_one


def start(name: str, *words: str, overrides: str = "") -> Path:
    """The folder of a run, as its start leaves it."""
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    tree = without_secrets(kept_tree(config_of([*words, f"run.name={name}"])), None)
    (folder / "config.yaml").write_text(stamped(OmegaConf.to_yaml(OmegaConf.create(tree))))
    (folder / "overrides.txt").write_text(overrides)
    return folder


def line(job: Job) -> str:
    assert job.settings is not None
    return job.settings.line(kept_tree(load(job.tree)))


def settings(config: Config) -> tuple[Any, ...]:
    return config.model.num_layers, config.data.path, config.optim.name.value, config.optim.lr


RESUME = "run.name=a", "run.resume=auto"


def test_a_resumption_needs_no_key_a_second_time(typed: Callable[..., Job], tmp_path: Path) -> None:
    job = typed(*RESUME, "trainer.max_steps=20")
    config = load(job.tree)
    assert settings(config) == (2, "/texts", "muon", 0.5) and config.trainer.max_steps == 20
    assert config.debug.inject is None, "a fault is one start's"
    assert line(job) == "settings of runs/a; changed here: trainer.max_steps 270 -> 20"
    assert job.overrides == [*RESUME, "trainer.max_steps=20"]
    Path("runs/a", CHECKPOINTS, "step_00000003").mkdir(parents=True)
    for place in (f"run.resume={tmp_path}/runs/a", "run.resume=runs/a/checkpoints/step_00000003"):
        assert settings(load(typed(place).tree)) == settings(config)
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = load(typed("run.dir=moved", *RESUME).tree)
    assert settings(moved) == settings(config) and moved.run.dir == "moved"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optim.lr=0.25"], (2, "/texts", "muon", 0.25)),
        (["+optim.lr=0.25"], (2, "/texts", "muon", 0.25)),  # as in a start
        (["optim=adamw_cosine"], (2, "/texts", "adamw", 2e-3)),  # a group brings its whole section
        (["+recipe=fp8_block"], (2, "/texts", "muon", 0.5)),
        (["+recipe=[30m_gpu24,fp8_jit]", "optim.lr=0.1"], (6, "/texts", "adamw", 0.1)),
        (["optim.muon.steps=3"], (2, "/texts", "muon", 0.5)),  # which the defaults do not have
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_keys_groups_and_recipes_change_the_settings(
    words: list[str], expected: tuple[Any, ...], typed: Callable[..., Job]
) -> None:
    config = load(typed(*RESUME, *words).tree)
    if "fp8" in str(words):
        assert config.precision.name in str(words)
    if "30m" in str(words):
        expected = (*expected[:2], config.optim.name.value, expected[3])
    assert settings(config) == expected


@pytest.mark.parametrize("key", ["optim.moments", "precision.table.optim.moments"])
def test_table_and_optimizer_have_the_same_moments(key: str, typed: Callable[..., Job]) -> None:
    start("narrow", *STARTED, f"{key}=bf16")
    for words, moments in (
        ((), "bf16"),
        (("precision.table.optim.moments=fp32",), "fp32"),
        (("optim.moments=fp32",), "fp32"),
        (("+recipe=bf16",), "fp32"),
    ):
        config = load(typed("run.name=narrow", "run.resume=auto", *words).tree)
        assert config.optim.moments.value == moments
        assert config.precision.table.optim.moments is Precision(moments)


def test_a_length_replaces_the_other(typed: Callable[..., Job]) -> None:
    trainer = load(typed(*RESUME, "trainer.max_tokens=1M").tree).trainer
    assert (trainer.max_steps, trainer.max_tokens) == (None, "1M")


def test_only_a_run_that_was_started_to_resume_resumes_by_its_name_alone(typed: Callable[..., Job]) -> None:
    for words in (["run.name=a"], ["run.name=a", "run.resume=never"], ["run.name=new", "run.resume=auto"]):
        job = typed(*words)
        assert job.settings is None and load(job.tree).model.num_layers == 3
    start("again", *STARTED, "run.resume=auto")
    job = typed("run.name=again")
    assert job.tree.run.resume == "auto" and load(job.tree).model.num_layers == 2
    assert typed("run.name=again", "run.resume=never").settings is None
    assert typed("run.name=a", "optim.lr=0.5", attempt=1).tree.optim.name == "muon"  # torchrun has started it again


def test_a_run_that_was_named_by_its_path_is_itself_after_a_restart(typed: Callable[..., Job]) -> None:
    Path("elsewhere").mkdir()
    Path("runs/a").rename("elsewhere/a")
    for path in ("elsewhere/a", "elsewhere/a/checkpoints/step_00000003"):  # which later ones have replaced
        for words in ([], ["run.name=a"]):
            config = load(typed(f"run.resume={path}", *words, attempt=1).tree)
            assert settings(config) == (2, "/texts", "muon", 0.5)
            assert (config.run.name, config.run.dir, config.run.resume) == ("a", "elsewhere", "auto")


def test_from_run_starts_another_with_the_same_settings(typed: Callable[..., Job]) -> None:
    job = typed("--from-run", "runs/a", "run.name=b", "optim.lr=0.25")
    config = load(job.tree)
    assert settings(config) == (2, "/texts", "muon", 0.25)
    assert (config.run.name, config.run.dir, config.run.resume) == ("b", "runs", "never")
    assert line(job) == "settings of runs/a; changed here: optim.lr 0.5 -> 0.25"
    assert job.overrides == ["--from-run=runs/a", "run.name=b", "optim.lr=0.25"]
    start("b", *STARTED, "optim.lr=0.125")
    assert typed("--from-run=runs/a", "run.name=b", "run.resume=auto").tree.optim.lr == 0.125  # b exists: its own
    start("again", *STARTED, "run.resume=auto")
    assert typed("--from-run=runs/again", "run.name=again").tree.run.resume == "never"  # which is refused: it exists
    sweep = typed("-m", "--from-run", "runs/a", "run.name=s", "optim.lr=1,2")
    assert (sweep.tree.run.name, sweep.tree.optim.lr, sweep.tree.model.num_layers) == ("s_1_lr-2", 2, 2)
    start("s_1_lr-2", *STARTED, "model.num_layers=1")
    sweep = typed("-m", "run.name=s", "run.resume=auto", "optim.lr=1,2")
    assert (sweep.tree.run.name, sweep.tree.optim.lr, sweep.tree.model.num_layers) == ("s_1_lr-2", 2, 1)


def test_a_run_is_named_from_inside_its_folder(typed: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Path("runs").resolve()
    monkeypatch.chdir(runs / "a")
    Path(CHECKPOINTS).mkdir()
    for words in (("run.resume=.",), ("run.resume=checkpoints/..",)):
        run = load(typed(*words).tree).run
        assert (run.name, run.dir) == ("a", str(runs))
    assert load(typed("--from-run=.", "run.name=b").tree).run.dir == str(runs)


def test_a_mistyped_path_is_refused_before_any_program_takes_the_defaults(typed: Callable[..., Job]) -> None:
    for wrong in ("runs", "runs/b", "runs/a/checkpoints/step_00000003", "atuo"):
        with pytest.raises(UserError, match=f"run.resume={wrong}: must be never, auto, or the path of a run"):
            typed(f"run.resume={wrong}")


@pytest.mark.parametrize("name", ["2026_01_02", "1e5", "nan", "007", "-1", "1.50"])
def test_a_name_that_looks_like_a_number_is_taken_as_typed(name: str) -> None:
    """In a list, a sweep, a list of sections; not where the key takes a number, or in quotes."""
    mix = f"data.mix=[{{name:{name}, path: {name} }}]"
    for key in (f"data.exclude=[{name},old, {name}]", f"run.name=x,{name}", mix):
        assert _as_text(key) == key.replace(name, f"'{name}'")
    for key in (f"trainer.seed={name}", f"run.name='x,{name},'"):
        assert _as_text(key) == key


def test_a_name_of_digits_reaches_the_config(typed: Callable[..., Job]) -> None:
    mix = "data.mix=[{name:007, path: 1e5 },{name:b,path:'x,007,'}]"
    config = load(typed("-m", "run.name=x,2026_01_02", "data.exclude=[007,old, 1.50]", mix, "trainer.seed=1_0").tree)
    assert [(entry.name, entry.path) for entry in config.data.mix or []] == [("007", "1e5"), ("b", "x,007,")]
    assert (config.run.name, config.data.exclude, config.trainer.seed) == ("2026_01_02", ["007", "old", "1.50"], 10)


def test_a_key_in_a_list_is_taken_as_messages_name_it(typed: Callable[..., Job]) -> None:
    mix = "data.mix=[{name: a, path: x}, {name: b, path: y}]"
    entries = load(typed(mix, "data.mix[1].path=z").tree).data.mix or []
    assert [entry.path for entry in entries] == ["x", "z"]


def test_a_run_of_a_sweep_resumes_with_the_folder_of_configs_on_the_command_line(typed: Callable[..., Job]) -> None:
    start("s_1_seed-2", *STARTED)
    folder = Path("our 'own", "optim")
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text("defaults: [muon_wsd]\nlr: 0.75\n")
    words = ["run.name=s", "run.resume=auto", "optim=ours", "trainer.seed=1,2"]
    for place in (["--config-dir", str(folder.parent)], ['hydra.searchpath=["file://our \'own"]']):
        job = typed("-m", *place, *words)
        assert job.settings is not None and settings(load(job.tree)) == (2, "/texts", "muon", 0.75)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from-run", "runs/none"], "--from-run runs/none: it is not the folder of a run"),
        (["--from-run"], "--from-run: the run is missing; give its folder"),
        ([*RESUME, "optim.lrr=3"], "optim.lrr=3: there is no such key; did you mean optim.lr?"),
        ([*RESUME, "optim=muon_wds"], "did you mean muon_wsd? (adamw_cosine, adamw_wsd, muon_cosine, muon_wsd)"),
        ([*RESUME, "recipe=bf16"], "write +recipe=bf16"),
    ],
)
def test_a_mistake_names_what_to_give(
    words: list[str], says: str, typed: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: load(typed(*words).tree) and None) == 2
    assert says in capsys.readouterr().err


def test_an_altered_config_is_replaced_by_that_of_a_checkpoint_or_refused(typed: Callable[..., Job]) -> None:
    path = Path("runs/a/config.yaml")
    whole = path.read_text()
    for damaged in (whole.replace("lr: 0.5", "lr: 5.0"), whole[: len(whole) // 2], whole.replace("#", "&", 1)):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"run\.name=a: runs/a/config\.yaml was altered, and no checkpoint has its"):
            typed(*RESUME)
    save(path.parent, 1)  # older than what keeps its config
    checkpointer = Checkpointer(path.parent / CHECKPOINTS, 0, lambda *_, **__: None)
    checkpointer.save(2, {}, {"config": kept_tree(config_of([*STARTED, "optim.lr=0.25"]))})
    checkpointer.close()
    job = typed(*RESUME)
    assert job.tree.optim.lr == 0.25 and "step_00000002 (config.yaml was altered; to accept" in line(job)
    path.write_text(whole.replace("lr: 0.5", "lr: 5.0"))
    accept_stamped(path)
    assert typed(*RESUME).tree.optim.lr == 5.0
    path.write_text(whole.partition("\n")[2])  # of before there were digests
    assert typed(*RESUME).tree.optim.lr == 0.5


def test_secrets_have_to_be_given_again(typed: Callable[..., Job]) -> None:
    key = "health.alerts.webhook"
    start("b", *STARTED, f"{key}=https://x/PRIVATE", "run.resume=auto", overrides=f"{key}=(not shown)\n")
    job = typed("run.name=b")
    assert load(job.tree).health.alerts.webhook is None
    assert line(job) == f"settings of runs/b; changed here: nothing; not stored and not given: {key}"
    given = line(typed("run.name=b", f"{key}=https://x/PRIVATE"))
    assert given == f"settings of runs/b; changed here: {key} (not shown)"


def test_the_text_of_a_run_is_prepared_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        Path(f"{name}.txt").write_text(f"{name} text of the run ")
    words = "data=text", f"data.path={tmp_path}", "model.vocab_size=257", f"data.cache_dir={tmp_path}/.cache"
    start("a", *words, "data.glob=*.txt", "data.validation_fraction=0.5")
    prepare = runpy.run_path(str(CONFIGS.parent / "scripts" / "prepare_data.py"))["run"]
    for named in (["run.name=a", "run.resume=auto"], ["run.resume=runs/a"], ["--from-run", "runs/a"]):
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *named, "data.shard_mb=1"])
        prepare()
        assert "tokenizer: 257 entries, " in capsys.readouterr().out
    (folder,) = (path for path in Path(".cache").iterdir() if path.is_dir())
    assert folder.name.startswith("text-")
