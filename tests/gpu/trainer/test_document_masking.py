"""A run that stays within documents: compiled, recomputed and as a CUDA graph it is the run that it is plainly; the
loader's batches are on the GPU before they are asked for."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small import steady
from torch import Tensor

from trainer.config import Config
from trainer.data import Loader
from trainer.data.prepare import prepare
from trainer.step.engine import Engine
from trainer.step.train_step import train_step
from trainer.trainer import Trainer

Engines = Callable[..., Engine]
END = 0
KEYS = ["trainer.global_batch_size=8", "trainer.microbatch_size=4", "model.num_mtp_layers=2", "optim.warmup_steps=1"]


def batches(e: Engine) -> list[Tensor]:
    """Documents of 32 tokens on average."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, e.model.config.vocab_size, (4, 8, 129), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 1 / 32] = END
    return list(tokens.cuda())


def losses(e: Engine) -> Tensor:
    """Of four steps, the last two of which must not wait for the GPU."""
    e.model.end_of_text = END
    results = []
    for step, tokens in enumerate(batches(e), start=1):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            results.append(train_step(e, step, tokens, 4))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(bool(r.verdict.ok) for r in results)
    return torch.stack([r.metrics["loss/total"] for r in results]).double()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
@pytest.mark.parametrize(
    "how",
    [
        ["cuda_graph=true", "compile.enabled=false"],
        ["compile.enabled=true", "recompute=selective"],
        ["compile.enabled=true", "recompute=full"],
        ["compile.enabled=true", "cuda_graph=true"],
    ],
)
def test_document_masking_is_the_same_run_however_executed(engine: Engines, recipe: str, how: list[str]) -> None:
    torch._dynamo.reset()
    recipe = f"+recipe={recipe}"
    plain, again = (losses(engine(*KEYS, recipe, "compile.enabled=false")) for _ in range(2))
    ours = losses(engine(*KEYS, recipe, *how))
    assert (ours - plain).norm() <= max(4 * (again - plain).norm(), 2e-3 * plain.norm())


def test_a_run_with_evaluation_sampled_steps_and_a_shadow(config: Callable[..., Config], tmp_path: Path) -> None:
    """What is outside the step, eager and off the record, stays within documents, too."""
    keys = [*KEYS, "+recipe=fp8_delayed", "trainer.document_masking=true", "trainer.max_steps=6", "eval.every=3"]
    keys += ["health.every=2", "health.shadow_every=3", "logging.every=1", "logging.console.enabled=false"]
    keys += [f"run.dir={tmp_path}", f"data.cache_dir={tmp_path}/cache"]
    trainer = Trainer(config(*keys, "run.name=masked"))
    assert trainer.run.engine.model.end_of_text == trainer.run.data.train.sidecar.end_of_text
    assert np.isfinite(trainer.train().validation_loss)


def test_batches_are_on_the_gpu_before_they_are_asked_for(config: Callable[..., Config], tmp_path: Path) -> None:
    data = prepare(replace(config().data, cache_dir=str(tmp_path)), 4096)
    plain = Loader(data.train, steady(128, 16), seed=1)
    loader = Loader(data.train, steady(128, 16), seed=1, device=torch.device("cuda", 0), ahead=2)
    for step in range(20):
        if step == 12:  # a rewind: what was read ahead is dropped
            for each in (plain, loader):
                each.leave_out([[200, 260]])
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        try:
            tokens = loader.next()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tokens.is_cuda
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):  # the tokens' memory is not given to later batches before this is done
            busy = busy @ busy.mT / 2048
        kept = tokens + (busy[0, 0] * 0).nan_to_num().long()
        del tokens
        assert torch.equal(kept.cpu(), plain.next())
    time.sleep(0.2)
    assert all(reading.tokens.done() for reading in loader._readings)
    loader.close()
