"""A training run on Transformer Engine's modules: it learns, its checkpoint is plain, it resumes from it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from composed import config_of
from run_lines import metrics

from precision.backends.availability import te_missing
from trainer.checkpoint import read
from trainer.config import Config
from trainer.forecast.preflight import check
from trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(te_missing() is not None, reason=f"needs Transformer Engine: {te_missing()}")
SMALL = {
    "model.vocab_size": 320,
    "model.hidden_size": 128,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.kv_lora_rank": 64,
    "model.qk_nope_head_dim": 32,
    "model.qk_rope_head_dim": 16,
    "model.v_head_dim": 32,
    "model.intermediate_size": 256,
    "model.moe_intermediate_size": 64,
    "model.num_experts": 4,
    "trainer.max_steps": 6,
    "trainer.global_batch_size": 4,
    "trainer.microbatch_size": 2,
    "trainer.sequence_length": 32,
    "optim.warmup_steps": 2,
    "eval.every": 0,
    "eval.batches": 2,
    "logging.every": 1,
    "logging.console.enabled": "false",
    "checkpoint.every": 3,
    "checkpoint.keep": 0,
    "precision.backend": "transformer_engine",
    "data": "text",
    "data.validation_fraction": 0.3,
}
Make = Callable[..., Config]


@pytest.fixture
def config(tmp_path: Path) -> Make:
    """The config of a small run in this test's folder."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(12):
        (corpus / f"{i}.txt").write_text(" ".join(f"def f{i * j % 17}(x): return x + {j}\n" for j in range(120)))
    places = [f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path / 'runs'}"]

    def build(*more: str) -> Config:
        common = [f"{key}={value}" for key, value in SMALL.items()]
        return config_of([*common, *places, *more])

    return build


def losses(run: Path) -> list[float]:
    return [line["loss/total"] for line in metrics(run, "loss/total")]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"])
def test_a_run_learns_saves_plain_tensors_and_resumes(config: Make, name: str, recompute: str):
    scaling = ["precision.scaling.granularity=tensor"] if name == "fp8_jit" else []
    settings = (
        f"+recipe={name}",
        *scaling,
        f"recompute={recompute}",
        "debug.inject={step: 2, where: gradient, value: nan}",
    )
    whole = Trainer(config(*settings, "run.name=whole")).train()
    assert whole.skipped_steps == 1 and losses(whole.folder)[-1] < losses(whole.folder)[0]
    plan = (whole.folder / "precision_plan.txt").read_text()
    assert "transformer_engine" in plan
    state, _ = read(whole.folder / "checkpoints" / "step_00000003")
    assert not [key for key in state["model"] if "extra_state" in key or ".te." in key]
    again = whole.folder.with_name("again")
    shutil.copytree(whole.folder, again)
    shutil.rmtree(again / "checkpoints" / "step_00000006")
    Trainer(config(*settings, "run.name=again", "run.resume=auto")).train()
    assert losses(again) == pytest.approx(losses(whole.folder), rel=1e-3)


def test_compile_is_refused_by_name(config: Make):
    with pytest.raises(ValueError, match=r"compile.enabled=true: Transformer Engine.*set compile.enabled=auto"):
        check(config("+recipe=fp8_delayed", "compile.enabled=true"))
