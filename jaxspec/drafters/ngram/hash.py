"""Hashes of n-grams: two 32-bit words for a path of tokens, the same on the host and on the device."""

from __future__ import annotations

import numpy as np

FACTORS = (0x9E3779B1, 0x85EBCA77)
SALTS = (0x27D4EB2F, 0x165667B1)


def mix(tokens, word: int):
    """A hash of single tokens (MurmurHash3's finaliser); takes and gives uint32 arrays of NumPy or jax."""
    x = tokens + np.uint32(SALTS[word])
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def extend(path, tokens, word: int):
    """The hash of a path and one more token."""
    return path * np.uint32(FACTORS[word]) + mix(tokens.astype(np.uint32), word)


def bucket(first, second, bits: int):
    """Which of 2**bits buckets a path of these two words belongs to, as uint32."""
    return ((first ^ (second * np.uint32(0xC2B2AE3D))) * np.uint32(0x9E3779B1)) >> np.uint32(32 - bits)


def words(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words of uint64 keys."""
    return (keys >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)


def ngram_keys(tokens: np.ndarray, depth: int) -> np.ndarray:
    """[T, depth] uint64: the hash of the n-gram of n + 1 tokens that starts at each of T places, first word on top.

    n-grams that would reach beyond the text have 0, the hash of the empty path.
    """
    size = tokens.size
    keys = np.zeros((size, depth), np.uint64)
    mixed = [mix(tokens.astype(np.uint32), word) for word in range(2)]
    path = [np.zeros(size, np.uint32) for _ in range(2)]
    for n in range(min(depth, size)):
        for word in range(2):
            path[word] = path[word][: size - n] * np.uint32(FACTORS[word]) + mixed[word][n:]
        keys[: size - n, n] = path[0].astype(np.uint64) << np.uint64(32) | path[1]
    return keys
