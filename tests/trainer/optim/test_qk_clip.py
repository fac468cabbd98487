"""QK-clip: heads whose logits are too large are scaled down after a step, and no other bit changes.

Among ranks: every head is clipped in each step of test_muon_ranks, parallel/test_context and parallel/test_pipeline.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.mla import MLA
from precision.attention import visible
from precision.errors import UserError
from trainer.config import Config
from trainer.forecast.preflight import check, without_effect
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import train_step

Configs = Callable[..., Config]
CPU = torch.device("cpu")
STILL = "precision=fp32", "optim.lr=1e-30", "model.num_mtp_layers=1"  # the clip alone moves weights
TAU = 8.0


def projections(engine: Engine) -> list[tuple[str, MLA, Tensor, Tensor]]:
    """Name, attention, masters of q and of kv_b, block by block."""
    found = []
    for name, block in engine.model.iter_blocks():
        attn = block.attn
        q = attn.q if attn.q_a is None else attn.q_b
        found.append((name, attn, q.weight.detach(), attn.kv_b.weight.detach()))
    return found


def large(engine: Engine, core: int = 0, head: int = 1) -> Engine:
    """Gives a head logits above TAU."""
    _, attn, q, _ = projections(engine)[core]
    q.unflatten(0, (-1, sum(attn.q_widths)))[head].normal_(std=8.0, generator=torch.Generator().manual_seed(1))
    return engine


def windows() -> Tensor:
    return torch.randint(320, (4, 25), generator=torch.Generator().manual_seed(0))


def exact_logits(engine: Engine) -> Tensor:
    """Largest logit of each head over the windows [cores, H], of all scores in float64."""
    tops = []

    def seen(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keeping(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, row: Tensor | None) -> Tensor:
            z = (q.double() @ k.double().mT * scale).masked_fill(~visible(mask, q.shape[2], CPU), -torch.inf)
            tops.append(z.amax((0, 2, 3)))
            return core(q, k, v, scale, mask, row)

        return keeping

    cores = [(block.attn, block.attn.core) for _, block in engine.model.iter_blocks()]
    for attn, core in cores:
        attn.core = seen(core)
    with torch.no_grad():
        engine.model(windows())
    for attn, core in cores:
        attn.core = core
    return torch.stack(tops)


@pytest.mark.parametrize(("latent", "core", "head"), [("null", 0, 1), ("32", 2, 0)])
def test_a_clip_scales_what_makes_the_logits_and_nothing_else(
    config: Configs, latent: str, core: int, head: int
) -> None:
    """Core 2 is multi-token prediction's."""
    keys = *STILL, f"model.q_lora_rank={latent}", f"optim.qk_clip={TAU}"
    engine = large(build_engine(config(*keys), CPU), core, head)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    exact = exact_logits(engine)
    result = train_step(engine, 1, windows(), 2)
    bound = engine.arena.max_logits.double()
    assert ((exact < bound + 1e-4) & (bound < exact + torch.tensor(24.0).log() + 1e-4)).all()
    gamma = (TAU / bound).clamp(max=1.0)
    assert (gamma < 1).nonzero().tolist() == [[core, head]] and gamma[core, head] < 0.8
    assert int(result.metrics["optim/qk_clipped_heads"]) == 1

    expected = dict(before)
    for (name, attn, _, _), gamma_H in zip(projections(engine), gamma, strict=True):
        (nope, rope), (_, value) = attn.q_widths, attn.kv_widths
        q, kv = f"{name}.attn.{'q' if attn.q_a is None else 'q_b'}.weight", f"{name}.attn.kv_b.weight"
        for key, widths, powers in ((q, (nope, rope), (0.5, 1)), (kv, (nope, value), (0.5, 0))):
            factor = torch.cat([g**p * torch.ones(w) for g in gamma_H for w, p in zip(widths, powers, strict=True)])
            expected[key] = before[key].double() * factor.double()[:, None]
    for name, p in engine.model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name].double(), rtol=1e-6, atol=0)
        same = (expected[name].double() == before[name].double()).all(-1)
        assert torch.equal(p.detach()[same], before[name][same]), f"{name}: other rows keep their bits"

    after = exact_logits(engine)
    upto = slice(core + 1)  # blocks behind it read another stream now
    torch.testing.assert_close(after[upto], (gamma * exact)[upto], rtol=1e-4, atol=1e-5)
    assert after[core].max() < TAU * (1 + 1e-5)


