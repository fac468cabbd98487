"""The rate of narrow models and long sequences: an account of operators beside that of the model that was measured."""

import pytest
from composed import config_of

from models.flops import flops_per_token
from precision import Plan
from trainer.config import Config
from trainer.config.sections import GpuChoice
from trainer.forecast.cost import RATES
from trainer.forecast.gpus import target
from trainer.forecast.header import time_line
from trainer.forecast.narrow import OVERHEAD, _moved_bytes, account, slowdown
from trainer.forecast.preflight import check
from trainer.parallel.mesh import Degrees

WIDE_MODEL = ("model=moonlight_16b", "model.num_layers=5", "model.vocab_size=32768", "trainer.sequence_length=4096",
              "trainer.global_batch_size=8", "trainer.microbatch_size=8")  # fmt: skip
LONG = ("+recipe=fp8_delayed", *WIDE_MODEL[:3], "model.max_position_embeddings=32768",
        "trainer.sequence_length=32768", "trainer.global_batch_size=1", "trainer.microbatch_size=1")  # fmt: skip
SEQUENCES = ("trainer.sequence_length=2048", "trainer.global_batch_size=32", "trainer.microbatch_size=32")


def on_h200(*words: str) -> tuple[Config, Plan]:
    config = config_of([*words, "dry_run=true", "gpu=h200"])
    return config, check(config)


def forecast(*words: str) -> float:
    """Tokens a second that a dry run for an H200 prints."""
    config, plan = on_h200(*words)
    line = time_line(config, plan, Degrees(), target(config))
    assert config.gpu is GpuChoice.h200 and line is not None
    return float(line.split(" by forecast, ")[1].split(" ")[0].replace(",", ""))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_the_account_has_all_flops_and_the_time_of_the_measured_model(recipe: str) -> None:
    config, plan = on_h200(f"+recipe={recipe}", *WIDE_MODEL)
    core, others, flops = account(config.model, plan, 4096, 8 * 4096)
    assert flops == pytest.approx(flops_per_token(config.model, 4096), rel=1e-3), "norms' gains are not in it"
    fp8 = recipe != "bf16"
    assert core + OVERHEAD[fp8] * others == pytest.approx(flops / RATES[fp8] / 1e12, rel=1e-3)


@pytest.mark.parametrize(("recipe", "size"), [("bf16", 18), ("fp8_delayed", 16)])
def test_a_feature_of_swiglu_moves_18_bytes_or_16_in_fp8(recipe: str, size: int) -> None:
    """In BF16: gate and up read, a product written; backward also its gradient read, three written. In FP8 a byte is
    written of the product, and of the three, the two gradients in two layouts: 4 + 1 + 6 + 5."""
    moved = []
    for width in (1408, 2816):
        config, plan = on_h200(f"+recipe={recipe}", *WIDE_MODEL, f"model.moe_intermediate_size={width}")
        moved.append(_moved_bytes(config.model, plan))
    c = config.model
    rows = c.num_moe_blocks * (c.num_experts_per_token + c.num_shared_experts)
    assert moved[1] - moved[0] == size * 1408 * rows


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_a_wide_model_has_the_rate_that_was_measured(recipe: str) -> None:
    config, plan = on_h200(f"+recipe={recipe}", "model=deepseek_v3")
    assert slowdown(config.model, plan, 4096, 15360 * 4096) == 1.0


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (("+recipe=bf16", *WIDE_MODEL), 146_120),
        (("+recipe=fp8_delayed", *WIDE_MODEL), 188_633),
        (LONG, 98_676),
        (("+recipe=bf16", "model=deepseek_300m", *SEQUENCES), 447_201),
        (("+recipe=fp8_delayed", "model=deepseek_300m", *SEQUENCES), 464_095),
        (("+recipe=bf16", "model=deepseek_100m", *SEQUENCES), 1_010_616),
        (("+recipe=fp8_delayed", "model=deepseek_100m", *SEQUENCES), 1_028_757),
    ],
)
def test_the_forecast_is_near_what_was_measured(words: tuple[str, ...], measured: float) -> None:
    """docs/benchmarks.md, one H200. The rate of the wide model alone forecasts 1.14 times as much for the long sequence
    and 2.05 times for the narrowest model."""
    assert 0.97 * measured < forecast(*words) < 1.35 * measured
