"""Runs of an earlier version, whose configs lack the keys that came later, are still opened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.generate import generate
from trainer.build import checkpoint_origin
from trainer.config import Config, load
from trainer.data import prepare
from trainer.offline.evaluate import evaluate
from trainer.offline.saved_model import config_at, open_run
from trainer.trainer import Trainer

OLD = yaml.safe_load((Path(__file__).parent / "golden" / "config_1019c45.yaml").read_text())


def with_keys_of(old: Any, new: Any) -> Any:
    """`new` without the keys that `old` does not have."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {key: with_keys_of(old[key], value) for key, value in new.items() if key in old}


@pytest.mark.parametrize("knows", [True, False], ids=["config in checkpoint", "config.yaml alone"])
def test_a_run_without_the_keys_that_came_later_is_evaluated_sampled_and_resumed(
    knows: bool, config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(OLD)

    def made_then(config: Config, tokenizer_hash: str) -> dict[str, Any]:
        made = checkpoint_origin(config, tokenizer_hash)
        tree = with_keys_of(OLD, made.pop("config"))
        return {**made, "config": tree} if knows else made

    monkeypatch.setattr("trainer.build.checkpoint_origin", made_then)
    words = "+recipe=fp8_delayed", "run.name=old", "run.resume=auto", "eval.at_end=2000"
    done = Trainer(config(*words, "trainer.max_steps=2", "checkpoint.every=2")).train()
    path = done.folder / "config.yaml"
    path.write_text(yaml.safe_dump(with_keys_of(OLD, yaml.safe_load(path.read_text()))))
    assert "at_end" not in config_at(done.folder, 2)["eval"] and "qk_clip" not in config_at(done.folder, 2)["optim"]
    saved = open_run(done.folder)
    (score,) = evaluate(saved, prepare(saved.config.data, saved.config.model.vocab_size), None)
    assert score.own == pytest.approx(done.validation_loss, rel=1e-6)
    _, end = saved.tokenizer()
    assert len(list(generate(saved.model, [end], 3))) == 3
    assert Trainer(config(*words, "trainer.max_steps=3")).train().step == 3
