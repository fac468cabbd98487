"""Whole-run recipes: they compose with a precision, fit the GPUs in their names by forecast, and train.

To accept a change of a dry run: PYTHONPATH=tests/support:src python tests/trainer/forecast/test_recipes.py
"""

import re
from pathlib import Path

import pytest
from composed import config_of

from trainer.config import Config
from trainer.config.timeline import Timeline
from trainer.forecast.dry_run import report
from trainer.forecast.preflight import check
from trainer.parallel.mesh import resolve
from trainer.trainer import Trainer

GOLDEN = Path(__file__).parent / "golden" / "recipes"
FOLDER = Path(__file__).parents[3] / "configs" / "recipe"
PRECISIONS = {path.stem for path in (FOLDER.parent / "precision").glob("*.yaml")}
WHOLE = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in PRECISIONS)
SIMILAR = {"30m_gpu24", "1b_h100", "v3_proxy_64xh200", "v3_32k_256xh200"}
SIMILAR |= {f"moonlight_16b_{machine}" for machine in ("8xh100", "8xh200", "64xh200")}
"""They differ from others in what the training on a CPU replaces: sizes and degrees."""
GPUS = {"gpu24": "rtx4090", "h100": "h100", "h200": "h200"}


def machine(recipe: str) -> tuple[str, int]:
    """What a recipe's name says: the GPU to forecast for, and how many."""
    found = re.search(r"_(?:(\d+)x)?(gpu24|h100|h200)$", recipe)
    return (GPUS[found[2]], int(found[1] or 1)) if found else ("auto", 1)


def planned(recipe: str) -> Config:
    """The recipe's config, as a dry run for its GPU has it."""
    gpu, _ = machine(recipe)
    return config_of([f"+recipe={recipe}", "dry_run=true", f"gpu={gpu}"])


def dry_run(recipe: str) -> str:
    """What a dry run for the recipe's GPU prints, below the precision plan, which has golden files of its own."""
    config = planned(recipe)
    plan = check(config)
    lines = report(config, plan, machine(recipe)[1]).removeprefix(plan.to_text()).strip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("fits: ") or "this host" not in line) + "\n"


@pytest.mark.parametrize("recipe", WHOLE)
def test_a_dry_run_is_the_golden_one_of_all_gpus_and_fits(recipe: str) -> None:
    text = dry_run(recipe)
    assert text == (GOLDEN / f"{recipe}.txt").read_text()
    assert "does not fit" not in text
    config, (_, gpus) = planned(recipe), machine(recipe)
    assert resolve(config.parallel, gpus).world == gpus
    timeline = Timeline(config.trainer)
    assert timeline.steps_of(config.optim.warmup_steps) < timeline.steps
    assert config.trainer.sequence_length <= config.model.max_position_embeddings


def test_a_precision_composes_with_a_whole_recipe() -> None:
    alone, both = (
        config_of([f"+recipe={name}"]) for name in ("moonlight_16b_8xh200", "[moonlight_16b_8xh200,fp8_block]")
    )
    assert (alone.precision.name, both.precision.name) == ("fp8_delayed", "fp8_block")
    assert (alone.trainer, alone.model, alone.parallel) == (both.trainer, both.model, both.parallel)


# Sizes for a CPU. Routing, norms, MTP, losses, precision, optimizer and schedule stay the recipe's.
CUT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 2,
    "num_dense_layers": 1,
    "num_heads": 2,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_expert_groups": 1,
    "num_groups_per_token": 1,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all recipes: they read the same text with the same vocabulary."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in SIMILAR else []) for name in WHOLE]
)
def test_a_whole_recipe_trains_two_steps_with_its_model_cut_down(
    recipe: str, tmp_path: Path, corpus: Path, cache: Path
) -> None:
    sizes = "max_steps=2", "global_batch_size=2", "microbatch_size=1", "sequence_length=32", "device=cpu"
    data = "data=text", f"data.path={corpus}", f"data.cache_dir={cache}"
    one = "parallel.replicate=1", "parallel.shard=1", "parallel.expert=1", "parallel.context=1", "compile.enabled=false"
    words = [f"model.{key}={size}" for key, size in CUT.items()] + [f"trainer.{size}" for size in sizes]
    quiet = "health.dashboard=false", "logging.console.enabled=false", "checkpoint.every=0"
    config = config_of(
        [f"+recipe={recipe}", *words, *one, *data, *quiet, f"run.dir={tmp_path}", "optim.warmup_steps=1"]
    )
    if config.model.q_lora_rank is not None:
        config.model.q_lora_rank = 32
    summary = Trainer(config).train()
    assert summary.step == 2 and summary.skipped_steps == 0


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for recipe in WHOLE:
        (GOLDEN / f"{recipe}.txt").write_text(dry_run(recipe))
