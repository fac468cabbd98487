"""Compute weights that the optimizer makes with the masters are those that a pass of its own makes at the next step's
start: after good steps, after a skipped one with a spoilt weight, and after a rewind."""

from typing import Any

import pytest
import torch
from composed import config_of
from torch import Tensor

import trainer.optim.adamw
import trainer.step.engine
from precision import begin_step, gemm_layers
from precision.hardware import Gpu
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import train_step

pytest.importorskip("triton", reason="Triton is missing")
RUN = ["trainer.device=cpu", "precision.backend=cuda", "optim.warmup_steps=1", "compile.enabled=false", "data=text"]
RUN += ["trainer.sequence_length=8", "optim.lr=5e-3", "model.vocab_size=64", "model.hidden_size=32", "data.path=."]
RUN += ["model.num_layers=1", "model.num_dense_layers=0", "model.num_heads=1", "model.kv_lora_rank=16"]
RUN += ["model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.intermediate_size=32"]
RUN += ["model.num_experts=2", "model.num_experts_per_token=1", "model.moe_intermediate_size=16"]
RUN += ["model.num_mtp_layers=0", "trainer.global_batch_size=1", "trainer.microbatch_size=1"]
RUN += ["debug.inject={where: weight, step: 2, steps: 1, value: nan}"]


def weights(engine: Engine) -> list[Tensor]:
    begin_step(engine.model, engine.arena)
    operands = [tensor for layer in gemm_layers(engine.model) for tensor in layer.operand or () if tensor is not None]
    return [engine.arena.amax.clone(), *(t.detach().float().clone() for t in operands)]


def train(precision: str, *keys: str) -> tuple[list[Tensor], list[int]]:
    """Verdicts, losses and weights of three steps, with a rewind before the last; how many weights were made ahead."""
    config = config_of([*RUN, f"precision={precision}", *keys])
    engine = build_engine(config, torch.device("cpu"))
    seen, ahead = [], []
    saved: dict[str, Any] = {}
    for step in range(1, 4):
        if step == 3:
            seen += weights(engine)
            engine.load_state(saved)
            for tensor, was in zip(engine.model.parameters(), saved["weights"], strict=True):
                tensor.data.copy_(was)
        ahead.append(sum(layer.is_made_ahead() for layer in gemm_layers(engine.model)))
        seen += weights(engine)
        tokens = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(step))
        result = train_step(engine, step, tokens, config.trainer.microbatch_size)
        seen += [result.verdict.ok.float(), result.metrics["loss/total"]]
        if step == 1:
            state = engine.state()
            saved = {key: state[key] for key in ("arena", "guard")}
            saved["weights"] = [p.detach().clone() for p in engine.model.parameters()]
    return [*seen, *weights(engine)], ahead


@pytest.mark.parametrize(
    ("precision", "keys", "expected"),
    [
        ("bf16", [], 10),
        ("fp8_delayed", [], 10),
        ("fp8_delayed", ["optim.qk_clip=1e-3"], 8),  # queries and keys change after their copy is made
    ],
)
def test_weights_made_ahead_are_those_made_at_the_start(
    precision: str, keys: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.step.engine, "detect", lambda device: Gpu("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(trainer.optim.adamw, "_has_kernel", lambda device: True)
    ours, ahead = train(precision, *keys)
    monkeypatch.setattr("precision.linear._GemmLayer.made_ahead", lambda self: None)
    theirs, never = train(precision, *keys)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0)) for a, b in zip(ours, theirs, strict=True))
    assert (ahead, never) == ([0, expected, 0], [0] * 3)
