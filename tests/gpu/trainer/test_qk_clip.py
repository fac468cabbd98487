"""QK-clip by the log-sum-exp that the GPU's attention returns."""

from collections.abc import Callable

import pytest
import torch

from trainer.step.engine import Engine
from trainer.step.train_step import train_step

TAU, LENGTH, CORE, HEAD = 8.0, 192, 1, 1
STILL = "optim.lr=1e-30", "optim.warmup_steps=1", f"optim.qk_clip={TAU}"  # the clip alone moves weights


@pytest.mark.parametrize("documents", ["false", "true"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_a_clip_brings_the_logits_of_a_head_below_its_threshold(
    engine: Callable[..., Engine], recipe: str, documents: str
) -> None:
    made = engine(f"+recipe={recipe}", "precision.backend=cuda", f"trainer.document_masking={documents}", *STILL)
    attn = next(block.attn for i, (_, block) in enumerate(made.model.iter_blocks()) if i == CORE)
    (nope, rope), (_, value) = attn.q_widths, attn.kv_widths
    q, kv = ((attn.q if attn.q_a is None else attn.q_b).weight, attn.kv_b.weight)
    heads = {"q": (q, nope + rope), "kv": (kv, nope + value)}
    with torch.no_grad():
        q.unflatten(0, (-1, nope + rope))[HEAD].normal_(std=8.0)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    projections = {key: weight.detach().clone() for key, (weight, _) in heads.items()}
    tokens = torch.randint(made.model.config.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    first = train_step(made, 1, tokens, 2)
    bound = made.arena.max_logits.clone()
    assert bool(first.verdict.ok) and int(first.metrics["optim/qk_clipped_heads"]) == 1
    assert (bound > TAU).nonzero().tolist() == [[CORE, HEAD]]
    gamma = TAU / float(bound[CORE, HEAD])
    assert gamma < 0.5
    for key, (weight, width) in heads.items():
        ours, old = (w.detach().unflatten(0, (-1, width)) for w in (weight, projections[key]))
        factor = torch.ones(width, 1, device=ours.device)
        factor[:nope] = gamma**0.5
        if key == "q":
            factor[nope:] = gamma
        torch.testing.assert_close(ours[HEAD], old[HEAD] * factor, rtol=1e-5, atol=0)
        others = torch.arange(len(ours)) != HEAD
        assert torch.equal(ours[others], old[others])
    for name, p in made.model.named_parameters():
        assert p is q or p is kv or torch.equal(p, before[name]), name

    second = train_step(made, 2, tokens, 2)  # a bound is at most log(LENGTH) above the largest logit
    after, slack = float(made.arena.max_logits[CORE, HEAD]), float(torch.tensor(LENGTH).log())
    assert bool(second.verdict.ok) and 0.95 * (TAU - gamma * slack) < after < 1.05 * (TAU + slack)
