"""What the kernels quantise on the GPU is what an export without one writes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.config import plain_model
from models.hf import matrices
from precision import GroupedLinear, Linear, refresh_weights
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.storage import SavedTensors
from trainer.config import Config
from trainer.offline.hf_export import ExportFormat, export
from trainer.offline.hf_fp8 import RunQuantizer
from trainer.step.engine import Engine
from trainer.step.train_step import train_step

SIZES = "trainer.global_batch_size=8", "trainer.microbatch_size=8", "optim.warmup_steps=1", "optim.lr=1e-3"


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed"])
def test_the_exported_fp8_is_what_the_gpu_computes_with(
    recipe: str, engine: Callable[..., Engine], config: Callable[..., Config], tmp_path: Path
) -> None:
    told = *SIZES, f"+recipe={recipe}", "compile.enabled=false"
    e, cfg = engine(*told), config(*told)
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2):
        tokens = torch.randint(cfg.model.vocab_size, (8, 129), generator=generator)
        assert bool(train_step(e, step, tokens, 8).verdict.ok)
    saver = Checkpointer(tmp_path / "checkpoints", 1, lambda *what, **more: None)
    saver.save(2, e.state(), {"model": plain_model(cfg.model), "precision": recipe})
    saver.close()

    path = tmp_path / "checkpoints" / "step_00000002"
    quantizer = RunQuantizer(cfg.model, cfg.precision, e.plan.backends(), SavedTensors(path), path)
    made = export(path, tmp_path / "out", cfg.model, ExportFormat.fp8, None, quantizer=quantizer, mtp=True)
    assert made.left == []
    found = {}
    for file in made.folder.glob("*.safetensors"):
        found |= load_file(file)
    refresh_weights(e.model, force=True)
    layers = {n: m for n, m in e.model.named_modules() if isinstance(m, Linear | GroupedLinear) and m.recipe.is_fp8}
    assert any(layer.recipe.backend == "cuda" for layer in layers.values())
    for matrix in matrices(cfg.model):
        layer = layers.get(matrix.name.removesuffix(".weight"))
        if layer is None:
            continue
        assert layer.operand is not None
        data = layer.operand.data.cpu().contiguous()
        data = data if matrix.expert is None else data[matrix.expert]
        exported = torch.cat([found[name].view(torch.uint8) for name in matrix.hf_names])
        assert torch.equal(exported, data.view(torch.uint8)), matrix
