"""Seeds that a text names, and the uniform deviates that each of many seeds gives first.

The deviates are those of Python's ``random.Random(seed).random()``, the one sequence that Python promises to keep.
Nothing here reads a clock.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint32]
Words = WordArray | np.uint32

_word = np.uint32
STATE, MIDDLE = 624, 397  # words of the generator's state, and how far ahead each new one looks
LANES = 4096
"""Seeds whose states are made side by side: 10 MB."""
FEW = 1024
"""Below so many seeds, numpy's calls cost more than the generators."""


def derive_seed(base_seed: int, name: str) -> int:
    """First 8 bytes, big-endian, of SHA-256 of ``<base_seed>:<name>``; the paper's rule, used for every source."""
    return int.from_bytes(hashlib.sha256(f"{base_seed}:{name}".encode()).digest()[:8], "big")


def uniforms(seeds: Sequence[int], count: int) -> FloatArray:
    """The first ``count`` values of ``random.Random(seed).random()``, shape (seeds, count). Seeds: below 2^64."""
    if len(seeds) < FEW or 2 * count > STATE - MIDDLE:
        generators = map(random.Random, seeds)
        return np.array([[each.random() for _ in range(count)] for each in generators]).reshape(len(seeds), count)
    table = np.array(seeds, dtype=np.uint64)
    parts = [_first_words(table[first : first + LANES], 2 * count) for first in range(0, len(table), LANES)]
    words = np.concatenate(parts, axis=1)
    # 53 bits of two words: genrand_res53 of mt19937ar.c.
    high, low = ((words[first::2] >> first + 5).astype(np.float64) for first in (0, 1))
    return ((high * 2.0**26 + low) * 2.0**-53).T


def _first_words(seeds: npt.NDArray[np.uint64], count: int) -> WordArray:
    """The first words of MT19937, seeded by an array as CPython does with an integer; shape (count, seeds).

    count: at most STATE - MIDDLE, so that no word looks at another new one. Source: init_by_array and genrand_uint32 of
    mt19937ar.c (Matsumoto and Nishimura, 2002).
    """
    low, high = seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)
    # A seed of one word is added at every step; of two, each at every other, the second with its place.
    added = (low, np.where(seeds >> np.uint64(32), high + _word(1), low))
    state = np.empty((STATE, len(seeds)), dtype=np.uint32)
    state[0] = _start()[0]
    for place in range(1, STATE):
        _mix(state[place - 1], 1664525, _start()[place], added[1 - place % 2], out=state[place])
    _mix(state[STATE - 1], 1664525, state[1], added[1], out=state[1])
    for place in (*range(2, STATE), 1):
        before = state[place - 1 if place > 1 else STATE - 1]
        _mix(before, 1566083941, state[place], _word(2**32 - place), out=state[place])
    state[0] = 1 << 31
    joined = (state[:count] & _word(1 << 31)) | (state[1 : count + 1] & _word((1 << 31) - 1))
    words = state[MIDDLE : MIDDLE + count] ^ (joined >> _word(1)) ^ (joined & _word(1)) * _word(0x9908B0DF)
    words ^= words >> _word(11)
    words ^= words << _word(7) & _word(0x9D2C5680)
    words ^= words << _word(15) & _word(0xEFC60000)
    words ^= words >> _word(18)
    return words


def _mix(
    before: WordArray, factor: int, old: WordArray | np.uint32, added: WordArray | np.uint32, out: WordArray
) -> None:
    """``(old ^ (before ^ before >> 30) * factor) + added``, modulo 2^32."""
    mixed = before >> _word(30)
    mixed ^= before
    mixed *= _word(factor)
    mixed ^= old
    np.add(mixed, added, out=out)


@lru_cache(maxsize=1)
def _start() -> tuple[np.uint32, ...]:
    """The state that every seeding by an array begins with: init_genrand(19650218)."""
    words = [19650218]
    for place in range(1, STATE):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + place) % 2**32)
    return tuple(map(_word, words))
