"""Generation: the next token, repeatedly, from a latent cache (`mla.LatentCache`).

The prompt passes through the model once. Each later pass has one new position, which attends to the cached latents.

Sampling: softmax(logits / temperature), cut to the likeliest tokens that together have the probability `top_p` (nucleus
sampling, arXiv 1904.09751); one of them is drawn. Temperature 0 takes the likeliest.

Speculation (self-speculative decoding with multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section 5.4.3). Let
h_i be the state at position i. Once the token at i + 1 is chosen, MTP's first depth predicts the one at i + 2: a draft.
The next pass of the main model has two positions, the chosen token and the draft:

    place      i + 1               i + 2
    token      chosen              draft
    predicts   the one at i + 2    the one at i + 3, of use if the one at i + 2 is the draft

So each pass yields two tokens if the draft was right, and one if it was wrong; then its latents are discarded. The main
model chooses every token. The text is the greedy one, except for tokens whose logits differ by less than the rounding
difference between GEMMs with two rows and with one. MTP has its own cache; its entry at i needs the token at i + 1.

Legend: B batch, T new positions, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from models.deepseek import DeepSeek
from models.layers import normed, rope_table
from models.mla import LatentCache
from models.mtp import MTPBlock
from precision import refresh_weights
from precision.errors import RunError, UserError


@dataclass
class Sampling:
    """How a token is chosen. temperature 0: the likeliest one; otherwise `top_p` and `seed` apply."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Tally:
    """Counts of a generation. passes: of the main model, the prompt's included; drafted, accepted: tokens of MTP's."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0


class Decoder:
    """A model with the latent caches of the positions it has seen: `batch` sequences, `capacity` positions each.

    It uses the weights as they are when it is made, without gradients.
    """

    def __init__(self, model: DeepSeek, batch: int, capacity: int):
        refresh_weights(model)
        self._model = model
        config, device = model.config, model.lm_head.weight.device
        self._rope_2LP = rope_table(capacity, config.qk_rope_head_dim, config.rope_theta, config.rope_scaling, device)
        self._blocks = [block for _, block in model.iter_blocks()[: config.num_layers]]
        self._caches = [LatentCache(block.attn, batch, capacity) for block in self._blocks]
        self._ahead: LatentCache | None = None  # MTP's first depth
        self._size = batch, capacity

    @property
    def length(self) -> int:
        """Number of positions seen."""
        return self._caches[0].length

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Process the next tokens, int64; return their states after the final norm [B, T, D], for `DeepSeek.logits`."""
        rope = self._rope_of(self._caches[0], tokens_BT.shape[1])
        h_BTD = self._model.embed(tokens_BT)
        for block, cache in zip(self._blocks, self._caches, strict=True):
            h_BTD, _, _ = block(h_BTD, rope, cache)
        return normed(h_BTD, self._model.norm)

    @torch.no_grad()
    def ahead(self, h_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        """Run MTP's first depth on states of the main model and the token after each, following those seen here.

        Returns its states [B, T, D]; their logits predict the token after that.
        """
        block = self._model.mtp[0]
        assert isinstance(block, MTPBlock)
        if self._ahead is None:
            self._ahead = LatentCache(block.attn, *self._size)
        rope = self._rope_of(self._ahead, tokens_BT.shape[1])
        return block(h_BTD, rope, self._model.embed(tokens_BT), self._ahead)[0]

    def cut(self, length: int) -> None:
        """Discard the cache from position `length` on."""
        for cache in self._caches:
            cache.cut(length)

    def _rope_of(self, cache: LatentCache, count: int) -> Tensor:
        return self._rope_2LP[:, cache.length : cache.length + count]


def generate(
    model: DeepSeek,
    prompt: list[int],
    max_tokens: int,
    *,
    end: int | None = None,
    sampling: Sampling | None = None,
    speculative: bool = False,
    tally: Tally | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, as they are generated: `max_tokens` of them, or up to `end`, which is not
    yielded.

    speculative: use MTP's drafts, if the temperature is 0. tally: updated during the generation. UserError for an empty
    prompt, and for speculation that the model or temperature does not allow.
    """
    sampling, tally = sampling or Sampling(), tally or Tally()
    if not prompt:
        raise UserError("prompt: it has no tokens; begin with the end-of-text token, as a document does")
    if speculative and sampling.temperature > 0:
        raise UserError(
            f"temperature={sampling.temperature}: speculation keeps the greedy text only; set 0, or do not speculate"
        )
    if speculative and not len(model.mtp):
        raise UserError("speculative: drafts come from multi-token prediction, which the model does not have")
    decoder = Decoder(model, 1, len(prompt) + max_tokens)
    if speculative:
        tokens = _speculated(model, decoder, prompt, tally)
    else:
        tokens = _plain(model, decoder, prompt, sampling, tally)
    for token in islice(tokens, max_tokens):
        if token == end:
            return
        yield token


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token by its logits, FP32 or narrower. generator: on the CPU, so that a seed gives the same token
    everywhere. RunError if they are not finite."""
    if sampling.temperature == 0:
        return _likeliest(logits_V)
    below_V = logits_V.double().cpu() - logits_V.max().item()  # else a tiny temperature would make logits infinite
    share_V = _checked((below_V / sampling.temperature).softmax(-1))
    share_V, token_V = share_V.sort(descending=True, stable=True)
    before_V = share_V.cumsum(-1) - share_V
    kept_V = torch.where(before_V < sampling.top_p, share_V, 0.0)
    kept_V[0] = share_V[0]
    return int(token_V[torch.multinomial(kept_V, 1, generator=generator)])


def _likeliest(logits_V: Tensor) -> int:
    return int(_checked(logits_V).argmax())


def _checked(numbers: Tensor) -> Tensor:
    if numbers.isnan().any():
        raise RunError("the model's logits are not finite")
    return numbers


@torch.no_grad()
def _logits(model: DeepSeek, h_BTD: Tensor) -> Tensor:
    """Return the logits [T, V] of the one sequence."""
    return model.logits(h_BTD)[0]


def _plain(model: DeepSeek, decoder: Decoder, prompt: list[int], sampling: Sampling, tally: Tally) -> Iterator[int]:
    generator = torch.Generator().manual_seed(sampling.seed)
    given = prompt
    while True:
        h_BTD = decoder(_row(model, given))
        tally.passes += 1
        given = [choose(_logits(model, h_BTD[:, -1:])[0], sampling, generator)]
        yield given[0]


def _speculated(model: DeepSeek, decoder: Decoder, prompt: list[int], tally: Tally) -> Iterator[int]:
    h_BTD = decoder(_row(model, prompt))
    tally.passes += 1
    chosen = _likeliest(_logits(model, h_BTD[:, -1:]))
    yield chosen
    after = [*prompt[1:], chosen]  # the token after each state in h
    while True:
        ahead_B1D = decoder.ahead(h_BTD, _row(model, after))[:, -1:]
        draft = int(_logits(model, ahead_B1D).argmax())
        sure = decoder.length + 1
        h_BTD = decoder(_row(model, [after[-1], draft]))
        logits_TV = _logits(model, h_BTD)
        after = [_likeliest(logits_TV[0])]
        tally.passes += 1
        tally.drafted += 1
        if after[0] == draft:
            tally.accepted += 1
            after.append(_likeliest(logits_TV[1]))
        else:
            decoder.cut(sure)
            h_BTD = h_BTD[:, :1]
        yield from after


def _row(model: DeepSeek, tokens: list[int]) -> Tensor:
    return torch.tensor([tokens], device=model.lm_head.weight.device)
