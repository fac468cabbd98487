"""Generation on a GPU: with the latent cache and the fast backends the logits are those without a cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.generate import Decoder, Tally, generate
from precision import refresh_weights
from precision.plain import in_bf16
from trainer.step.engine import Engine

RECIPES = "bf16", "fp8_delayed", "fp8_jit", "fp8_block"
LENGTHS = [61, 1, 1, 2, 1, 30]


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_equal_those_without_a_cache(recipe: str, engine: Callable[..., Engine]) -> None:
    made = engine(f"precision={recipe}", "compile.enabled=false", "model.init_std=0.08", "model.vocab_size=512")
    model, device = made.model, made.device
    tokens = torch.randint(0, 512, (2, sum(LENGTHS)), device=device, generator=torch.Generator(device).manual_seed(0))

    @torch.no_grad()
    def whole() -> Tensor:
        return model.logits(model.hidden(tokens)).double()

    whole()
    made.arena.commit(torch.tensor(True, device=device))  # delayed scales have a history, as in a run
    refresh_weights(model, force=True)
    expected = whole()
    decoder = Decoder(model, 2, tokens.shape[1])
    with torch.no_grad():
        found = torch.cat([model.logits(decoder(part)) for part in tokens.split(LENGTHS, 1)], 1).double()
    with in_bf16(model):
        cost = (whole() - expected).norm()
    distance = (found - expected).norm()
    assert found.isfinite().all()
    assert distance < (0.1 * expected.norm() if recipe == "bf16" else cost)


def test_drafts(engine: Callable[..., Engine]) -> None:
    made = engine("precision=fp8_block", "compile.enabled=false", "model.vocab_size=512")
    tally = Tally()
    text = list(generate(made.model, [1, 2, 3], 24, speculative=True, tally=tally))
    assert len(text) == 24 and all(0 <= token < 512 for token in text)
    assert tally.passes + tally.accepted in (24, 25)