def weights(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


@pytest.mark.parametrize("optimizer", ["adamw_wsd", "muon_wsd"])
def test_a_run_that_is_never_clipped_has_the_bits_of_one_without(config: Configs, optimizer: str) -> None:
    runs = [build_engine(config(f"optim={optimizer}", f"optim.qk_clip={tau}"), CPU) for tau in ("null", "100")]
    for step in (1, 2):
        for engine in runs:
            train_step(engine, step, windows(), 2)
    assert all(torch.equal(*pair) for pair in zip(*map(weights, runs), strict=True))
    clipped = build_engine(config(f"optim={optimizer}", "optim.qk_clip=1"), CPU)
    for step in (1, 2):
        assert int(train_step(clipped, step, windows(), 2).metrics["optim/qk_clipped_heads"]) == 3 * 2


def test_a_skipped_step_clips_nothing_and_a_nan_clips_no_head(config: Configs) -> None:
    bad = "debug.inject={step: 1, where: loss, value: nan}"
    engine = large(build_engine(config(*STILL, f"optim.qk_clip={TAU}", bad), CPU))
    before = weights(engine)
    result = train_step(engine, 1, windows(), 2)
    assert not result.verdict.ok and int(result.metrics["optim/qk_clipped_heads"]) == 0
    assert all(torch.equal(*pair) for pair in zip(before, weights(engine), strict=True))
    engine.arena.max_logits.copy_(torch.tensor([[torch.nan, torch.inf], [-torch.inf, 0.0], [TAU, -1.0]]))
    assert engine.qk_clip is not None and int(engine.qk_clip.apply(torch.tensor(True))) == 0
    assert all(torch.equal(*pair) for pair in zip(before, weights(engine), strict=True))


def test_a_resumed_run_clips_on(config: Configs) -> None:
    """A clip goes by its own step's logits: nothing of it has to be saved."""
    keys = "optim.qk_clip=1", "optim.warmup_steps=0"
    through, first, second = (build_engine(config(*keys), CPU) for _ in range(3))
    for step in (1, 2, 3):
        train_step(through, step, windows(), 2)
    for step in (1, 2):
        train_step(first, step, windows(), 2)
    second.model.load_state_dict(first.model.state_dict())
    for name, tensors in second.optimizer.state_dict().items():
        for key, tensor in tensors.items():
            tensor.copy_(first.optimizer.state_dict()[name][key])
    second.load_state(first.state())
    train_step(second, 3, windows(), 2)
    assert all(torch.equal(*pair) for pair in zip(weights(through), weights(second), strict=True))


def test_what_cannot_be_clipped_is_reported(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    for tau in ("0", "-1", "inf", "nan"):
        with pytest.raises(UserError, match=r"optim.qk_clip=.*: out of range; set a number above 0"):
            check(config(f"optim.qk_clip={tau}"))
    (line,) = [x for x in without_effect(config("model.qk_norm=true", "optim.qk_clip=100"), 1) if "qk_clip" in x]
    assert line.startswith("optim.qk_clip=100.0 has no effect: model.qk_norm=true")
    assert build_engine(config("model.qk_norm=true", "optim.qk_clip=100"), CPU).qk_clip is None
    monkeypatch.setattr(MLA, "raises_logits", lambda *_: False)
    with pytest.raises(UserError, match=r"optim.qk_clip=100.0: .* returns no log-sum-exp .*; set optim.qk_clip=null"):
        build_engine(config("optim.qk_clip=100"), CPU)
