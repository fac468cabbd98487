"""The bigram model is a distribution, agrees with a plain implementation, and is a fair bar."""

import itertools
import json
import shutil
from collections import defaultdict
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.data import DataConfig, MixEntry, Source
from trainer.data import Bins, Prepared, bigram_loss, prepare
from trainer.data.bigram import DISCOUNTS, count, cross_entropy, pair_codes, probabilities
from trainer.data.bins import Shard
from trainer.data.prepared import BIGRAM, SUMMARY, accept_prepared, add_bigram, open_prepared
from trainer.digests import write_signed

tokens_of_seven = st.lists(st.integers(0, 6), min_size=3, max_size=60)


def plain_loss(train: list[int], test: list[int], vocab_size: int, discount: float) -> float:
    """Interpolated Kneser-Ney with dictionaries, straight from its definition."""
    after: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    before: dict[int, set[int]] = defaultdict(set)
    for a, b in itertools.pairwise(train):
        after[a][b] += 1
        before[b].add(a)
    types = sum(len(set_) for set_ in before.values())

    def q(b: int) -> float:
        return (max(len(before.get(b, ())) - discount, 0) + discount * len(before) / vocab_size) / types

    def p(a: int, b: int) -> float:
        if a not in after:
            return q(b)
        total = sum(after[a].values())
        return (max(after[a].get(b, 0) - discount, 0) + discount * len(after[a]) * q(b)) / total

    pairs = list(itertools.pairwise(test))
    return -sum(log(p(a, b)) for a, b in pairs) / len(pairs)


@given(tokens_of_seven, tokens_of_seven, st.floats(0.05, 0.95))
def test_loss_is_that_of_a_plain_implementation(train: list[int], test: list[int], discount: float) -> None:
    seen, asked = (count(pair_codes(np.array(tokens, np.uint16), 7)) for tokens in (train, test))
    assert cross_entropy(seen, asked, 7, discount) == pytest.approx(plain_loss(train, test, 7, discount))


@given(tokens_of_seven, st.floats(0.05, 0.95))
def test_probabilities_after_every_token_sum_to_one(train: list[int], discount: float) -> None:
    counts = count(pair_codes(np.array(train, np.uint16), 7))
    p = probabilities(counts, np.arange(49), 7, discount).reshape(7, 7)
    assert (p > 0).all()
    assert p.sum(axis=1) == pytest.approx(np.ones(7))


def test_pairs_of_a_large_vocabulary_do_not_collide() -> None:
    tokens = np.array([0, 65535, 65535, 1], np.uint16)
    assert pair_codes(tokens, 65536).tolist() == [65535, 65535 * 65536 + 65535, 65535 * 65536 + 1]


def test_the_discount_comes_from_training_data_and_is_near_the_best(prepared: Prepared) -> None:
    loss = bigram_loss(prepared.train, prepared.validation)
    seen, asked = (count(pair_codes(bins.tokens, 512)) for bins in (prepared.train, prepared.validation))
    losses = [cross_entropy(seen, asked, 512, discount) for discount in DISCOUNTS]
    assert min(losses) <= loss < (min(losses) + max(losses)) / 2


def test_the_bigram_model_beats_unigram_and_uniform(prepared: Prepared) -> None:
    frequency = np.bincount(prepared.train.tokens, minlength=512) + 1.0
    unigram = -np.log(frequency / frequency.sum())[prepared.validation.tokens[1:]].mean()
    assert bigram_loss(prepared.train, prepared.validation) < unigram - 0.5 < log(512) - 0.5


@pytest.mark.parametrize("length", [3, 10, 700])
def test_very_little_text_has_a_loss_too(prepared: Prepared, length: int) -> None:
    sidecar = replace(prepared.train.sidecar, num_tokens=length)
    bins = Bins([Shard(prepared.train.path, sidecar)])
    assert 0 < bigram_loss(bins, prepared.validation) < 2 * log(512)


def test_the_bigram_loss_is_computed_with_the_data_or_later(prepared: Prepared, tmp_path: Path) -> None:
    assert prepared.bigram_loss == bigram_loss(prepared.train, prepared.validation)
    older = shutil.copytree(prepared.folder, tmp_path / "older")
    content = json.loads((older / SUMMARY).read_text())
    del content[BIGRAM]
    write_signed(older / SUMMARY, {key: value for key, value in content.items() if key != "digest"})
    mix = [MixEntry("a", path=str(older)), MixEntry("b", path=str(prepared.folder))]
    both = DataConfig(source=Source.bins, mix=mix)
    assert open_prepared(older).bigram_loss is prepare(both, 512).bigram_loss is None
    assert add_bigram(older) == open_prepared(older).bigram_loss == prepared.bigram_loss
    assert prepare(both, 512).bigram_loss == pytest.approx(prepared.bigram_loss)
    accept_prepared(older)
    assert open_prepared(older).bigram_loss is None, "of other tokens, perhaps"
