"""A forward and backward pass off the record leaves no trace in what the next step or a log reads."""

from collections.abc import Callable

import torch

from trainer.config import Config
from trainer.step.engine import Engine, build_engine
from trainer.step.second_pass import run, without_side_effects
from trainer.step.train_step import train_step


def test_a_pass_off_the_record_leaves_no_trace(config: Callable[..., Config]) -> None:
    engine = build_engine(config("+recipe=fp8_delayed"), torch.device("cpu"))
    first, other = torch.randint(320, (2, 4, 25), generator=torch.Generator().manual_seed(0))
    train_step(engine, 1, first, 2)

    def state(engine: Engine) -> list[torch.Tensor]:
        arena = engine.arena
        moments = [t for each in engine.optimizer.state_dict().values() for t in each.values()]
        found = [arena.amax, arena.scale, arena.history, engine.guard.committed, *engine.model.state_dict().values()]
        return [tensor.clone() for tensor in (*found, *moments)]

    before = state(engine)
    with without_side_effects(engine):
        run(engine, other, 4, lambda name, parameter: None)
        assert (engine.arena.amax > before[0]).any(), "other tokens have other maxima"
        assert any(p.grad is not None for p in engine.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(state(engine), before, strict=True))
    assert all(p.grad is None for p in engine.model.parameters())
