"""A random order of any number of windows, without a list: a keyed permutation computed on demand.

A shuffled list of all windows costs 8 bytes a window in every process and seconds at each epoch, and its order depends
on the version of the shuffling library. Here the place of a window is a function of (seed, epoch, index) alone: a
Feistel network over the b bits of the index, halves exchanged after each round,

    (left, right) -> (right, left XOR F_round(right)),

which is a permutation of [0, 2^b) for any F. Indexes that it maps above the number of windows go through it again until
they fall inside ("cycle walking"), which makes it a permutation of [0, n). Source: Black and Rogaway 2002, "Ciphers
with Arbitrary Finite Domains"; F is the finaliser of SplitMix64 (Steele et al. 2014).
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # even, so that unequal halves are back in place; four are enough for statistics
SMALLEST_BITS = 6  # with fewer bits the halves have nothing to mix


def permute(index: np.ndarray, epoch: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Map places in the shuffled order to windows. `index` [B] in [0, count), `epoch` [B]; int64 [B] in [0, count)."""
    bits = max((count - 1).bit_length(), SMALLEST_BITS)
    low_bits = bits // 2
    key = _mix(_mix(np.full(epoch.shape, seed, dtype=np.uint64)) + epoch.astype(np.uint64))
    window = _network(index.astype(np.uint64), key, low_bits, bits - low_bits)
    while (outside := window >= count).any():
        window[outside] = _network(window[outside], key[outside], low_bits, bits - low_bits)
    return window.astype(np.int64)


def _network(value: np.ndarray, key: np.ndarray, left_bits: int, right_bits: int) -> np.ndarray:
    """Run one pass of the permutation of [0, 2^(left_bits + right_bits)); uint64 [B]."""
    left = value >> np.uint64(right_bits)
    right = value & _mask(right_bits)
    for round_number in range(ROUNDS):
        noise = _mix(key + right + np.uint64(round_number << 56))
        left, right = right, left ^ (noise & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64: every bit of the result depends on every bit of the value; uint64, modulo 2^64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
