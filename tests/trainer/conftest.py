"""A small run that trains in a second: real text, a model of every mechanism, any override."""

from collections.abc import Callable
from pathlib import Path

import pytest
from composed import config_of

from trainer.config import Config

SMALL = [
    "model.vocab_size=320",
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.kv_lora_rank=32",
    "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=16",
    "model.v_head_dim=16",
    "model.intermediate_size=96",
    "model.moe_intermediate_size=32",
    "model.num_experts=4",
    "trainer.max_steps=6",
    "trainer.global_batch_size=4",
    "trainer.microbatch_size=2",
    "trainer.sequence_length=24",
    "trainer.device=cpu",
    "optim.warmup_steps=2",
    "eval.every=0",
    "eval.batches=2",
    "eval.at_end=8",
    "logging.every=1",
    "logging.console.enabled=false",
    "checkpoint.every=0",
    "health.dashboard=false",
    "data=text",
    "data.validation_fraction=0.05",
]

Small = Callable[..., list[str]]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        words = " ".join(f"def f{i * j * 7919 % 65521}(x): return x + {j}\n" for j in range(60))
        (folder / f"file{i}.txt").write_text(words)
    return folder


@pytest.fixture
def overrides(corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Overrides of a small run in this test's folder; more can be added."""
    cache = tmp_path_factory.getbasetemp() / "data_cache"

    def build(*more: str) -> list[str]:
        places = [f"data.path={corpus}", f"data.cache_dir={cache}", f"run.dir={tmp_path / 'runs'}"]
        return [*SMALL, *places, *more]

    return build


@pytest.fixture
def config(overrides: Small) -> Callable[..., Config]:
    """The config of a small run."""
    return lambda *more: config_of(overrides(*more))
