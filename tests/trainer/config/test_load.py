"""The config tree: every file composes and loads, and what does not fit the schema is refused by name."""

import ast
import copy
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from trainer.config import Config, InjectPlace, Schedule, Switch, load, suggestion_for, unknown_key
from trainer.config.other_frameworks import KEYS, OURS
from trainer.config.schema import keys_of, nearest
from trainer.forecast.preflight import check

CONFIGS = Path(__file__).parents[3] / "configs"
GROUPS = {folder.name: sorted(f.stem for f in folder.glob("*.yaml")) for folder in CONFIGS.iterdir() if folder.is_dir()}
RECIPES = [name for name in GROUPS["recipe"] if name in GROUPS["precision"]]  # the others pick a whole run
# models and recipes of a precision meet below, whole recipes in forecast/test_recipes.py
CHOICES = [f"{group}={name}" for group, names in GROUPS.items() for name in names if group not in ("model", "recipe")]


@functools.cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=list(overrides))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The default config as a plain tree, with FP8 and FP16's loss scale, so that every section has its keys."""
    tree, fp16 = (OmegaConf.to_container(composed(f"+recipe={name}")) for name in ("fp8_delayed", "fp16"))
    assert isinstance(tree, dict) and isinstance(fp16, dict)
    tree["precision"]["loss_scale"] = fp16["precision"]["loss_scale"]
    return {str(key): value for key, value in tree.items()}


def changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a tree with one key set, parents made where they are missing."""
    tree = copy.deepcopy(tree)
    *path, name = key.split(".")
    node = tree
    for part in path:
        node = node.setdefault(part, {})
    node[name] = value
    return tree


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix


def test_there_is_a_choice_in_every_group_that_the_readme_names():
    groups = {"recipe", "precision", "parallel", "model", "data", "optim", "checkpoint", "health", "logging"}
    assert set(GROUPS) == groups
    assert {"bf16", "fp8_delayed", "fp8_jit", "fp8_block"} <= set(RECIPES)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_other_config_file_composes_loads_and_can_be_trained(choice: str, tmp_path: Path):
    folder = [f"data.path={tmp_path}"] if choice in ("data=text", "data=files", "data=hf", "data=bins") else []
    config = load(composed(choice, *folder))
    assert isinstance(config, Config)
    check(config)


def each_once(recipes: list[str], models: list[str]) -> list[Any]:
    """All pairs; those that meet each recipe and each model once come without the mark `exhaustive`."""
    few = {(recipes[i % len(recipes)], models[i % len(models)]) for i in range(max(len(recipes), len(models)))}
    pairs = itertools.product(recipes, models)
    return [pytest.param(*pair, marks=() if pair in few else pytest.mark.exhaustive) for pair in pairs]


@pytest.mark.parametrize(("recipe", "model"), each_once(RECIPES, GROUPS["model"]))
def test_any_recipe_goes_with_any_model_and_changes_neither_it_nor_the_optimizer(recipe: str, model: str):
    without, config = load(composed(f"model={model}")), load(composed(f"+recipe={recipe}", f"model={model}"))
    assert dataclasses.replace(config, precision=without.precision) == without
    assert config.precision.name == recipe
    check(config)


def test_a_recipe_beats_the_defaults_and_the_command_line_beats_both():
    assert [load(composed(*words)).precision.name for words in ([], ["+recipe=fp8_jit"])] == ["bf16", "fp8_jit"]
    config = load(composed("+recipe=fp8_jit", "precision=fp32", "optim.lr=0.5"))
    assert config.precision.name == "fp32" and config.optim.lr == 0.5


def test_every_key_of_the_schema_stands_in_the_yaml_so_that_overrides_need_no_plus(plain: dict[str, Any]):
    written = set(leaves(plain))
    # what is null by default has keys of its own only when it is set; entries of lists likewise
    optional = (
        "model.rope_scaling.",
        "debug.inject.",
        "precision.rules.exceptions[].",
        "data.mix[].",
        "trainer.phases[].",
    )
    known = {key for key in keys_of(Config) if not key.startswith(optional)}
    sections = {key.rpartition(".")[0] for key in known} | {
        ".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)
    }
    assert written == known - sections


def test_every_key_has_a_docstring_line():
    types = [part for annotation in keys_of(Config).values() for part in (annotation, *get_args(annotation))]
    sections = {Config, *(part for part in types if isinstance(part, type) and is_dataclass(part))}
    assert len(sections) > 30
    for section in sections:
        body = cast(ast.ClassDef, ast.parse(inspect.getsource(section)).body[0]).body
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{section.__name__}.{ast.unparse(field.target)} has no docstring line"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model.dimm", 3, "model.dimm=3: there is no such key; did you mean model."),
        ("model.num_expert", 3, "did you mean model.num_experts?"),
        ("trainer.lr", 1, "did you mean optim.lr?"),
        ("optim.learning_rate", 1, "did you mean optim.lr?"),
        ("optim.max_steps", 5, "did you mean trainer.max_steps?"),
        ("parallel.nodes", 1, "there is no such key; parallel has replicate, shard,"),
        ("trainer.max_step", 1, "did you mean trainer.max_steps?"),
        ("modle.hidden_size", 3, "modle.hidden_size=3: there is no such key; did you mean model.hidden_size?"),
        ("recpe", "fp8_jit", "did you mean +recipe=fp8_jit?"),
        ("xyzzy", 1, "the sections are run, trainer, model,"),
        ("optim.xyzzy", 1, "optim has lr, betas,"),
        ("debug.inject", {"step": 1, "were": "loss", "value": "nan"}, "did you mean debug.inject.where?"),
        ("precision.rules.exceptions", [{"mtch": "a"}], "exceptions[0].mtch=a: there is no such key; did you mean"),
        ("trainer.phases", [{"steps": 5}], "phases[0].steps=5: there is no such key; trainer.phases[] has until,"),
        ("trainer.phases", [{"optim": {"lr": 1}}], "did you mean trainer.phases[0].lr?"),
        ("trainer.phases", [{}, {"learning_rate": 1}], "did you mean trainer.phases[1].lr?"),
        ("trainer.max_steps", "ten", "trainer.max_steps=ten: must be a whole number"),
        ("trainer.max_steps", 1.5, "trainer.max_steps=1.5: must be a whole number"),
        ("trainer.max_steps", 10**20, "must be a whole number or null, and no more than 9007199254740992"),
        ("trainer.max_steps", True, "trainer.max_steps=true: must be a whole number"),
        ("optim.weight_decay", 1e300, "must be a number that FP32 can hold, at most 3.4e+38"),
        ("trainer.max_tokens", "10X", "trainer.max_tokens=10X: must be tokens (10B, 1e9) or epochs of the text"),
        ("optim.warmup_steps", 2.5, "must be steps (2000), tokens (10B) or a share of the run (0.02)"),
        ("trainer.max_steps", "???", "trainer.max_steps=???: must be a whole number"),
        ("optim.lr", "fast", "optim.lr=fast: must be a number"),
        ("optim.lr", "--inf", "optim.lr=--inf: must be a number"),
        ("optim.lr", [1], "optim.lr=[1]: must be a number"),
        ("optim.betas", 0.9, "optim.betas=0.9: must be a list of numbers"),
        ("optim.betas", {"a": 1}, "must be a list of numbers"),
        ("optim.betas", [0.9, "x"], "optim.betas[1]=x: must be a number"),
        ("optim.schedule", "WSD", "optim.schedule=WSD: must be one of wsd, cosine"),
        ("optim.schedule", {}, "must be one of wsd, cosine"),
        ("optim", 3, "optim=3: must be a section with the keys lr,"),
        ("run.resume", False, "run.resume=false: must be never, auto, or the path of a run"),
        ("run.name", 1.5, "run.name=1.5: must be text or null; quote it"),
        ("dry_run", "maybe", "dry_run=maybe: must be true or false"),
        ("model.rope_scaling", 4, "must be a section with the keys factor,"),
        ("compile.enabled", "on", "compile.enabled=on: must be one of auto, true, false"),
        ("run.name", "${nothing}", "run.name: Interpolation key 'nothing' not found"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_key_value_and_fix(
    plain: dict[str, Any], key: str, value: Any, says: str
):
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        load(changed(plain, key, value))
    assert "\n" not in str(refusal.value)


def test_a_key_that_is_taken_away_is_missed(plain: dict[str, Any]):
    tree = copy.deepcopy(plain)
    del tree["optim"]["lr"]
    with pytest.raises(ValueError, match=r"^optim\.lr: has no value; it must be a number$"):
        load(tree)


def test_values_arrive_in_their_types(plain: dict[str, Any]):
    tree = changed(plain, "compile.enabled", True)
    tree = changed(tree, "optim.lr", 1)
    tree = changed(tree, "run.name", 7)
    tree = changed(tree, "trainer.max_steps", 1e3)
    tree = changed(tree, "debug.inject", {"step": 2, "where": "weight", "value": "nan"})
    config = load(tree)
    assert config.compile.enabled is Switch.true and config.optim.schedule is Schedule.wsd
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float) and config.run.name == "7"
    assert config.trainer.max_steps == 1000 and isinstance(config.trainer.max_steps, int)
    inject = config.debug.inject
    assert inject is not None and inject.where is InjectPlace.weight and inject.value != inject.value


def test_load_leaves_its_input_alone(plain: dict[str, Any]):
    before = copy.deepcopy(plain)
    load(plain)
    assert plain == before


ALL_KEYS = sorted(key for key in keys_of(Config) if "[]" not in key)


@settings(max_examples=15)
@given(key=st.sampled_from(ALL_KEYS), data=st.data())
def test_a_slip_of_the_finger_is_refused_and_a_real_key_named(plain: dict[str, Any], key: str, data: st.DataObject):
    at = data.draw(st.integers(key.rfind(".") + 1, len(key) - 1), label="place")
    slip = data.draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:]]), label="slip")
    assume(slip not in ALL_KEYS and slip and not slip.endswith("."))
    if len(key) - key.rfind(".") > 4:
        assert nearest(slip, ALL_KEYS) is not None
    parent = slip.rpartition(".")[0]
    assume(not parent or dataclasses.is_dataclass(keys_of(Config)[parent]))  # below a null there is no place to slip
    with pytest.raises(ValueError, match=f"^{re.escape(slip)}=1: there is no such key; .*$"):
        load(changed(plain, slip, 1))


def test_names_of_other_frameworks_lead_to_keys_that_exist() -> None:
    assert set(KEYS) <= set(keys_of(Config)) and not set(OURS) & set(keys_of(Config))
    assert sum(len(names.split()) for names in KEYS.values()) == len(OURS)  # none is listed twice
    assert "did you mean trainer.max_steps?" in unknown_key("training.steps", 10)
    assert suggestion_for("tensor-model-parallel-size") == "parallel.tensor" and suggestion_for("model") == "model"
    assert suggestion_for("lr_until") is None, "trainer.phases[].lr_until cannot be typed"
