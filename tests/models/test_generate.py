"""Generation: with a latent cache the logits are those without; drafts of MTP change how fast, not what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models import DeepSeek, NormPosition, YarnConfig
from models.generate import Decoder, Sampling, Tally, choose, generate
from precision import Plan, PrecisionConfig, bind, refresh_weights
from precision.errors import RunError

Build = Callable[..., DeepSeek]
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.7)
SHAPES: dict[str, dict[str, Any]] = {
    "direct queries": {},
    "query latent, YaRN": {"q_lora_rank": 24, "rope_scaling": YARN},
    "values wider than keys": {"v_head_dim": 48, "qk_nope_head_dim": 8},
    "QK norm": {"norm_position": NormPosition.post, "qk_norm": True, "qk_scale": 2.0},
    "QK norm, query latent, YaRN": {"qk_norm": True, "q_lora_rank": 24, "rope_scaling": YARN},
}
LOW = {"hidden_size": 64, "v_head_dim": 32, "num_layers": 2, "num_dense_layers": 2, "num_mtp_layers": 0}


@torch.no_grad()
def without_cache(model: DeepSeek, tokens: Tensor) -> Tensor:
    return model.logits(model.hidden(tokens))


@torch.no_grad()
def with_cache(model: DeepSeek, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Logits of all positions, seen a few at a time."""
    decoder = Decoder(model, len(tokens), sum(lengths))
    return torch.cat([model.logits(decoder(part)) for part in tokens.split(lengths, 1)], 1)


@pytest.fixture(scope="module")
def learned(build: Build) -> DeepSeek:
    """A model that has learned to count to 31 in steps, more or less: its drafts are right, more or less."""
    model = build(vocab_size=32, hidden_size=32, num_layers=2, num_experts=4)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(45):
        rows = [torch.randint(0, 31, (8, 1), generator=generator)]
        for _ in range(24):
            noise = torch.randint(0, 31, (8, 1), generator=generator)
            is_noise = torch.rand(8, 1, generator=generator) < 0.2
            rows.append(torch.where(is_noise, noise, (rows[-1] * 3 + rows[max(len(rows) - 2, 0)]) % 31))
        model(torch.cat(rows, 1)).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[40], [1] * 40, [7, 1, 2, 1, 29]], ids=["at once", "one by one", "in parts"])
