"""The baseline: the loss, in nats a token, of a model that sees one token back, on the validation bins.

Interpolated Kneser-Ney, the strongest of the simple smoothings (Chen and Goodman 1998, Harvard TR-10-98, section 2.7).
With c(a b) the count of b after a, c(a) = sum_b c(a b), T(a) the number of different tokens after a, and T(b) the
number before b:

    p(b | a) = max(c(a b) - d, 0) / c(a)  +  d T(a) / c(a) * q(b)
    q(b)     = max(T(b) - d, 0) / N       +  d M / N * 1 / V          N = sum_b T(b), M = tokens with T(b) > 0

A token never seen as context gives q. Both levels sum to one. The discount d is tuned on a tenth of the training data,
taken in stretches, with the counts of the rest; the final counts are those of all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.data.bins import Bins

DISCOUNTS = np.arange(0.05, 1.0, 0.05)
MOST_TOKENS = 10_000_000  # some 4 s when data is prepared
NUM_STRETCHES = 64  # of the training data; the last tenth of each is held out to tune the discount


@dataclass(frozen=True)
class PairCounts:
    """Counts of neighbouring pairs: `code` [P] = a V + b, sorted; `count` [P]; both int64."""

    code: np.ndarray
    count: np.ndarray


def bigram_loss(train: Bins, validation: Bins) -> float:
    """Return the mean of -log p(b | a) over all neighbours in `validation`, with counts from `train`; nats a token.

    Takes some 0.4 s and 60 MB for a million training tokens. Uses at most the first `MOST_TOKENS` of each.
    """
    vocab_size = train.sidecar.vocab_size
    codes = pair_codes(train.read(0, min(train.num_tokens, MOST_TOKENS)), vocab_size)
    held_out = np.arange(len(codes)) // max(len(codes) // (10 * NUM_STRETCHES), 1) % 10 == 9
    held_out[-1] = True
    rest, tuning = count(codes[~held_out]), count(codes[held_out])
    losses = [cross_entropy(rest, tuning, vocab_size, discount) for discount in DISCOUNTS]
    best = DISCOUNTS[int(np.argmin(losses))]
    held_out_codes = pair_codes(validation.read(0, min(validation.num_tokens, MOST_TOKENS)), vocab_size)
    return cross_entropy(count(codes), count(held_out_codes), vocab_size, best)


def pair_codes(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return one number for each pair of neighbours: tokens [N] -> int64 [N-1]."""
    return tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]


def count(codes: np.ndarray) -> PairCounts:
    return PairCounts(*np.unique(codes, return_counts=True))


def cross_entropy(train: PairCounts, test: PairCounts, vocab_size: int, discount: float) -> float:
    """Return the mean of -log p over the test pairs."""
    probability = probabilities(train, test.code, vocab_size, discount)
    return float(-(test.count * np.log(probability)).sum() / test.count.sum())


def probabilities(train: PairCounts, codes: np.ndarray, vocab_size: int, discount: float) -> np.ndarray:
    """Return p(b | a) of each pair code [P], float64 [P]."""
    before, after = np.divmod(train.code, vocab_size)
    context_count = np.bincount(before, weights=train.count, minlength=vocab_size)
    types_after = np.bincount(before, minlength=vocab_size)
    types_before = np.bincount(after, minlength=vocab_size)
    reserved = discount * (types_before > 0).sum() / vocab_size
    q = (np.maximum(types_before - discount, 0) + reserved) / types_before.sum()

    a, b = np.divmod(codes, vocab_size)
    place = np.minimum(np.searchsorted(train.code, codes), len(train.code) - 1)
    pair_count = np.where(train.code[place] == codes, train.count[place], 0)
    seen = np.maximum(context_count[a], 1)
    p = (np.maximum(pair_count - discount, 0) + discount * types_after[a] * q[b]) / seen
    return np.where(context_count[a] > 0, p, q[b])
