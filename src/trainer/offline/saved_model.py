"""Opens the model of a run for use: sampling, evaluation. It only reads the run's folder, which may still grow.

config      the one in force at the checkpoint's step, with the user's KEY=VALUE, for one process
model       weights and router biases of the checkpoint, whichever ranks wrote it; in the run's precision with the
            scales of that time, and the backends chosen when the run began
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer

from models import DeepSeek
from precision import Plan, bind, refresh_weights
from precision.errors import UserError
from precision.hardware import detect
from precision.proof import cached_proof
from trainer.checkpoint import DamagedCheckpoint, checkpoint_name, checkpoint_step, list_checkpoints, read, read_meta
from trainer.checkpoint.manifest import STATE, verify
from trainer.checkpoint.storage import SavedTensors
from trainer.config import RECIPE, Config, load
from trainer.config.data import TOKENIZER
from trainer.config.schema import fit
from trainer.config.timeline import Segment, Timeline
from trainer.config_diff import configs_before, read_yaml
from trainer.data import load_tokenizer
from trainer.data.tokenizer import end_of_text_id, file_hash
from trainer.forecast.check_values import check_sizes
from trainer.launch.device import pick_device, tune_host
from trainer.run.names import CHECKPOINTS, CONFIG
from trainer.run.run_folder import find_checkpoint, saved_backends

Section = TypeVar("Section")
AXES = "replicate", "shard", "expert", "context", "tensor", "pipeline", "stages_per_rank"
ONE_PROCESS = {**dict.fromkeys(AXES, 1), "stages": None, "schedule": "interleaved"}


@dataclass
class Saved:
    """An opened model. text: hash of the run's validation text, or None. remarks: for the user, a line each."""

    run: Path
    checkpoint: Path
    config: Config
    device: torch.device
    plan: Plan
    model: DeepSeek
    text: str | None
    remarks: list[str]

    @property
    def step(self) -> int:
        return checkpoint_step(self.checkpoint) or 0

    @property
    def shape(self) -> Segment:
        """Microbatch and sequence length of the checkpoint's step."""
        return Timeline(self.config.trainer).at(max(self.step, 1))

    def tokenizer(self) -> tuple[Tokenizer, int]:
        """Return the run's tokenizer, and its end-of-text token. Raises UserError if the run folder has none."""
        path = self.run / TOKENIZER
        if not path.is_file():
            raise UserError(f"{path}: no such file; put the tokenizer of the run's data there")
        check_tokenizer(path, read_meta(self.checkpoint))
        tokenizer = load_tokenizer(path)
        tokenizer.encode_special_tokens = True  # as in training: a special token spelt in a text is text
        return tokenizer, end_of_text_id(tokenizer, self.config.data.end_of_text)


def open_run(
    run: Path, step: int | None = None, overrides: Sequence[str] = (), precision: Mapping[str, Any] | None = None
) -> Saved:
    """Open the model of a run folder, or of one of its checkpoints. step: of the checkpoint, None for the newest valid
    one. precision: that section of the config, if not the run's. overrides: KEY=VALUE of the config, and of precision.

    Raises UserError, one line, for errors that the user can correct.
    """
    checkpoint, remarks = chosen_checkpoint(run, step)
    folder = checkpoint.parent.parent
    tree = config_at(folder, checkpoint_step(checkpoint) or 0)
    if "source" in read_meta(checkpoint) and (own := folder / TOKENIZER).is_file():  # imported, and moved perhaps
        tree["data"]["tokenizer"] = str(own)
    tree |= {} if precision is None else {"precision": dict(precision)}
    tree = with_overrides(tree, overrides)
    tree["parallel"] |= ONE_PROCESS
    config = load(tree)
    check_sizes(config)
    device = pick_device(config.trainer.device)
    tokens = config.trainer.microbatch_size * config.trainer.sequence_length
    saved = saved_backends(folder, checkpoint_step(checkpoint)) if precision is None else None
    if (gpu := detect(device)) is not None:
        cached_proof(gpu)
    plan = Plan(config.precision, config.model.num_layers, gpu, tokens, saved)
    with torch.device("meta"):
        model = DeepSeek(config.model, plan)
    model.to_empty(device=device)
    read(checkpoint, {"model": model.state_dict()}, rest=False, verified=True)
    arena = bind(model, plan, device)
    state, tensors = json.loads((checkpoint / STATE).read_text())["state"], SavedTensors(checkpoint)
    if arena.delayed and "arena/history" in tensors and tensors.shape("arena/history")[1]:
        arena.load_state_dict({"names": state["arena"]["names"], "history": tensors.read("arena/history")})
    refresh_weights(model, force=True)
    tune_host(device)
    return Saved(folder, checkpoint, config, device, plan, model.eval(), state.get("validation"), remarks)