def test_logits_equal_those_without_a_cache(shape: str, lengths: list[int], build: Build, tokens: Tensor) -> None:
    model = build(**SHAPES[shape])
    expected = without_cache(model, tokens[:, :40])
    assert expected.std() > 0.5, "logits are large enough to compare"
    found = with_cache(model, tokens[:, :40], lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    if len(lengths) == 1:
        assert torch.equal(found, expected), "the prompt computes as without a cache"


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_delayed", "fp8_block", "fp8_jit", "fp8_full"])
def test_low_precision_computes_in_its_recipe(
    name: str, build: Build, recipe: Callable[..., PrecisionConfig], tokens: Tensor
) -> None:
    """What is cached and what is expanded from it are the recipe's numbers: nearer to it than to FP32."""
    model, exact = build(name, **LOW), build("fp32", **LOW)
    arena = bind(model, Plan(recipe(name), model.config.num_layers), "cpu")
    without_cache(model, tokens[:, :24])
    arena.commit(torch.tensor(True))  # delayed scales have a history, as in a run
    refresh_weights(model, force=True)
    expected = without_cache(model, tokens[:, :24])
    distance = (with_cache(model, tokens[:, :24], [8] + [1] * 16) - expected).norm()
    assert 0 < distance < 0.8 * (without_cache(exact, tokens[:, :24]) - expected).norm()


def test_a_cache_forgets(build: Build, tokens: Tensor) -> None:
    model = build()
    decoder = Decoder(model, 2, 12)
    decoder(tokens[:, :8])
    decoder(tokens[:, 20:23])
    decoder.cut(9)
    assert decoder.length == 9
    found = decoder(tokens[:, 9:11])
    same = torch.cat([tokens[:, :8], tokens[:, 20:21], tokens[:, 9:11]], 1)
    with torch.no_grad():
        torch.testing.assert_close(found, model.hidden(same)[:, -2:], rtol=0, atol=1e-4)
    with pytest.raises(AssertionError, match="room for 12"):
        decoder(tokens[:, :2])


def test_greedy_text_is_that_without_a_cache(learned: DeepSeek) -> None:
    text = [3, 1, 4]
    for _ in range(12):
        text.append(int(without_cache(learned, torch.tensor([text]))[0, -1].argmax()))
    tally = Tally()
    assert list(generate(learned, [3, 1, 4], 12, tally=tally)) == text[3:]
    assert (tally.passes, tally.drafted) == (12, 0)


def test_drafts_give_the_same_text_in_fewer_passes(learned: DeepSeek) -> None:
    passes = accepted = drafted = 0
    for prompt in ([5], [1, 2], [7] * 10, [30, 2, 9, 14]):
        tally = Tally()
        expected = list(generate(learned, prompt, 40))
        assert list(generate(learned, prompt, 40, speculative=True, tally=tally)) == expected
        assert tally.passes + tally.accepted in (40, 41), "a token a pass, and one for each right draft"
        passes, accepted, drafted = passes + tally.passes, accepted + tally.accepted, drafted + tally.drafted
    assert drafted // 4 < accepted < drafted and passes < 120


def test_wrong_drafts_change_nothing(build: Build) -> None:
    model = build()  # random weights
    tally = Tally()
    expected = list(generate(model, [5, 6, 7], 20))
    assert list(generate(model, [5, 6, 7], 20, speculative=True, tally=tally)) == expected
    assert tally.accepted < 5 and tally.passes + tally.accepted in (20, 21)


def test_generation_ends_at_the_end_of_text(learned: DeepSeek) -> None:
    text = list(generate(learned, [5], 30))
    end = text[7]
    for speculative in (False, True):
        assert list(generate(learned, [5], 30, end=end, speculative=speculative)) == text[: text.index(end)]
    for count in (1, 2, 3):
        assert list(generate(learned, [5], count, speculative=True)) == text[:count]


def test_sampling() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    share = (logits / 0.7).softmax(-1)

    def drawn(sampling: Sampling, count: int = 2000) -> Tensor:
        generator = torch.Generator().manual_seed(sampling.seed)
        return torch.tensor([choose(logits, sampling, generator) for _ in range(count)])

    found = drawn(Sampling(0.7, 1.0, 1)).bincount(minlength=4) / 2000
    torch.testing.assert_close(found, share, rtol=0, atol=0.03)
    assert torch.equal(drawn(Sampling(0.7, 1.0, 1), 50), drawn(Sampling(0.7, 1.0, 1), 50)), "a seed means the same"
    assert not torch.equal(drawn(Sampling(0.7, 1.0, 1), 50), drawn(Sampling(0.7, 1.0, 2), 50))
    top = float(share[1])
    assert drawn(Sampling(0.7, top - 0.01), 50).unique().tolist() == [1], "the likeliest is enough"
    assert drawn(Sampling(0.7, top + 0.01), 200).unique().tolist() == [1, 2]
    assert drawn(Sampling(0.7, 1e-9), 20).unique().tolist() == [1]
    assert drawn(Sampling(), 3).tolist() == [1, 1, 1]
    assert drawn(Sampling(5e-324), 3).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "how", "says"),
    [
        ([], {}, "prompt: it has no tokens"),
        ([1], {"speculative": True, "sampling": Sampling(0.5)}, "temperature=0.5: speculation keeps the greedy text"),
        ([1], {"speculative": True}, "drafts come from multi-token prediction, which the model does not have"),
    ],
)
def test_mistakes(prompt: list[int], how: dict[str, Any], says: str, build: Build) -> None:
    with pytest.raises(ValueError, match=says):
        next(generate(build(num_layers=1, num_mtp_layers=0), prompt, 3, **how))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_no_traceback(temperature: float) -> None:
    with pytest.raises(RunError, match="not finite"):
        choose(torch.tensor([0.0, float("nan")]), Sampling(temperature), torch.Generator())


def test_speculation_reports_them_too(learned: DeepSeek, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the prompt's pass, or in one that checks a draft; in drafts themselves they do no harm."""
    exact, text = learned.logits, list(generate(learned, [5], 30))

    def spoil(call: Callable[[int], bool]) -> list[int]:
        calls = iter(range(1000))  # the prompt's, then a draft's and a check's in turn
        monkeypatch.setattr(learned, "logits", lambda h: exact(h) * (torch.nan if call(next(calls)) else 1.0))
        return list(generate(learned, [5], 30, speculative=True))

    assert spoil(lambda i: i % 2 == 1) == text
    for bad in (0, 6):
        with pytest.raises(RunError, match="not finite"):
            spoil(lambda i, bad=bad: i == bad)
