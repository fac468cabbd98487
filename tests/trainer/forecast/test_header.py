"""What a run says before its first step, and which settings it calls unusual."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from composed import CONFIGS, config_of

from models.flops import count_parameters
from trainer.config import Config
from trainer.data import Prepared
from trainer.forecast.header import header, shown
from trainer.forecast.preflight import check
from trainer.forecast.unusual import unusual, usual_rates
from trainer.forecast.words import duration


def sensible(*more: str) -> Config:
    """A run with nothing unusual about it: 20 tokens a parameter, of a text that has them."""
    return config_of(["+recipe=300m_h100", "trainer.device=cpu", *more])


def text(tokens: int, documents: int) -> Prepared:
    facts = SimpleNamespace(num_tokens=tokens, num_documents=documents)
    return cast(Prepared, SimpleNamespace(train=SimpleNamespace(sidecar=facts)))


def test_the_header_names_what_the_run_will_do() -> None:
    config = config_of(["+recipe=fp8_block", "trainer.max_steps=100", "trainer.device=cpu"])
    words = ["+recipe=fp8_block", "health.alerts.webhook=https://PRIVATE", "trainer.max_steps=100"]
    rows = header(config, check(config), words, Path("runs/mine"), 1, text(409_600, 100))
    said = dict(rows)
    assert said["run folder"] == "runs/mine"
    assert said["recipe"].startswith("fp8_block; +recipe=fp8_block") and "PRIVATE" not in said["recipe"]
    assert "parameters" in said["model"] and "active" in said["model"]
    assert "one process; reference backend" in said["device"] and "% of the GEMM FLOPs in FP8" in said["device"]
    assert said["tokens"] == "2,048 a step, 204,800 in 100 steps: 0.5 epochs"
    assert "GiB a process by forecast" in said["memory"]
    assert "time" not in said  # of an H200 alone
    assert rows.index(("", "")) == len(rows) - 1


def test_the_first_step_is_that_of_the_first_phase() -> None:
    phases = "trainer.phases=[{until: 10, global_batch_size: 4, microbatch_size: 4}, {global_batch_size: 16}]"
    config = config_of(["+recipe=bf16", "trainer.max_steps=20", "trainer.device=cpu", phases])
    rows = header(config, check(config), [], Path("runs/mine"), 1, text(409_600, 100))
    assert dict(rows)["tokens"] == "512 a step at first, 25,600 in 20 steps: 0.062 epochs"


def test_a_model_without_experts_is_dense() -> None:
    for more, kind in (([], "8 experts"), (["model.num_dense_layers=3", "model.num_mtp_layers=0"], "dense")):
        config = config_of(["+recipe=bf16", "trainer.device=cpu", *more])
        rows = header(config, check(config), [], Path("runs/mine"), 1, text(409_600, 100))
        assert f"3 blocks of 256, {kind}; " in dict(rows)["model"]


def test_suggested_arguments_are_quoted() -> None:
    assert shown(["data.glob=**/*.md", "run.name=a"]) == "'data.glob=**/*.md' run.name=a"


def test_nothing_is_unusual_about_a_sensible_run() -> None:
    assert unusual(sensible(), tokens=6_000_000_000, documents=1_500_000) == []


@pytest.mark.parametrize(
    ("changed", "tokens", "documents", "says"),
    [
        ("optim.lr=1e-2", None, None, "optim.lr=0.01: "),
        ("optim.lr=1e-6", None, None, "optim.lr=1e-06: "),
        ("model.init_std=0.006", None, None, "model.init_std=0.006: small for 768 features; 1 / sqrt(features), 0.036"),
        ("trainer.max_steps=400", None, None, "optim.warmup_steps=500: the whole run"),
        ("trainer.max_steps=900", None, None, "optim.warmup_steps=500: more than half of the run"),
        ("optim.qk_clip=8", None, None, "optim.qk_clip=8: log-sum-exps of equal scores over 4,096 positions reach 8.3"),
        ("trainer.max_steps=501", None, None, "trainer.max_steps=501: 262,668,288 tokens for"),
        ("model.num_mtp_layers=1", 1_000_000_000, 250_000, "trainer.max_steps=11445: 6.0 epochs of the text"),
        ("trainer.max_steps=1000", 1_000_000, 500, "model.vocab_size=32768: the text has 31 tokens an entry"),
        ("trainer.sequence_length=512", 6_000_000_000, 1_500_000, "trainer.sequence_length=512: a document has 4,000"),
    ],
)
def test_unusual_settings_are_reported_with_their_source(
    changed: str, tokens: int | None, documents: int | None, says: str
) -> None:
    lines = [line for line in unusual(sensible(changed), tokens, documents) if line.startswith(says)]
    (line,) = lines
    assert "usual" in line or "nearly as good" in line
    assert "arXiv" in line or "(ours)" in line


def test_a_short_run_is_told_how_many_tokens_are_usual() -> None:
    config = sensible("trainer.max_steps=501")
    count, vocabulary = count_parameters(config.model), config.model.vocab_size * config.model.hidden_size
    (line,) = (line for line in unusual(config) if line.startswith("trainer.max_steps"))
    assert f"20 an active parameter, here {20 * (count.active - vocabulary):,}, are usual" in line


def test_a_short_time_is_not_zero_seconds() -> None:
    spans = [duration(seconds) for seconds in (0.069, 1.24, 49.4, 119.0, 150.0, 90000.0)]
    assert spans == ["0.069 seconds", "1.2 seconds", "49 seconds", "119 seconds", "2.5 minutes", "25.0 hours"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml")))
def test_no_model_has_small_weights(name: str) -> None:
    assert not [line for line in unusual(config_of([f"model={name}"])) if line.startswith("model.init_std")]


def test_published_learning_rates_are_usual() -> None:
    """DeepSeek-V3, V2-Lite and Moonlight, by their active parameters without vocabulary and their tokens."""
    for active, tokens, rate in ((35e9, 14.8e12, 2.2e-4), (2.2e9, 5.7e12, 4.2e-4), (2.24e9, 5.7e12, 4.2e-4)):
        low, high = usual_rates(active, tokens)
        assert low < rate < high


def test_a_vocabulary_does_not_change_the_usual_rate() -> None:
    """Nor does its head, which multi-token prediction uses again."""
    sizes = ("model.vocab_size=4096", "model.vocab_size=129280")
    small, large = (unusual(config_of(["model=deepseek_300m", "optim.lr=1", size]))[0] for size in sizes)
    assert small == large and small.startswith("optim.lr=1: ")


def test_the_default_rate_is_unusual_for_a_large_model_however_short_the_run() -> None:
    config = config_of(["model=moonlight_16b"])
    assert any(line.startswith("optim.lr=0.002: ") for line in unusual(config))
    short = replace(config, trainer=replace(config.trainer, max_steps=1))
    assert any(line.startswith("optim.lr=0.002: ") for line in unusual(short))