def precision_named(name: str, configs: Path) -> dict[str, Any] | None:
    """Return the precision section of a recipe; None for `run`, the run's own."""
    known = {path.stem: path for path in sorted((configs / "precision").glob("*.yaml"))}
    if name != "run" and name not in known:
        raise UserError(f"--precision {name}: there is no such recipe; choose run, {', '.join(known)}")
    return None if name == "run" else yaml.safe_load(known[name].read_text())


def chosen_checkpoint(run: Path, step: int | None) -> tuple[Path, list[str]]:
    """Return a run's checkpoint of a step (None: the newest valid one; `run` may also be a checkpoint itself), and
    remarks on those that are damaged. Raises UserError if there is none."""
    given = run if step is None else run / CHECKPOINTS / checkpoint_name(step)
    if given.is_dir():
        remarks: list[str] = []
        return find_checkpoint(given, "RUN", lambda kind, step, message, **_: remarks.append(message)), remarks
    if step is not None and checkpoint_step(run) is not None:
        raise UserError(f"{run} --step {step}: it is a checkpoint already; give its run's folder, or leave --step out")
    there = ", ".join(str(checkpoint_step(path)) for path in list_checkpoints(run / CHECKPOINTS))
    if step is not None and there:
        raise UserError(f"{given}: no such checkpoint; the run has those of steps {there}")
    raise UserError(f"{given}: no such folder; give a run folder that has checkpoints, as runs/NAME")


def config_at(run: Path, step: int) -> dict[str, Any]:
    """Return the config tree in force at a step: that of the first checkpoint from there on, which its manifest covers.
    Without one, or with an older one without its config, it comes from the run folder, which keeps earlier configs of a
    run that resumed with another one."""
    end, path = next(((end, path) for end, path in configs_before(run).items() if end >= step), (None, run / CONFIG))
    for checkpoint in list_checkpoints(run / CHECKPOINTS):
        saved = checkpoint_step(checkpoint) or 0
        if saved < step or (end is not None and saved > end):
            continue
        try:
            verify(checkpoint, only=STATE)
        except DamagedCheckpoint:
            continue
        if (tree := read_meta(checkpoint).get("config")) is not None:
            return tree
    if not path.is_file():
        if (run / "configs" / "model").is_dir():
            raise UserError(f"{run}: an imported model, and no run; train from it first, with run.init_from={run}")
        raise UserError(f"{run}: no {CONFIG} in it; give the folder of a run, as runs/NAME")
    try:
        tree = read_yaml(path.read_bytes())
    except yaml.YAMLError:
        raise UserError(f"{path}: is damaged (not YAML); give one of the run's checkpoints, or another run") from None
    if "run" not in tree:
        raise UserError(f"{path}: it is not the config of a run; give the folder of a run, as runs/NAME")
    return tree


def section_of(kind: type[Section], tree: Any, key: str, source: Path) -> Section:
    """Return a section of the config that a run or checkpoint has. Raises UserError if this version cannot read it."""
    try:
        return fit(tree, kind, lambda key, value: f"{key}={value}: there is no such key", key)
    except UserError as error:
        raise UserError(f"{source}: {key} cannot be read ({error}); use the version that wrote it") from None


def check_tokenizer(path: Path, meta: Mapping[str, Any]) -> None:
    """Raise UserError unless `path` is the tokenizer that the checkpoint with this meta was trained with. Older
    checkpoints do not record it."""
    if meta.get("tokenizer", found := file_hash(path)) != found:
        raise UserError(
            f"{path}: was altered (its SHA-256 is {found[:12]}, the checkpoint's {meta['tokenizer'][:12]}); put the "
            "tokenizer of the run's data there"
        )


def with_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a config's tree with KEY=VALUE applied. Raises UserError for other words."""
    pairs = [override.partition("=") for override in overrides]
    quoted = [f"{key}={json.dumps(value)}" if value[:1] == "*" else key + sign + value for key, sign, value in pairs]
    changed = OmegaConf.create(dict(tree))
    try:  # *.md would be an alias in YAML
        changed.merge_with_dotlist(quoted)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # ValueError: a list's entry has no name
        fix = "close what a bracket or quote opens, write text as \"KEY='VALUE'\", entries of lists as data.mix.0.path"
        raise UserError(f"{' '.join(overrides)}: cannot be read as KEY=VALUE; {fix}") from error
    for override in overrides:
        key, is_pair, value = override.partition("=")
        if not is_pair:
            raise UserError(f"{override}: not a KEY=VALUE; give keys of the config, as compile.enabled=false")
        is_choice = key == RECIPE or (isinstance(tree.get(key), dict) and not value.startswith("{"))
        if is_choice or override.startswith("+"):
            why = "the recipe and the config groups are the run's"
            raise UserError(f"{override}: {why}; change single keys, as precision.backend=reference")
    merged = OmegaConf.to_container(changed)
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}
