"""A run with `trainer.document_masking` trains, evaluates and resumes within documents; without it nothing is asked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_lines import metrics

from trainer.config import Config
from trainer.trainer import Trainer

Configs = Callable[..., Config]


def losses(run: Path) -> list[tuple[float, ...]]:
    return [tuple(v for k, v in line.items() if k.startswith("loss/")) for line in metrics(run)]


def test_a_run_and_its_resume_stay_within_documents(
    config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of a few words, so that they are cut off from each other in every sequence."""
    (tmp_path / "corpus").mkdir()
    for i in range(200):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"number {i} has a friend, {i + 1}")
    keys = [f"data.path={tmp_path}/corpus", f"data.cache_dir={tmp_path}/cache", "run.resume=auto", "eval.every=2"]
    keys += ["trainer.max_steps=4", "checkpoint.every=2", "model.num_mtp_layers=2", "health.every=3"]
    masked = [*keys, "trainer.document_masking=true"]
    trainer = Trainer(config(*masked, "run.name=masked"))
    end = trainer.run.data.train.sidecar.end_of_text
    assert trainer.run.engine.model.end_of_text == end
    tokens = torch.from_numpy(trainer.run.data.train.tokens.astype("int64"))
    assert int((tokens == end).sum()) > 100
    whole = losses(trainer.train().folder)
    half = Trainer(config(*masked, "run.name=resumed", "trainer.max_steps=2")).train().folder
    again = Trainer(config(*masked, "run.name=resumed")).train().folder
    assert again == half
    assert losses(half)[-2:] == whole[-2:]
    for name in ("documents_of", "bounds_of", "beyond"):  # without it, no document is looked for
        monkeypatch.delattr(f"models.deepseek.{name}")
    plain = losses(Trainer(config(*keys, "run.name=plain")).train().folder)
    assert abs(plain[0][0] - whole[0][0]) > 1e-6
    with pytest.raises(ValueError, match=r"trainer\.document_masking=False: .* was trained with True"):
        Trainer(config(*keys, "run.name=masked"))
